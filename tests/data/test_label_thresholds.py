"""Thresholds of labels against scikit-learn's precision-recall curve."""

import numpy as np
import pytest
from scipy.special import expit
from sklearn.metrics import f1_score, precision_recall_curve

from smelt.data.label_thresholds import (
    best_f1_threshold,
    choose_thresholds,
    label_thresholds,
    predicted_labels,
)
from smelt.data.splits import Example, Split
from smelt.evaluate.label_quality import score_classifier
from smelt.export.package.standalone.classes import predict_class
from smelt.runtimes.single_call_runners import predictions_from_logits
from tests.support.expected_errors import raises_code

pytestmark = pytest.mark.quick

NAMES = ["calm", "angry", "glad"]
CONFIG = {"id2label": dict(enumerate(NAMES)), "problem_type": "multi_label_classification"}


def logits_and_gold(seed, n=60):
    draw = np.random.default_rng(seed)
    gold = draw.random((n, 3)) < [0.1, 0.3, 0.6]
    return (draw.normal(size=(n, 3)) + gold - [2, 1, 0]).astype(np.float32), gold


def best_f1(gold, probabilities):
    precision, recall, _ = precision_recall_curve(gold, probabilities)
    return np.max(2 * precision * recall / np.maximum(precision + recall, 1e-12))


@pytest.mark.parametrize("seed", range(4))
def test_chosen_thresholds_have_best_f1_of_precision_recall_curve(seed):
    logits, gold = logits_and_gold(seed)
    probabilities = expit(logits.astype(np.float64))
    each = choose_thresholds(logits, gold, NAMES, is_shared=False)
    predicted = predicted_labels(logits, CONFIG | {"label_thresholds": each})
    for label in range(3):
        expected = best_f1(gold[:, label], probabilities[:, label])
        assert f1_score(gold[:, label], predicted[:, label]) == pytest.approx(expected)
    shared = choose_thresholds(logits, gold, NAMES, is_shared=True)
    assert len(set(shared.values())) == 1
    predicted = predicted_labels(logits, CONFIG | {"label_thresholds": shared})
    expected = best_f1(gold.ravel(), probabilities.ravel())
    assert f1_score(gold, predicted, average="micro") == pytest.approx(expected)


def test_label_without_true_samples_keeps_one_half():
    assert best_f1_threshold(np.array([0.2, 0.9]), np.array([False, False])) == 0.5
    assert best_f1_threshold(np.array([0.2, 0.3, 0.8]), np.array([False, True, True])) == 0.25


def test_thresholds_are_above_zero():
    """A threshold of 0 could not be read again; the label's probability is rounded to 0 on all samples."""
    assert best_f1_threshold(np.array([1e-9, 2e-9]), np.array([False, True])) == 0.5
    assert best_f1_threshold(np.array([1e-9, 2e-9, 0.4]), np.array([True, True, True])) == 0.2


def test_shared_threshold_of_many_labels_needs_little_memory():
    """Each of 400,000 probabilities is a candidate, and a table of all pairs would have 10^11 cells."""
    draw = np.random.default_rng(0)
    logits = draw.normal(size=(20_000, 20)).astype(np.float32)
    gold = logits > 0.5
    [threshold] = set(choose_thresholds(logits, gold, [str(i) for i in range(20)], is_shared=True).values())
    assert threshold == pytest.approx(expit(0.5), abs=1e-4)


def test_scores_predictions_and_packages_use_thresholds():
    logits, gold = logits_and_gold(5)
    config = CONFIG | {"label_thresholds": {"calm": 0.2, "glad": 0.7}}
    expected = expit(logits.astype(np.float64)) > [0.2, 0.5, 0.7]
    labels = [tuple(name for name, is_label in zip(NAMES, row, strict=True) if is_label) for row in gold]
    split = Split("rows", tuple(Example("a", label=label) for label in labels))
    scores, predictions = score_classifier(["f1_micro", "f1_macro"], config, logits, split)
    for metric, average in (("f1_micro", "micro"), ("f1_macro", "macro")):
        assert scores[metric].value == pytest.approx(100 * f1_score(gold, expected, average=average))
    names = [[name for name, is_label in zip(NAMES, row, strict=True) if is_label] for row in expected]
    assert predictions == names
    assert [list(p.label) for p in predictions_from_logits(logits, config)] == names
    packaged = [predict_class(row, NAMES, CONFIG["problem_type"], [0.2, 0.5, 0.7])[0] for row in logits]
    assert [list(label) for label in packaged] == names


def test_one_number_is_for_all_labels():
    assert label_thresholds(CONFIG) == [0.5, 0.5, 0.5]
    assert label_thresholds(CONFIG | {"label_thresholds": 0.3}) == [0.3, 0.3, 0.3]


@pytest.mark.parametrize("value", [0, 1, 1.5, True, "0.3", {"clam": 0.3}, {"calm": 0}])
def test_invalid_thresholds_are_refused(value):
    with raises_code("wrong-label-thresholds"):
        label_thresholds(CONFIG | {"label_thresholds": value})
