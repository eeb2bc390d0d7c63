"""Labels: what a classifier does, and what its outputs are called."""

import pytest

from smelt.core.errors import InputError
from smelt.data.labels import (
    CLASSIFIER_SUFFIXES,
    HEAD_SUFFIXES,
    MULTI_LABEL,
    REGRESSION,
    SINGLE_LABEL,
    class_names,
    infer_label_names,
    infer_problem_type,
    problem_type,
    similar_labels,
)
from tests.support.expected_errors import raises_code

pytestmark = pytest.mark.quick

TWO = {"id2label": {"0": "bad", "1": "good"}}


def test_class_names_are_in_output_order():
    eleven = {str(i): chr(ord("a") + i) for i in (10, 2, 0, 1, 3, 4, 5, 6, 7, 8, 9)}
    assert class_names({"id2label": eleven}) == list("abcdefghijk")
    assert class_names({"id2label": {0: "a", 1: "b"}}) == ["a", "b"]
    assert class_names({"num_labels": 3}) == ["LABEL_0", "LABEL_1", "LABEL_2"]
    assert class_names({}) == ["LABEL_0", "LABEL_1"]


@pytest.mark.parametrize(("config", "labels", "expected"), [
    (TWO, [0, "good"], SINGLE_LABEL), (TWO, ["bad", "bad|good"], MULTI_LABEL),
    (TWO, [("bad",), ()], MULTI_LABEL), ({"id2label": {"0": "a|b", "1": "c"}}, ["a|b", "c"], SINGLE_LABEL),
    ({"id2label": {"0": "LABEL_0"}}, ["1", "2"], REGRESSION),
    ({**TWO, "problem_type": MULTI_LABEL}, ["bad"], MULTI_LABEL),
    ({**TWO, "problem_type": SINGLE_LABEL}, [("bad",)], SINGLE_LABEL),
    # two outputs cannot be one number; the label is refused when it is read
    (TWO, [0.5], SINGLE_LABEL),
    (None, [0.5, 2], REGRESSION), (None, ["3.2", "5"], REGRESSION), (None, ["3", "5"], SINGLE_LABEL),
    (None, ["1.0", "0.0", ""], SINGLE_LABEL), (None, [1.0, 0.0], SINGLE_LABEL),
    (None, [1.0, 0.5], REGRESSION), (None, ["0.5", ""], REGRESSION), (None, [3, 5], SINGLE_LABEL),
    (None, ["3.2", "good"], SINGLE_LABEL), (None, [("a",), ("b", "c")], MULTI_LABEL),
    (None, [(0.1, 2), (3, 1)], REGRESSION), (None, [(0, 2), (3, 1)], MULTI_LABEL),
    (TWO, [(0.1, 2)], MULTI_LABEL), (None, ["a|b", "c"], MULTI_LABEL), (None, [], SINGLE_LABEL),
])  # fmt: skip
def test_problem_type_is_inferred_from_config_then_labels(config, labels, expected):
    assert infer_problem_type(config, labels) == expected


@pytest.mark.parametrize(("config", "code"), [
    ({"problem_type": "regresion"}, "unknown-problem-type"),
    ({"id2label": {"0": "a", "2": "b"}}, "wrong-label-names"),
    ({"id2label": {"a": 0, "b": 1}}, "wrong-label-names"), ({"id2label": ["a", "b"]}, "wrong-label-names"),
    ({"id2label": {"0": "a"}, "problem_type": SINGLE_LABEL}, "too-few-outputs"),
])  # fmt: skip
def test_contradictory_config_is_rejected(config, code):
    with raises_code(code, InputError):
        problem_type(config)


def test_label_names_are_inferred_from_data():
    assert infer_label_names(["b", "a", "b"], SINGLE_LABEL) == ["a", "b"]
    assert infer_label_names([10, 2, 0], SINGLE_LABEL) == ["0", "2", "10"]
    assert infer_label_names(["b", "", " "], SINGLE_LABEL) == ["b"]
    assert infer_label_names(["007", "7"], SINGLE_LABEL) == ["007", "7"]
    assert infer_label_names([1, "other", "1.0"], SINGLE_LABEL) == ["1", "other"]
    assert infer_label_names([("b", "a"), "c|a"], MULTI_LABEL) == ["a", "b", "c"]
    assert infer_label_names([0.5], REGRESSION) == ["LABEL_0"]


def test_labels_differing_in_case_or_blanks_are_counted():
    labels = ["positive"] * 3 + ["Positive", " positive", "negative", 1, ("Calm", "calm"), "a|A"]
    assert similar_labels(labels) == [
        {"positive": 3, "Positive": 1, " positive": 1},
        {"Calm": 1, "calm": 1},
        {"a": 1, "A": 1},
    ]
    assert similar_labels([1, "1", "b", "c"]) == []


def test_classes_without_head_of_classes_have_no_suffix_of_one():
    assert {*CLASSIFIER_SUFFIXES} <= {*HEAD_SUFFIXES}
    assert "BertForSequenceClassification".endswith(HEAD_SUFFIXES)
    assert not any(
        name.endswith(HEAD_SUFFIXES) for name in ("BertModel", "BertForPreTraining", "MarianMTModel")
    )
