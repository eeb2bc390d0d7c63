"""Scores of pairs: numbers however a file writes them, in all rows or in none."""

import re

import pytest

from smelt.core.errors import InputError
from smelt.data.labels import parse_score, require_all_or_none
from smelt.data.splits import Columns, Example, Split, input_texts
from smelt.tasks.read_split import read_split
from tests.support.expected_errors import raises_code


@pytest.mark.parametrize(("value", "expected"), [(3, 3.0), ("3.5", 3.5), (0, 0.0), (None, None), ("", None)])
def test_a_score_is_a_number_or_nothing(value, expected):
    assert parse_score(value, "f:1", "label") == expected


@pytest.mark.parametrize("value", ["high", True, [1], float("nan"), "inf"])
def test_what_is_no_number_is_named_with_its_row(value):
    with raises_code("wrong-column-type", InputError) as caught:
        parse_score(value, "f:1", "label")
    assert all(part in str(caught.value) for part in ("f:1:", "'label'"))


def test_rows_that_are_alike_pass_and_others_are_named():
    require_all_or_none([True, True], [1, 2], "label", "score")
    require_all_or_none([False], [1], "label", "score")
    with raises_code("partly-missing-column", InputError) as caught:
        require_all_or_none([False, True], [2, 4], "label", "score")
    assert re.findall(r"\d+", str(caught.value)) == ["4", "2"]


def test_a_csv_file_gives_pairs_whose_texts_are_read_one_by_one(tmp_path):
    (tmp_path / "d.csv").write_text("text,text_b,label\na,b,1\nc,d,0.5\n")
    split = read_split("d.csv", "sentence-similarity", Columns(), tmp_path)
    assert split.examples == (Example("a", text_pair="b", label=1.0), Example("c", text_pair="d", label=0.5))
    assert split.has_labels
    assert input_texts(split.examples, "sentence-similarity") == (["a", "c", "b", "d"], None)
    assert input_texts(split.examples, "text-classification") == (["a", "c"], ["b", "d"])
    assert not Split("x", (Example("a"),)).has_labels


def test_a_column_that_the_recipe_names_has_to_be_there(tmp_path):
    (tmp_path / "d.csv").write_text("text,text_b\na,b\n")
    assert not read_split("d.csv", "sentence-similarity", Columns(), tmp_path).has_labels
    with raises_code("missing-column", InputError) as caught:
        read_split("d.csv", "sentence-similarity", Columns(label="similarity"), tmp_path)
    assert "'similarity'" in str(caught.value)
