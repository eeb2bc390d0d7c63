"""Scores of pairs: numbers however a file writes them, in all rows or in none."""

import re

import pytest

from smelt.core.errors import InputError
from smelt.data.labels import parse_score, require_all_or_none
from smelt.data.splits import Columns, Example, Split, input_texts
from smelt.tasks.read_split import read_split
from tests.support.expected_errors import raises_code


@pytest.mark.parametrize(("value", "expected"), [(3, 3.0), ("3.5", 3.5), (0, 0.0), (None, None), ("", None)])
def test_score_is_number_or_none(value, expected):
    assert parse_score(value, "f:1", "label") == expected


@pytest.mark.parametrize("value", ["high", True, [1], float("nan"), "inf"])
def test_non_numeric_score_is_reported_with_row(value):
    with raises_code("wrong-column-type", InputError) as excinfo:
        parse_score(value, "f:1", "label")
    assert all(part in str(excinfo.value) for part in ("f:1:", "'label'"))


def test_partly_missing_scores_are_reported():
    require_all_or_none([True, True], [1, 2], "label", "score")
    require_all_or_none([False], [1], "label", "score")
    with raises_code("partly-missing-column", InputError) as excinfo:
        require_all_or_none([False, True], [2, 4], "label", "score")
    assert re.findall(r"\d+", str(excinfo.value)) == ["4", "2"]


def test_csv_pairs_are_read_and_texts_are_encoded_separately(tmp_path):
    (tmp_path / "d.csv").write_text("text,text_pair,label\na,b,1\nc,d,0.5\n")
    split = read_split("d.csv", "sentence-similarity", Columns(), tmp_path)
    assert split.examples == (Example("a", text_pair="b", label=1.0), Example("c", text_pair="d", label=0.5))
    assert split.has_labels
    assert input_texts(split.examples, "sentence-similarity") == (["a", "c", "b", "d"], None)
    assert input_texts(split.examples, "text-classification") == (["a", "c"], ["b", "d"])
    assert not Split("x", (Example("a"),)).has_labels


def test_column_named_in_recipe_must_exist(tmp_path):
    (tmp_path / "d.csv").write_text("text,text_pair\na,b\n")
    assert not read_split("d.csv", "sentence-similarity", Columns(), tmp_path).has_labels
    with raises_code("missing-column", InputError) as excinfo:
        read_split("d.csv", "sentence-similarity", Columns(label="similarity"), tmp_path)
    assert "'similarity'" in str(excinfo.value)
