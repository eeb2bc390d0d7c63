"""The labels of rows as targets, and what is said of those that can be none."""

import pytest

from smelt.core.errors import InputError
from smelt.data.labels import (
    MULTI_LABEL,
    NO_LABEL,
    REGRESSION,
    SINGLE_LABEL,
    check_labels,
    class_targets,
    multi_label_targets,
    regression_targets,
)
from smelt.data.splits import Example
from tests.support.expected_errors import raises_code

pytestmark = pytest.mark.quick


def rows(*labels):
    return [Example("a", label=label) for label in labels]


def test_class_targets_accept_names_numbers_and_numeric_text():
    assert class_targets(rows("good", 0, "1"), ["bad", "good"]) == [1, 0, 1]
    # a name wins over the number that it looks like
    assert class_targets(rows("1", "0"), ["1", "0"]) == [0, 1]


def test_multi_label_targets_accept_lists_and_separated_text():
    names = ["calm", "angry", "glad"]
    targets = multi_label_targets(rows(("glad", "calm"), "angry | glad", "", (), "2", 1), names)
    assert targets == [(0, 2), (1, 2), (), (), (2,), (1,)]


def test_regression_targets_accept_numeric_text():
    assert regression_targets(rows(1, 0.5, "-2.5e0"), ["score"]) == [(1.0,), (0.5,), (-2.5,)]


def test_regression_targets_of_several_outputs_are_lists_or_fields():
    names = ["valence", "arousal"]
    assert regression_targets(rows((1, 0.5), "-2.5|3", NO_LABEL), names)[:2] == [(1.0, 0.5), (-2.5, 3.0)]
    with raises_code("label-count"):
        regression_targets(rows((1, 0.5), 0.5), names)
    with raises_code("non-finite-label"):
        regression_targets(rows((1, 0.5), (1, "x")), names)


def test_invalid_labels_are_counted_and_nearest_name_is_suggested():
    labels = rows("good", "goood", *["x"] * 7)
    with raises_code("unknown-label", InputError) as raised:
        class_targets(labels, ["bad", "good"], "train.csv")
    fragments = ("train.csv: row 2:", "'goood'", "bad, good", "'good'", " 3, 4, 5, 6 ", " 3 more")
    assert all(fragment in str(raised.value) for fragment in fragments)


@pytest.mark.parametrize(("label", "problem", "code", "shown"), [
    (2, SINGLE_LABEL, "unknown-label", " 2 "), (-1, SINGLE_LABEL, "unknown-label", " -1 "),
    (0.5, SINGLE_LABEL, "unknown-label", " 0.5 "), ("", SINGLE_LABEL, "empty-label", "row 1:"),
    (" ", REGRESSION, "empty-label", ""), (None, SINGLE_LABEL, "unknown-label", " None "),
    ("²", SINGLE_LABEL, "unknown-label", "'²'"),
    (("bad", "good"), SINGLE_LABEL, "several-labels", "['bad', 'good']"),
    (("bad", "god"), MULTI_LABEL, "unknown-label", "'god'"), (None, MULTI_LABEL, "unknown-label", " None "),
    ("good", REGRESSION, "non-finite-label", "'good'"), ("nan", REGRESSION, "non-finite-label", "'nan'"),
    (("1",), REGRESSION, "label-count", "['1']"), (("1", "x"), REGRESSION, "non-finite-label", "['1', 'x']"),
])  # fmt: skip
def test_labels_that_do_not_match_problem_are_named(label, problem, code, shown):
    with raises_code(code, InputError) as excinfo:
        check_labels(rows(label), ["bad", "good"], problem)
    assert shown in str(excinfo.value)


def test_names_in_data_without_id2label_are_explained():
    with raises_code("unknown-label", InputError) as excinfo:
        class_targets(rows("good"), ["LABEL_0", "LABEL_1"])
    assert "id2label" in str(excinfo.value)


@pytest.mark.parametrize("label", [1, 1.0, "1", "1.0", " 1", "+1"])
@pytest.mark.parametrize(("names", "class_index"), [
    (["1", "2", "3"], 0), (["3", "2", "1"], 2), (["0", "1"], 1), (["-1", "0", "1"], 2), (["other", "1"], 1),
    (["1.0", "2.0"], 0), (["bad", "good"], 1), (["LABEL_0", "LABEL_1"], 1), (["1 star", "2 stars"], 1),
])  # fmt: skip
def test_numeric_label_is_equal_in_any_notation(label, names, class_index):
    assert class_targets(rows(label), names) == [class_index]
    assert multi_label_targets(rows((label,) if not isinstance(label, float) else (int(label),)), names) == [
        (class_index,)
    ]


@pytest.mark.parametrize("label", [0, "0", 4])
def test_number_is_not_an_index_if_names_are_numbers(label):
    with raises_code("unknown-label", InputError) as excinfo:
        class_targets(rows(label), ["1", "2", "3"])
    assert "1, 2, 3" in str(excinfo.value)


def test_invalid_labels_are_named_by_line():
    examples = [Example("a", label=label, line=line) for line, label in ((2, "a"), (7, "x"), (9, "y"))]
    with raises_code("unknown-label", InputError) as excinfo:
        class_targets(examples, ["a", "b"], "d.csv")
    assert "'x'" in str(excinfo.value)
    assert (excinfo.value.file, excinfo.value.line) == ("d.csv", 7)
    assert str(excinfo.value).endswith(" 9.")


def test_invalid_labels_are_named_by_row_without_unique_lines():
    examples = [Example("a", label="a", line=1, row=1)]
    examples += [Example("a", label=label, row=row) for row, label in ((5, "x"), (9, "a"), (30, "y"))]
    with raises_code("unknown-label", InputError) as excinfo:
        class_targets(examples, ["a", "b"], "d.json")
    assert all(part in str(excinfo.value) for part in ("d.json: row 5:", "'x'"))
    assert str(excinfo.value).endswith(" 30.")
