"""The rows that parity is asked on differ in length, whatever the data is like."""

import json
from functools import partial

import numpy as np
import pytest

from smelt.data.splits import Example, Split
from smelt.export.parity.parity_samples import PARITY_LENGTH, PARITY_ROWS, causal_batch, parity_batch
from smelt.models.checkpoint import load_tokenizer
from tests.support.models import causal, classifiers, seq2seq, tiny

pytestmark = pytest.mark.quick

classifier_batch = partial(parity_batch, task="text-classification")
WORDS = [w for s in tiny.SENTENCES for w in s.split()]


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return classifiers.write_bert(tmp_path_factory.mktemp("bert") / "m")


def asked(folder, texts, choose=classifier_batch, limit=100, pairs=None, **config):
    """Return the batch for rows of these texts, and whether it is real."""
    samples = tuple(Example(t, text_pair=pairs and pairs[i]) for i, t in enumerate(texts))
    data = {"validation": Split("made", samples)} if samples else {}
    stored = json.loads((folder / "config.json").read_text())
    return choose(data, load_tokenizer(folder), stored | config, limit)


def lengths(batch):
    return batch.attention_mask.sum(axis=1).tolist()


def test_samples_cover_shortest_to_longest_lengths(bert):
    texts = ["the cat sleeps"] * 50 + ["cat"] + [" ".join(WORDS[:20])]
    batch, is_real = asked(bert, texts)
    assert is_real
    assert len(batch.input_ids) == PARITY_ROWS
    assert (min(lengths(batch)), max(lengths(batch))) == (3, 22)
    assert (batch.input_ids[0, 3:] == 0).all()


def test_equal_length_samples_are_truncated_differently_and_keep_eos(bert):
    batch, is_real = asked(bert, ["the cat sleeps in the sun"] * 3)
    assert is_real
    assert lengths(batch) == [1, 2, 3, 4, 5, 6, 7, 8]
    separator = batch.input_ids[-1, 7]
    assert [row[n - 1] for row, n in zip(batch.input_ids, lengths(batch), strict=True)] == [
        separator
    ] * PARITY_ROWS


def test_single_sample_is_sufficient(bert):
    assert len(set(lengths(asked(bert, ["two dogs run on the grass"])[0]))) > 4


def test_token_types_mark_second_half_if_model_has_two_types(bert):
    batch, _ = asked(bert, tiny.SENTENCES)
    assert batch.token_type_ids is not None
    halves = batch.token_type_ids.sum(axis=1) / batch.attention_mask.sum(axis=1)
    assert ((halves > 0.3) & (halves < 0.7)).all()
    assert (batch.token_type_ids <= batch.attention_mask).all()
    single_type_batch = asked(bert, tiny.SENTENCES, type_vocab_size=1)[0]
    assert single_type_batch.token_type_ids is not None
    assert not single_type_batch.token_type_ids.any()


def test_truncated_pairs_keep_token_types(bert):
    batch, is_real = asked(bert, ["the cat sleeps"] * 8, pairs=["two dogs run"] * 8)
    assert is_real
    assert lengths(batch)[-1] == 9
    assert len(set(lengths(batch))) == PARITY_ROWS


def test_random_padded_ids_are_used_without_data(bert):
    batch, is_real = asked(bert, [], limit=6)
    assert not is_real
    assert batch.input_ids.shape == (PARITY_ROWS, 6)
    assert len(set(lengths(batch))) > 4
    assert batch.input_ids.max() < json.loads((bert / "config.json").read_text())["vocab_size"]


def test_longest_sample_covers_all_relative_distances(tmp_path):
    folder = seq2seq.write_t5(tmp_path / "t5")
    batch, is_real = asked(folder, ["she sings a song"], relative_attention_max_distance=60, limit=512)
    assert is_real
    assert max(lengths(batch)) == 68
    assert min(lengths(batch)) < 10
    assert max(lengths(asked(folder, ["she sings"], relative_attention_max_distance=60, limit=30)[0])) == 30


def test_samples_do_not_exceed_model_length(bert):
    assert max(lengths(asked(bert, [" ".join(WORDS * 9)], limit=10)[0])) == 10
    assert max(lengths(asked(bert, [" ".join(WORDS * 9)], limit=500)[0])) == PARITY_LENGTH


@pytest.mark.parametrize(
    ("texts", "is_real"), [([causal.TEXT] * 30, True), ([causal.TEXT], True), ([], False)]
)
def test_prompts_are_left_padded_to_different_lengths(tmp_path, texts, is_real):
    folder = causal.write_model(tmp_path / "gpt2", "gpt2")
    batch, is_real_batch = asked(folder, texts, causal_batch, limit=64)
    assert is_real_batch == is_real
    assert len(set(lengths(batch))) > 4
    assert lengths(batch)[-1] == batch.input_ids.shape[1]
    assert (np.diff(batch.attention_mask, axis=1) >= 0).all()
    assert batch.input_ids.shape[1] <= PARITY_LENGTH
