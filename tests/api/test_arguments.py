"""What callers give instead of texts is refused with what was read and how to mend it."""

import numpy as np
import pytest

from smelt.api.arguments import as_count, as_texts, as_texts_or_pairs
from smelt.core.errors import InputError
from tests.support.expected_errors import raises_code

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("function", [as_texts, as_texts_or_pairs])
@pytest.mark.parametrize(("value", "code", "setting", "values"), [
    (None, "not-a-list", None, ["None."]), ("a man", "not-a-list", None, ["[TEXT]"]),
    (b"a man", "not-a-list", None, ["b'a man' (bytes)."]), (3, "not-a-list", None, ["3 (int)."]),
    (2.5, "not-a-list", None, ["2.5 (float)."]), ({"a": 1}, "not-a-list", None, ["{'a': 1} (dict)."]),
    ({"a"}, "not-a-list", None, ["{'a'} (set)."]), (["a", None], "not-a-text", "texts[1]", ["None."]),
    (["a", 3], "not-a-text", "texts[1]", ["3 (int)."]),
    ([b"a"], "not-a-text", "texts[0]", ["b'a' (bytes).", ".decode('utf-8')."]),
    ([["a", "b"]], "not-a-text", "texts[0]", ["['a', 'b'] (list)."]),
    (["a", "b\ud800"], "lone-surrogate", "texts[1]", ["'\\ud800'"]),
    (["x" * 500, ["y" * 500]], "not-a-text", "texts[1]", [" ['" + "y" * 55 + "... (list)."]),
])  # fmt: skip
def test_invalid_texts_are_rejected(function, value, code, setting, values):
    with raises_code(code, InputError) as excinfo:
        function(value)
    assert excinfo.value.setting == setting
    assert str(excinfo.value).startswith(f"{setting}: " if setting else "")
    assert [fragment for fragment in values if fragment not in str(excinfo.value)] == []


@pytest.mark.parametrize(("function", "value", "code", "setting"), [
    (as_texts, [("a", "b")], "pairs-not-taken", "texts[0]"),
    (as_texts_or_pairs, [["a", "b"]], "not-a-text", "texts[0]"),
    (as_texts_or_pairs, [("a",)], "not-a-pair", "texts[0]"),
    (as_texts_or_pairs, ["a", ("b", None)], "not-a-text", "texts[1][1]"),
])  # fmt: skip
def test_pairs_are_only_for_classifiers_and_have_two_texts(function, value, code, setting):
    with raises_code(code, InputError) as excinfo:
        function(value)
    assert excinfo.value.setting == setting
    assert as_texts_or_pairs(["a", ("b", "c")]) == ["a", ("b", "c")]


@pytest.mark.parametrize("value", [["a", "b"], ("a", "b"), iter(["a", "b"]), np.array(["a", "b"])])
def test_any_sequence_of_texts_is_accepted(value):
    texts = as_texts(value)
    assert texts == ["a", "b"]
    assert {type(text) for text in texts} == {str}


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "8", None])
def test_counts_are_positive_integers(value):
    with raises_code("wrong-value", InputError) as excinfo:
        as_count(value, "batch_size")
    assert excinfo.value.setting == "batch_size"
    assert repr(value) in str(excinfo.value)


@pytest.mark.parametrize("value", [1, 8, np.int64(8)])
def test_integers_of_any_type_are_accepted(value):
    assert as_count(value, "batch_size") == value
    assert type(as_count(value, "batch_size")) is int
