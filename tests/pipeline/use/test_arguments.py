"""What callers give instead of texts is refused with what was read and how to mend it."""

import numpy as np
import pytest

from smelt.core.errors import InputError
from smelt.use.arguments import count_of, texts_of, texts_or_pairs_of


def refused(function, *arguments):
    with pytest.raises(InputError) as caught:
        function(*arguments)
    return str(caught.value)


@pytest.mark.parametrize("function", [texts_of, texts_or_pairs_of])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "expected a list of texts, read None."),
        ("a man", "expected a list of texts, read one text. Put it into a list: [TEXT]."),
        (b"a man", "expected a list of texts, read b'a man' (bytes)."),
        (3, "expected a list of texts, read 3 (int)."),
        (2.5, "expected a list of texts, read 2.5 (float)."),
        ({"a": 1}, "expected a list of texts, read {'a': 1} (dict)."),
        ({"a"}, "expected a list of texts, read {'a'} (set)."),
        (["a", None], "texts[1]: expected a text, read None."),
        (["a", 3], "texts[1]: expected a text, read 3 (int)."),
        ([b"a"], "texts[0]: expected a text, read b'a' (bytes). Decode it first: .decode('utf-8')."),
        ([["a", "b"]], "texts[0]: expected a text, read ['a', 'b'] (list)."),
        (["a", "b\ud800"], "texts[1]: holds '\\ud800', half of a surrogate pair, which is no character."),
        (["x" * 500, ["y" * 500]], "texts[1]: expected a text, read ['" + "y" * 55 + "... (list)."),
    ],
)
def test_what_are_no_texts_is_refused(function, given, message):
    assert refused(function, given).startswith(message)


def test_pairs_are_for_classifiers_and_have_two_texts():
    assert refused(texts_of, [("a", "b")]).endswith("Pairs of texts are for predict.")
    assert texts_or_pairs_of(["a", ("b", "c")]) == ["a", ("b", "c")]
    assert refused(texts_or_pairs_of, [["a", "b"]]).endswith("A pair of texts is a tuple: (FIRST, SECOND).")
    assert refused(texts_or_pairs_of, [("a",)]) == (
        "texts[0]: expected a text or a pair of texts, read ('a',) (tuple)."
    )
    assert refused(texts_or_pairs_of, ["a", ("b", None)]) == "texts[1][1]: expected a text, read None."


@pytest.mark.parametrize("given", [["a", "b"], ("a", "b"), iter(["a", "b"]), np.array(["a", "b"])])
def test_any_row_of_texts_is_taken(given):
    found = texts_of(given)
    assert found == ["a", "b"]
    assert {type(text) for text in found} == {str}


@pytest.mark.parametrize("given", [0, -1, True, 2.0, "8", None])
def test_counts_are_whole_numbers_from_one_on(given):
    found = refused(count_of, given, "batch_size")
    assert found.startswith(f"batch_size: expected a whole number of at least 1, read {given!r}")


@pytest.mark.parametrize("given", [1, 8, np.int64(8)])
def test_whole_numbers_of_any_kind_are_taken(given):
    assert count_of(given, "batch_size") == given
    assert type(count_of(given, "batch_size")) is int
