"""Prompts: tokens, padding on the left, the end of a long one."""

import causal
import pytest

from smelt.core.errors import InputError
from smelt.runtime.prompts import encode_prompts, pack_left, pad_of, prompt_batches


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    return causal.tokenizer(tmp_path_factory.mktemp("words"))


def test_prompts_end_together_when_they_differ_in_length():
    batch = pack_left([[5, 6, 7], [8]], 0)
    assert batch.input_ids.tolist() == [[5, 6, 7], [0, 0, 8]]
    assert batch.attention_mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_end_of_a_prompt_stays_when_it_is_too_long(words):
    full = words("The old house stands near the river.")["input_ids"]
    assert encode_prompts(["The old house stands near the river."], words, 3) == [full[-3:]]


def test_empty_prompt_begins_with_the_first_token_when_there_is_one(words):
    assert encode_prompts([""], words, 8) == [[words.bos_token_id]]
    words = type(
        "W", (), {"bos_token_id": None, "eos_token_id": None, "__call__": lambda *a, **k: {"input_ids": []}}
    )()
    with pytest.raises(InputError, match="no token that a text begins with"):
        encode_prompts([""], words, 8)


def test_batches_hold_all_places_once_longest_first(words):
    texts = ["a", "the cat sleeps", "The old house stands near the river."]
    batches = prompt_batches(texts, words, 2, 64)
    assert [rows for rows, _ in batches] == [[2, 1], [0]]
    assert pad_of(words) == words.eos_token_id
