"""Which rows are too long, by the count of the same tokenizer that cuts them."""

import pytest
import tiny

from smelt.core.data import Example, Split
from smelt.core.errors import InputError
from smelt.execute.lengths import require_lengths
from smelt.runtime.models.checkpoint import load_tokenizer
from smelt.runtime.predict import encode_texts


def test_pairs_count_together_and_every_split_is_named(tmp_path):
    folder = tiny.bert(tmp_path)
    word = "cat "
    rows = [
        Example(word * 29, label=0),
        Example(word * 30, label=0),
        Example(word * 31, label=0),  # with [CLS] and [SEP] one more than 32
        Example(word * 15, text_pair=word * 14, label=0),
        Example(word * 15, text_pair=word * 15, label=0),  # with [CLS] and two [SEP] one more
    ]
    split = Split("x.jsonl", tuple(rows))
    pairs = [e.text_pair for e in rows]
    cut = encode_texts([e.text for e in rows], load_tokenizer(folder), 32, pairs).truncated
    with pytest.raises(InputError) as caught:
        require_lengths(folder, "text-classification", {"train": split, "test": split})
    first, second = str(caught.value).splitlines()
    assert first.startswith(f"x.jsonl (train): {cut} rows hold texts of more than 32 tokens")
    assert "row 3, 5." in first
    assert second.startswith("x.jsonl (test): ")
    require_lengths(folder, "text-classification", {"test": Split("x", (rows[0], rows[1], rows[3]))})


def test_targets_count_and_running_text_does_not(tmp_path):
    folder = tiny.marian(tmp_path)
    rows = (Example("a man", ("ein mann",)), Example("a man", ("ein mann", "ein mann " * 40)))
    with pytest.raises(InputError, match=r"1 row holds .* row 2\."):
        require_lengths(folder, "translation", {"train": Split("x", rows)})
    lined = (rows[0], Example("a man", ("ein mann " * 40,), line=12))
    with pytest.raises(InputError, match=r"1 row holds .* line 12\."):
        require_lengths(folder, "translation", {"train": Split("x", lined)})
    require_lengths(folder, "language-modeling", {"train": Split("x", rows)})
