"""Metrics of several labels a text and of regression, against scikit-learn and scipy."""

import math
import re

import numpy as np
import pytest
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import (
    accuracy_score,
    classification_report,
    f1_score,
    log_loss,
    mean_squared_error,
    precision_score,
    recall_score,
)

from smelt.core.errors import InputError, RunError
from smelt.data.splits import Example, Split
from smelt.evaluate import label_quality, significance
from smelt.evaluate.label_quality import (
    class_counts,
    class_scores,
    confusion_matrix,
    score_classifier,
    score_label_sets,
    score_regression,
    score_vectors,
)
from smelt.evaluate.metrics.metric import LabelSetSamples, NumberSamples
from smelt.evaluate.metrics.registry import METRICS_BY_PROBLEM, find_metric, metrics_of
from smelt.evaluate.quality import score_choices, score_labels, score_responses, score_windows
from smelt.evaluate.significance import compare_steps, wilson_interval
from smelt.runtimes.single_call_runners import predictions_from_logits
from tests.support.expected_errors import raises_code
from tests.support.expected_intervals import student_interval

pytestmark = pytest.mark.quick

rng = np.random.default_rng(4)
GOLD = rng.random((60, 5)) < 0.3
GUESS = GOLD ^ (rng.random((60, 5)) < 0.15)
GUESS[:, 4] = GOLD[:, 4] = False  # a label that nobody has
POOR = GOLD ^ (rng.random((60, 5)) < 0.5)
NUMBERS = np.round(rng.normal(2, 1, 60), 1)  # rounded, so that there are ties
NEAR = np.round(NUMBERS + rng.normal(0, 0.7, 60), 1)
FAR = np.round(NUMBERS + rng.normal(0.5, 3, 60), 1)
LOGITS = rng.normal(0, 2, (60, 5)) + 3 * GOLD
POOR_LOGITS = -LOGITS
CLASSES = {"id2label": {"0": "no", "1": "yes"}}
CLASS_ROWS = Split("rows", (Example("a", label="no"), Example("b", label="yes")))
ERRORS = ("mse", "loss")
REGRESSION_METRICS = [name for name in METRICS_BY_PROBLEM["regression"] if name in metrics_of(NumberSamples)]
SKLEARN_SET_METRICS = [m for m in metrics_of(LabelSetSamples) if m not in ("cross_entropy", "loss", "map")]


def sets(indicators):
    return [np.flatnonzero(row).tolist() for row in indicators]


def draws(n, count):
    return np.random.default_rng(significance.BOOTSTRAP_SEED).integers(0, n, size=(1000, n))[:count]


def sklearn_sets(metric, gold, guess):
    if metric == "subset_accuracy":
        return 100 * accuracy_score(gold, guess)
    statistic, average = metric.rsplit("_", 1)
    function = {"f1": f1_score, "precision": precision_score, "recall": recall_score}[statistic]
    return 100 * function(gold, guess, average=average, zero_division=0)


def reference_number(metric, gold, guess):
    if metric in ERRORS:
        return mean_squared_error(gold, guess)
    return 100 * (pearsonr if metric == "pearson" else spearmanr)(gold, guess).statistic


@pytest.mark.parametrize("metric", SKLEARN_SET_METRICS)
def test_set_metrics_equal_sklearn_on_all_rows_and_on_resamples(metric):
    score = score_label_sets([metric], sets(GUESS), sets(GOLD), 5)[metric]
    assert score.value == pytest.approx(sklearn_sets(metric, GOLD, GUESS))
    assert (score.n, score.higher_is_better) == (60, True)
    resampled = significance._resampled_values(score.statistics)
    assert resampled[:30] == pytest.approx([sklearn_sets(metric, GOLD[i], GUESS[i]) for i in draws(60, 30)])
    if metric == "subset_accuracy":
        hits = int((GOLD == GUESS).all(axis=1).sum())
        assert score.ci95 == wilson_interval(hits, 60)
    else:
        assert score.ci95 == pytest.approx(student_interval(score.value, resampled, 60))
        assert "bs:1000|seed:12345" in score.signature


@pytest.mark.parametrize("metric", REGRESSION_METRICS)
def test_number_metrics_equal_scipy_and_sklearn_on_all_rows_and_on_resamples(metric):
    score = score_regression([metric], NEAR.tolist(), NUMBERS.tolist())[metric]
    assert score.value == pytest.approx(reference_number(metric, NUMBERS, NEAR))
    assert score.higher_is_better == (metric not in ERRORS)
    resampled = significance._resampled_values(score.statistics)
    assert resampled[:30] == pytest.approx(
        [reference_number(metric, NUMBERS[i], NEAR[i]) for i in draws(60, 30)]
    )
    limits = find_metric(metric).limits
    assert score.ci95 == pytest.approx(student_interval(score.value, resampled, 60, limits))


@pytest.mark.parametrize("metric", REGRESSION_METRICS)
def test_better_prediction_has_significant_difference(metric):
    better_score, worse_score = (
        score_regression([metric], predicted.tolist(), NUMBERS.tolist())[metric] for predicted in (NEAR, FAR)
    )
    result = compare_steps(better_score.statistics, worse_score.statistics)
    expected = reference_number(metric, NUMBERS, NEAR) - reference_number(metric, NUMBERS, FAR)
    assert result["difference"] == pytest.approx(expected)
    assert (result["difference"] > 0) == better_score.higher_is_better
    assert result["p_value"] < 0.05
    self_comparison = compare_steps(better_score.statistics, better_score.statistics)
    assert (self_comparison["difference"], self_comparison["p_value"]) == (0.0, 1.0)
    assert (self_comparison["ci95"] is None) == (metric in ERRORS)  # which has no range


@pytest.mark.parametrize("metric", SKLEARN_SET_METRICS)
def test_label_sets_are_compared_in_pairs(metric):
    better_statistics = score_label_sets([metric], sets(GUESS), sets(GOLD), 5)[metric].statistics
    worse_statistics = score_label_sets([metric], sets(POOR), sets(GOLD), 5)[metric].statistics
    result = compare_steps(better_statistics, worse_statistics)
    expected = sklearn_sets(metric, GOLD, GUESS) - sklearn_sets(metric, GOLD, POOR)
    assert result["difference"] == pytest.approx(expected)
    assert result["p_value"] < 0.05


def test_label_set_cross_entropy_equals_mean_log_loss():
    better_score, worse_score = (
        score_label_sets(["cross_entropy"], sets(GUESS), sets(GOLD), 5, logits.astype(np.float32))[
            "cross_entropy"
        ]
        for logits in (LOGITS, POOR_LOGITS)
    )
    probabilities = 1 / (1 + np.exp(-LOGITS))
    label_losses = [log_loss(GOLD[:, k], probabilities[:, k], labels=[False, True]) for k in range(5)]
    assert better_score.value == pytest.approx(np.mean(label_losses), rel=1e-5)
    frequencies = GOLD.mean(axis=0)
    constant = [log_loss(GOLD[:, k], np.full(60, frequencies[k]), labels=[False, True]) for k in range(4)]
    assert better_score.chance == pytest.approx(sum(constant) / 5)  # nothing to guess for the fifth
    assert (better_score.unit, better_score.higher_is_better) == ("nats", False)
    comparison = compare_steps(better_score.statistics, worse_score.statistics)
    assert comparison["difference"] == pytest.approx(better_score.value - worse_score.value)
    assert comparison["difference"] < 0
    assert comparison["p_value"] < 0.05


def test_subset_accuracy_uses_mcnemar_exact():
    gold = [[0]] * 40
    predicted = [[0]] * 32 + [[]] * 8  # 10 right that the other gets wrong, 2 the other way round
    other = [[0]] * 22 + [[]] * 10 + [[0]] * 2 + [[]] * 6
    both_statistics = [
        score_label_sets(["subset_accuracy"], x, gold, 2)["subset_accuracy"].statistics
        for x in (predicted, other)
    ]
    assert compare_steps(*both_statistics)["p_value"] == pytest.approx(2 * (1 + 12 + 66) / 4096)


def test_correlation_of_constant_is_zero():
    scores = score_regression(["pearson", "spearman"], [0.1] * 5, [1.0, 2.0, 3.0, 4.0, 5.0])
    assert [s.value for s in scores.values()] == [0.0, 0.0]
    tiny = score_regression(["pearson"], [1e-9, 2e-9, 3e-9], [1.0, 2.0, 3.0])["pearson"]
    assert tiny.value == pytest.approx(100)


def test_different_examples_and_unknown_metrics_are_rejected():
    statistics = score_regression(["mse"], [1.0, 2.0], [1.0, 2.0])["mse"].statistics
    with raises_code("other-examples", InputError):
        compare_steps(statistics, score_regression(["mse"], [1.0, 2.0], [1.0, 3.0])["mse"].statistics)
    with raises_code("unknown-metric", InputError) as excinfo:
        score_regression(["rmse"], [1.0], [1.0])
    assert all(name in str(excinfo.value) for name in ("'rmse'", "'mse'?"))
    with raises_code("count-mismatch", InputError) as excinfo:
        score_label_sets(["f1_micro"], [[0]], [[0], [1]], 2)
    assert re.findall(r"\d+", str(excinfo.value)) == ["1", "2"]


def test_confusion_matrix_counts_predictions_by_label():
    matrix = confusion_matrix(predicted=[1, 1, 0, 2, 1], labels=[0, 1, 0, 0, 0], num_labels=4)
    assert matrix.tolist() == [[1, 2, 1, 0], [0, 1, 0, 0], [0] * 4, [0] * 4]
    assert matrix.dtype == np.int64


def test_report_contains_scores_of_most_frequent_classes(monkeypatch):
    gold, predicted = np.random.default_rng(0).integers(0, 5, (2, 90)).tolist()
    names = list("abcdef")
    counts = confusion_matrix(predicted, gold, 6)
    class_totals = counts.diagonal(), counts.sum(axis=0), counts.sum(axis=1)
    report_entries = class_scores(*class_totals, names)
    sklearn_report = classification_report(
        gold, predicted, labels=range(6), zero_division=0, output_dict=True
    )
    for entry in report_entries:
        expected = sklearn_report[str(names.index(entry["label"]))]
        assert [entry[k] for k in ("precision", "recall", "f1")] == pytest.approx(
            [100 * expected[k] for k in ("precision", "recall", "f1-score")]
        )
        assert entry["n"] == expected["support"]
    assert len(report_entries) == 6
    monkeypatch.setattr(label_quality, "MAX_CLASSES", 2)
    assert [entry["n"] for entry in class_scores(*class_totals, names)] == sorted(map(gold.count, range(6)))[
        :3:-1
    ]


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize(
    "score",
    [
        lambda number: score_regression(["spearman"], [1.0, number, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]),
        lambda number: score_classifier(
            ["accuracy"], CLASSES, np.array([[number, 0.0], [1, 0]], np.float32), CLASS_ROWS
        ),
        lambda number: class_counts(CLASSES, np.array([[number, 0.0], [1, 0]], np.float32), CLASS_ROWS),
        lambda number: predictions_from_logits(np.array([[1, 0], [0, number]], np.float32), CLASSES),
        lambda number: score_labels(
            ["cross_entropy"], [0, 1], [0, 1], np.array([[1, 0], [0, number]], np.float32)
        ),
        lambda number: score_label_sets(
            ["cross_entropy"], [[0]], [[1]], 2, np.array([[1, number]], np.float32)
        ),
        lambda number: score_vectors(
            ["spearman"], np.array([[number, 1.0], [1, 1]], np.float32), ["a", "b"], [1.0]
        ),
        lambda number: score_choices(["acc"], [[number, 1.0]], [["a", "b"]], [0], ["x"]),
        lambda number: score_responses(["response_perplexity"], [number], [3], [9], ["x"], 10),
        lambda number: score_windows(["perplexity"], [number], [3], [9], "window:8", ["x"]),
    ],
)
def test_non_finite_outputs_are_not_scored(score, number):
    """NaN has a rank, and argmax takes it for the largest: a broken model would have a score."""
    with raises_code("non-finite-outputs", RunError):
        score(number)


def test_metrics_of_several_outputs_equal_scipy_and_sklearn():
    """Means over the outputs; `parts` has each output under the model's name of it."""
    draw = np.random.default_rng(0)
    gold = draw.normal(size=(40, 3)).round(1)
    logits = (0.5 * gold + draw.normal(size=(40, 3)).round(1)).astype(np.float32)
    names = ["valence", "arousal", "dominance"]
    config = {"id2label": dict(enumerate(names)), "problem_type": "regression"}
    split = Split("rows", tuple(Example("a", label=tuple(row)) for row in gold.tolist()))
    scores, predictions = score_classifier(["pearson", "spearman", "mse", "loss"], config, logits, split)
    assert predictions == logits.tolist()
    for metric, function in (("pearson", pearsonr), ("spearman", spearmanr)):
        each = [100 * function(gold[:, i], logits[:, i].astype(float)).statistic for i in range(3)]
        assert scores[metric].parts == pytest.approx(dict(zip(names, each, strict=True)))
        assert scores[metric].value == pytest.approx(np.mean(each))
        assert scores[metric].ci95[0] < scores[metric].value < scores[metric].ci95[1]
    errors = mean_squared_error(gold, logits.astype(float), multioutput="raw_values")
    assert list(scores["mse"].parts.values()) == pytest.approx(errors.tolist())
    mean_error = mean_squared_error(gold, logits.astype(float))
    assert (scores["mse"].value, scores["loss"].value) == pytest.approx((mean_error, mean_error))
    with raises_code("does-not-fit-labels"):
        score_classifier(["mrr"], config, logits, split)
