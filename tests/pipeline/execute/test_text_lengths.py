"""Which rows are too long, by the count of the same tokenizer that cuts them."""

import re

import pytest

from smelt.core.errors import InputError
from smelt.data.splits import Example, Split
from smelt.models.checkpoint import load_tokenizer
from smelt.models.tokenizer import encode_texts
from smelt.pipeline.execute.latency_scores import require_texts_fit
from tests.support.expected_errors import raises_code
from tests.support.models import tiny

pytestmark = pytest.mark.quick


def numbers(text):
    """Return the numbers in a message: of texts, the limit in tokens, and the places of the texts."""
    return [int(digits) for digits in re.findall(r"\d+", text)]


def test_text_pairs_are_counted_together_in_every_split(tmp_path):
    folder = tiny.write_bert(tmp_path)
    repeated_word = "cat "
    rows = [
        Example(repeated_word * 29, label=0),
        Example(repeated_word * 30, label=0),
        Example(repeated_word * 31, label=0),  # with [CLS] and [SEP] one more than 32
        Example(repeated_word * 15, text_pair=repeated_word * 14, label=0),
        Example(
            repeated_word * 15, text_pair=repeated_word * 15, label=0
        ),  # with [CLS] and two [SEP] one more
    ]
    split = Split("x.jsonl", tuple(rows))
    pairs = [e.text_pair for e in rows]
    cut = encode_texts([e.text for e in rows], load_tokenizer(folder), 32, pairs).truncated
    with raises_code("texts-too-long", InputError) as excinfo:
        require_texts_fit(folder, "text-classification", {"train": split, "test": split})
    first, second = (message.message for message in excinfo.value.messages)
    assert (numbers(first), "train" in first, "test" in second) == ([cut, 32, 3, 5], True, True)
    assert numbers(second) == numbers(first)
    require_texts_fit(folder, "text-classification", {"test": Split("x", (rows[0], rows[1], rows[3]))})


def test_long_targets_count_and_running_text_does_not(tmp_path):
    folder = tiny.write_marian(tmp_path)
    rows = (Example("a man", ("ein mann",)), Example("a man", ("ein mann", "ein mann " * 40)))
    with raises_code("texts-too-long", InputError) as excinfo:
        require_texts_fit(folder, "translation", {"train": Split("x", rows)})
    assert numbers(str(excinfo.value)) == [1, 40, 2]
    long_example = (rows[0], Example("a man", ("ein mann " * 40,), line=12))
    with raises_code("texts-too-long", InputError) as excinfo:
        require_texts_fit(folder, "translation", {"train": Split("x", long_example)})
    assert numbers(str(excinfo.value)) == [1, 40, 12]
    require_texts_fit(folder, "language-modeling", {"train": Split("x", rows)})
