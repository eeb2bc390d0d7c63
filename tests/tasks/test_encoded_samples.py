"""Rows, batches and labels."""

import random

import pytest
import torch
from transformers import (
    AutoTokenizer,
    BertConfig,
    DistilBertConfig,
    MarianConfig,
    MBartTokenizer,
    RobertaConfig,
)
from transformers.models.marian.modeling_marian import shift_tokens_right

from smelt.core.errors import InputError
from smelt.data.splits import Example, spread_indices
from smelt.tasks.samples import (
    EncodedSample,
    classifier_targets,
    collate,
    encode_targets,
    group_by_length,
    plan_batches,
)
from tests.support.expected_errors import raises_code
from tests.support.models import seq2seq, tiny


def rows_of(count, seed=0):
    r = random.Random(seed)
    return [EncodedSample([1] * r.randint(1, 30), None, [2] * r.randint(1, 30)) for _ in range(count)]


def test_decoder_inputs_equal_transformers():
    config = MarianConfig(vocab_size=64, pad_token_id=63, decoder_start_token_id=63, eos_token_id=0)
    batch = collate(
        [EncodedSample([5, 6, 0], None, [7, 8, 9, 0]), EncodedSample([5, 0], None, [4, 0])], config
    )
    assert batch["labels"].tolist() == [[7, 8, 9, 0], [4, 0, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["input_ids"][1].tolist() == [5, 0, 63]
    expected = shift_tokens_right(batch["labels"], 63, 63)
    is_label = batch["labels"] != -100  # behind the last label no loss looks, so what stands there is free
    assert batch["decoder_input_ids"][is_label].tolist() == expected[is_label].tolist()


@pytest.mark.parametrize("tokens", [None, 200])
def test_every_sample_is_in_one_batch_with_little_padding(tokens):
    rows = rows_of(500)
    batches = group_by_length(rows, 16, tokens, random.Random(1))
    assert sorted(i for batch in batches for i in batch) == list(range(500))
    padded = [
        len(b) * (max(rows[i].token_counts[0] for i in b) + max(rows[i].token_counts[1] for i in b))
        for b in batches
    ]
    if tokens:
        assert max(padded) <= tokens
    shuffled = list(range(500))
    random.Random(1).shuffle(shuffled)
    random_batches = [shuffled[start : start + 16] for start in range(0, 500, 16)]
    blind_padded = sum(
        len(b) * (max(rows[i].token_counts[0] for i in b) + max(rows[i].token_counts[1] for i in b))
        for b in random_batches
    )
    assert sum(padded) < 0.85 * blind_padded


def test_batch_plan_has_requested_length_and_shuffles_each_epoch():
    rows = rows_of(64)
    assert len(plan_batches(rows, 8, None, epochs=0.5, steps=None, seed=1)) == 4
    assert len(plan_batches(rows, 8, None, epochs=9.0, steps=3, seed=1)) == 3
    plan = plan_batches(rows, 8, None, epochs=2.0, steps=None, seed=1)
    first, second = ([i for batch in batches for i in batch] for batches in (plan[:8], plan[8:]))
    assert (sorted(first), sorted(second)) == (list(range(64)), list(range(64, 128)))
    assert first != [i - 64 for i in second]
    assert plan == plan_batches(rows, 8, None, epochs=2.0, steps=None, seed=1)


def test_labels_can_be_names_numbers_or_numeric_strings():
    config = BertConfig(num_labels=2, id2label={0: "bad", 1: "good"}, label2id={"bad": 0, "good": 1})
    assert classifier_targets([Example("a", label=v) for v in ("good", 0, "1")], config) == [1, 0, 1]
    with raises_code("unknown-label", InputError) as caught:
        classifier_targets([Example("a", label="bad"), Example("b", label="goood")], config)
    assert all(value in str(caught.value) for value in ("row 2", "'goood'", "bad", "'good'"))
    with raises_code("unknown-label", InputError) as caught:
        classifier_targets([Example("a", label=2)], config)
    assert "row 1" in str(caught.value)


def test_multi_labels_and_regression_targets_become_float_rows():
    several = BertConfig(num_labels=3, problem_type="multi_label_classification")
    rows = [Example("a", label=("LABEL_2", 0)), Example("b", label="LABEL_1|2"), Example("c", label=())]
    assert classifier_targets(rows, several) == [(1.0, 0.0, 1.0), (0.0, 1.0, 1.0), (0.0, 0.0, 0.0)]
    number = BertConfig(num_labels=1)
    assert classifier_targets([Example("a", label="-2.5"), Example("b", label=3)], number) == [
        (-2.5,),
        (3.0,),
    ]
    batch = collate([EncodedSample([1, 2], None, (0.5,)), EncodedSample([3], None, (-100.0,))], number)
    assert batch["labels"].dtype == torch.float32
    assert batch["labels"].tolist() == [[0.5], [-100.0]]
    assert collate([EncodedSample([1], None, 2)], several)["labels"].dtype == torch.int64


def test_token_types_are_passed_only_to_models_that_use_them():
    rows = [EncodedSample([1, 2], [0, 1], 0), EncodedSample([3], [0], 1)]
    assert "token_type_ids" in collate(rows, BertConfig())
    assert "token_type_ids" not in collate(rows, DistilBertConfig())
    assert "token_type_ids" not in collate(rows, RobertaConfig())


def mbart25(folder):
    """The tokenizer of the first mBART: a language's code stands behind the end."""
    tokens = sorted({w for s in tiny.SENTENCES for w in s.split()})
    vocabulary = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    vocabulary += [(f"▁{token}", -3.0) for token in tokens]
    MBartTokenizer(vocab=vocabulary, src_lang="en_XX", tgt_lang="de_DE").save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("make", "before", "behind"), [
    (tiny.write_marian, [], ["</s>"]), (seq2seq.write_t5, [], ["</s>"]),
    (seq2seq.write_bart, ["<s>"], ["</s>"]),
    (lambda folder: seq2seq.write_bart(folder, kind="mbart"), ["de_DE"], ["</s>"]),
    (mbart25, [], ["</s>", "de_DE"]),
], ids=["marian", "t5", "bart", "mbart-50", "mbart"])  # fmt: skip
def test_truncated_target_keeps_special_tokens(tmp_path, make, before, behind):
    tokenizer = AutoTokenizer.from_pretrained(make(tmp_path / "model"))
    texts = ["das alte haus steht am fluss " * 4, "ein lied"]
    full_ids = tokenizer(text_target=texts)["input_ids"]
    assert len(full_ids[0]) > 9 > len(full_ids[1])
    truncated_ids, num_truncated = encode_targets(texts, tokenizer, 9)
    assert num_truncated == 1
    assert truncated_ids[1] == full_ids[1]
    tokens = tokenizer.convert_ids_to_tokens(truncated_ids[0])
    inner = 9 - len(before) - len(behind)
    assert tokens[: len(before)] == before
    assert tokens[9 - len(behind) :] == behind
    assert truncated_ids[0][len(before) :][:inner] == full_ids[0][len(before) :][:inner]
    assert encode_targets(texts, tokenizer, 500) == (full_ids, 0)


@pytest.mark.parametrize(("count", "wanted"), [(100, 7), (1001, 1000), (5, 5), (5, 9), (9, 1)])
def test_spread_indices_cover_all_parts_and_depend_on_seed(count, wanted):
    indices = spread_indices(count, wanted, 3)
    assert len(indices) == min(count, wanted)
    assert indices == sorted(set(indices))
    if wanted < count:
        assert all(
            k * count // wanted <= index < (k + 1) * count // wanted for k, index in enumerate(indices)
        )
    assert indices == spread_indices(count, wanted, 3)
    assert wanted >= count - 1 or any(indices != spread_indices(count, wanted, seed) for seed in range(4, 20))
