"""Running text in windows: every token predicted once, bytes that add up."""

import gzip

import causal
import pytest

from smelt.core.data import Columns, Split
from smelt.core.errors import InputError
from smelt.core.rows.examples import read_split
from smelt.core.windows import Windows
from smelt.runtime.text.windows import cut_windows, joined, window_length


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    return causal.tokenizer(tmp_path_factory.mktemp("words"))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    causal.lines(folder / "t.txt", 2)
    return read_split("t.txt", "language-modeling", Columns(), folder)


def _cut(text, words, **windows):
    return cut_windows(Split(text.origin, text.examples, Windows(separator="\n", **windows)), words, 64)


@pytest.mark.parametrize(("length", "stride"), [(16, 16), (16, 5), (64, None), (7, 1), (2, 2)])
def test_windows_predict_every_token_once_when_they_overlap_or_touch(text, words, length, stride):
    ids = words(joined(text))["input_ids"]
    found = _cut(text, words, length=length, stride=stride)
    assert found.ids[0].tolist() == ids[: length + 1]
    assert all(len(window) <= length + 1 for window in found.ids)
    counted = [t for window, n in zip(found.ids, found.counted, strict=True) for t in window[-n:].tolist()]
    assert counted == ids[1:]
    if stride and stride < length:  # each token but those of the first window has so much before it
        least = min(len(w) - n for w, n in zip(found.ids[1:], found.counted[1:], strict=True))
        assert least >= length - stride


def test_bytes_are_those_of_the_text_when_letters_have_several(text, words):
    whole = joined(text)
    first = words.decode(words(whole)["input_ids"][:1])
    assert "ö" in whole
    assert sum(_cut(text, words, length=9).bytes) == len(whole.encode()) - len(first.encode())


def test_text_is_that_of_the_file_when_it_is_plain_or_compressed(tmp_path):
    path = causal.lines(tmp_path / "t.txt", 1)
    (tmp_path / "t.txt.gz").write_bytes(gzip.compress(path.read_bytes()))
    for name in ("t.txt", "t.txt.gz"):
        split = read_split(name, "language-modeling", Columns(), tmp_path)
        assert joined(split) + "\n" == path.read_text()
    (tmp_path / "r.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    assert joined(read_split("r.jsonl", "language-modeling", Columns(), tmp_path)) == "one\n\ntwo"


def test_length_is_refused_when_the_model_has_fewer_positions():
    assert window_length(Windows(), 64) == 64
    assert window_length(None, 10**9) == 1024
    with pytest.raises(InputError, match="length 65 is longer than the 64 tokens"):
        window_length(Windows(length=65), 64)
    with pytest.raises(ValueError, match="leave out text"):
        Windows(length=4, stride=5)


def test_text_is_refused_when_it_is_too_short_or_empty(words, tmp_path):
    with pytest.raises(InputError, match="at least 2"):
        cut_windows(Split("x", (), Windows()), words, 64)
    (tmp_path / "e.txt").write_text("\n\n")
    with pytest.raises(InputError, match="no text in this file"):
        read_split("e.txt", "language-modeling", Columns(), tmp_path)
    with pytest.raises(InputError, match=r"Plain text \(.txt\) is for language-modeling"):
        read_split("e.txt", "translation", Columns(), tmp_path)


def test_fingerprint_changes_when_the_windows_do(text):
    one, two = (Split("a", text.examples, Windows(length=n)) for n in (8, 9))
    assert one.fingerprint != two.fingerprint
    assert one.fingerprint == Split("b", text.examples, Windows(length=8)).fingerprint
    assert one.head(2).windows == one.windows
