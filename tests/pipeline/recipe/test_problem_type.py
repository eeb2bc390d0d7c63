"""Labels of other splits must be labels of train, where the classifier is still to be made."""

import pytest

from smelt.data.labels import MULTI_LABEL, REGRESSION, SINGLE_LABEL
from smelt.data.splits import Example, Split
from smelt.pipeline.recipe.model_and_data import label_errors, new_class_names

NEW = {"architectures": ["BertModel"]}


def split(*labels, origin="a.csv"):
    return Split(origin, tuple(Example(f"text {i}", label=x, line=i + 2) for i, x in enumerate(labels)))


@pytest.mark.parametrize(("problem", "train", "test", "strange"), [
    (SINGLE_LABEL, (0, 1, 0), ("positive", "negative"), ["positive", "negative"]),
    (SINGLE_LABEL, ("0", "1"), (0, 1.0), []), (SINGLE_LABEL, ("a", "b"), ("a", "B"), ["B"]),
    (MULTI_LABEL, (("a", "b"), ()), (("a", "c"), ("c",)), ["c"]),
    (MULTI_LABEL, ("a|b", "b"), ("b|a", ""), []), (REGRESSION, (0.5, 1.5), (99.0,), []),
])  # fmt: skip
def test_labels_missing_in_train_are_named(problem, train, test, strange):
    data = {"train": split(*train), "test": split(*test), "validation": split(*train)}
    errors = label_errors(NEW, data, problem)
    assert [(name, error.code) for name, error in errors] == ([("test", "unknown-label")] if strange else [])
    for label in strange:
        assert repr(label) in errors[0][1].message
    if problem != REGRESSION:
        assert not set(strange) & set(new_class_names(data, problem))


def test_stray_labels_are_counted_with_first_line():
    data = {"train": split(*[0, 1] * 20), "test": split(0, 1, 7, 0, 7)}
    [(name, error)] = label_errors(NEW, data, SINGLE_LABEL)
    assert (name, error.code) == ("test", "unknown-label")
    assert "'7' (2 samples, line 4)" in error.message


def test_trained_classifier_uses_its_own_labels():
    trained = {"architectures": ["BertForSequenceClassification"], "id2label": {0: "a", 1: "b", 2: "c"}}
    assert label_errors(trained, {"train": split("a", "b"), "test": split("c", "a")}, SINGLE_LABEL) == []


def test_labels_without_train_come_from_all_splits():
    assert new_class_names({"test": split("b", "a")}, SINGLE_LABEL) == ["a", "b"]
    assert label_errors(NEW, {"test": split("b", "a")}, SINGLE_LABEL) == []
