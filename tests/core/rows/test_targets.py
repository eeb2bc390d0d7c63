"""The labels of rows as targets, and what is said of those that can be none."""

import pytest

from smelt.core.data import Example
from smelt.core.errors import InputError
from smelt.core.labels import MULTI, REGRESSION, SINGLE
from smelt.core.rows.targets import check_labels, read_class_sets, read_classes, read_numbers


def rows(*labels):
    return [Example("a", label=label) for label in labels]


def test_classes_are_names_numbers_or_numbers_as_text():
    assert read_classes(rows("good", 0, "1"), ["bad", "good"]) == [1, 0, 1]
    # a name wins over the number that it looks like
    assert read_classes(rows("1", "0"), ["1", "0"]) == [0, 1]


def test_sets_are_lists_or_texts_with_bars_and_may_be_empty():
    names = ["calm", "angry", "glad"]
    found = read_class_sets(rows(("glad", "calm"), "angry | glad", "", (), "2", 1), names)
    assert found == [(0, 2), (1, 2), (), (), (2,), (1,)]


def test_numbers_may_be_text():
    assert read_numbers(rows(1, 0.5, "-2.5e0")) == [1.0, 0.5, -2.5]


def test_every_wrong_row_is_counted_and_the_nearest_name_is_said():
    labels = rows("good", "goood", *["x"] * 7)
    with pytest.raises(InputError) as raised:
        read_classes(labels, ["bad", "good"], "train.csv")
    assert str(raised.value) == (
        "train.csv: row 2: the label 'goood' is not one of the model's 2 labels: bad, good or 0 to 1."
        " Did you mean 'good'? Likewise row 3, 4, 5, 6 and 3 more."
    )


@pytest.mark.parametrize(
    ("label", "problem", "message"),
    [
        (2, SINGLE, "the label 2 is not one of the model's 2 labels"),
        (-1, SINGLE, "the label -1 is not"),
        (0.5, SINGLE, r"the label 0\.5 is not"),
        ("", SINGLE, r"row 1: the label is empty\. Fill it in, or remove the row\."),
        (" ", REGRESSION, "the label is empty"),
        (None, SINGLE, "the label None is not"),
        ("²", SINGLE, "the label '²' is not"),
        (("bad", "good"), SINGLE, "is a list, and the model gives one label to a text"),
        (("bad", "god"), MULTI, "the label 'god' is not .* Did you mean 'good'"),
        (None, MULTI, "the label None is not"),
        ("good", REGRESSION, "the label 'good' is not a finite number"),
        ("nan", REGRESSION, "the label 'nan' is not a finite number"),
        (("1",), REGRESSION, r"the label \['1'\] is not a finite number"),
    ],
)
def test_labels_that_do_not_fit_are_named(label, problem, message):
    with pytest.raises(InputError, match=message):
        check_labels(rows(label), ["bad", "good"], problem)


def test_names_in_the_data_and_none_in_the_model_say_how_to_mend_it():
    with pytest.raises(InputError, match="no names: write them in their order as id2label"):
        read_classes(rows("good"), ["LABEL_0", "LABEL_1"])


@pytest.mark.parametrize("label", [1, 1.0, "1", "1.0", " 1", "+1"])
@pytest.mark.parametrize(
    ("names", "place"),
    [
        (["1", "2", "3"], 0),
        (["3", "2", "1"], 2),
        (["0", "1"], 1),
        (["-1", "0", "1"], 2),
        (["other", "1"], 1),
        (["1.0", "2.0"], 0),
        (["bad", "good"], 1),
        (["LABEL_0", "LABEL_1"], 1),
        (["1 star", "2 stars"], 1),
    ],
)
def test_a_number_is_the_same_label_however_it_is_written(label, names, place):
    assert read_classes(rows(label), names) == [place]
    assert read_class_sets(rows((label,) if not isinstance(label, float) else (int(label),)), names) == [
        (place,)
    ]


@pytest.mark.parametrize("label", [0, "0", 4])
def test_number_is_no_place_when_the_names_are_numbers(label):
    with pytest.raises(InputError, match=r"3 labels: 1, 2, 3\. Its labels are numbers, so a number in the"):
        read_classes(rows(label), ["1", "2", "3"])


def test_wrong_labels_are_named_by_their_lines_when_the_file_has_lines():
    examples = [Example("a", label=label, line=line) for line, label in ((2, "a"), (7, "x"), (9, "y"))]
    with pytest.raises(InputError, match=r"^d\.csv:7: the label 'x' is not .* Likewise line 9\.$"):
        read_classes(examples, ["a", "b"], "d.csv")


def test_wrong_labels_are_named_by_their_rows_in_the_file_when_lines_do_not_tell_rows_apart():
    examples = [Example("a", label="a", line=1, row=1)]
    examples += [Example("a", label=label, row=row) for row, label in ((5, "x"), (9, "a"), (30, "y"))]
    with pytest.raises(InputError, match=r"^d\.json: row 5: the label 'x' is not .* Likewise row 30\.$"):
        read_classes(examples, ["a", "b"], "d.json")
