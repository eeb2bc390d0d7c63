"""Rows, batches and labels."""

import random

import pytest
import torch
from transformers import BertConfig, DistilBertConfig, MarianConfig, RobertaConfig
from transformers.models.marian.modeling_marian import shift_tokens_right

from smelt.compress.training_data import (
    Row,
    classifier_targets,
    collate,
    encode_targets,
    group_by_length,
    plan_batches,
)
from smelt.core.data import Example
from smelt.core.errors import InputError


def rows_of(count, seed=0):
    r = random.Random(seed)
    return [Row([1] * r.randint(1, 30), None, [2] * r.randint(1, 30)) for _ in range(count)]


def test_decoder_inputs_are_those_of_transformers():
    config = MarianConfig(vocab_size=64, pad_token_id=63, decoder_start_token_id=63, eos_token_id=0)
    batch = collate([Row([5, 6, 0], None, [7, 8, 9, 0]), Row([5, 0], None, [4, 0])], config)
    assert batch["labels"].tolist() == [[7, 8, 9, 0], [4, 0, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["input_ids"][1].tolist() == [5, 0, 63]
    wanted = shift_tokens_right(batch["labels"], 63, 63)
    seen = batch["labels"] != -100  # behind the last label no loss looks, so what stands there is free
    assert batch["decoder_input_ids"][seen].tolist() == wanted[seen].tolist()


@pytest.mark.parametrize("tokens", [None, 200])
def test_every_row_is_in_one_batch_and_padding_is_small(tokens):
    rows = rows_of(500)
    batches = group_by_length(rows, 16, tokens, random.Random(1))
    assert sorted(i for batch in batches for i in batch) == list(range(500))
    padded = [
        len(b) * (max(rows[i].tokens[0] for i in b) + max(rows[i].tokens[1] for i in b)) for b in batches
    ]
    if tokens:
        assert max(padded) <= tokens
    chance = list(range(500))
    random.Random(1).shuffle(chance)
    blind = [chance[at : at + 16] for at in range(0, 500, 16)]
    blind_padded = sum(
        len(b) * (max(rows[i].tokens[0] for i in b) + max(rows[i].tokens[1] for i in b)) for b in blind
    )
    assert sum(padded) < 0.85 * blind_padded


def test_a_plan_has_the_asked_length_and_shuffles_each_epoch():
    rows = rows_of(64)
    assert len(plan_batches(rows, 8, None, epochs=0.5, steps=None, seed=1)) == 4
    assert len(plan_batches(rows, 8, None, epochs=9.0, steps=3, seed=1)) == 3
    plan = plan_batches(rows, 8, None, epochs=2.0, steps=None, seed=1)
    assert sorted(i for b in plan[:8] for i in b) == sorted(i for b in plan[8:] for i in b) == list(range(64))
    assert plan[:8] != plan[8:]
    assert plan == plan_batches(rows, 8, None, epochs=2.0, steps=None, seed=1)


def test_labels_are_names_numbers_or_numbers_as_text():
    config = BertConfig(num_labels=2, id2label={0: "bad", 1: "good"}, label2id={"bad": 0, "good": 1})
    assert classifier_targets([Example("a", label=v) for v in ("good", 0, "1")], config) == [1, 0, 1]
    with pytest.raises(
        InputError, match=r"row 2: the label 'goood' .* bad, good or 0 to 1. Did you mean 'good'"
    ):
        classifier_targets([Example("a", label="bad"), Example("b", label="goood")], config)
    with pytest.raises(InputError, match="row 1: the label 2"):
        classifier_targets([Example("a", label=2)], config)


def test_several_labels_and_numbers_become_rows_of_floats():
    several = BertConfig(num_labels=3, problem_type="multi_label_classification")
    rows = [Example("a", label=("LABEL_2", 0)), Example("b", label="LABEL_1|2"), Example("c", label=())]
    assert classifier_targets(rows, several) == [(1.0, 0.0, 1.0), (0.0, 1.0, 1.0), (0.0, 0.0, 0.0)]
    number = BertConfig(num_labels=1)
    assert classifier_targets([Example("a", label="-2.5"), Example("b", label=3)], number) == [
        (-2.5,),
        (3.0,),
    ]
    batch = collate([Row([1, 2], None, (0.5,)), Row([3], None, (-100.0,))], number)
    assert batch["labels"].dtype == torch.float32
    assert batch["labels"].tolist() == [[0.5], [-100.0]]
    assert collate([Row([1], None, 2)], several)["labels"].dtype == torch.int64


def test_token_types_are_fed_only_to_models_that_have_them():
    rows = [Row([1, 2], [0, 1], 0), Row([3], [0], 1)]
    assert "token_type_ids" in collate(rows, BertConfig())
    assert "token_type_ids" not in collate(rows, DistilBertConfig())
    assert "token_type_ids" not in collate(rows, RobertaConfig())


def test_a_cut_target_keeps_its_end_token():
    def tokenizer(text_target, **kwargs):
        return {"input_ids": [[*range(1, len(t) + 1), 0] for t in text_target]}

    assert encode_targets(["abcdef", "ab"], tokenizer, 4) == ([[1, 2, 3, 0], [1, 2, 0]], 1)
