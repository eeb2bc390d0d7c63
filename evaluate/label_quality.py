"""Quality of a classifier that assigns several labels to a text, or a number.

Shapes: n = examples, K = labels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version

import numpy as np

from smelt.core.files import json_hash
from smelt.evaluate.quality import _BOOTSTRAP_SIGNATURE, MetricScore, _check_inputs, _score
from smelt.evaluate.significance import Statistics, wilson_interval

LABEL_SET_METRICS = ("f1_micro", "f1_macro", "subset_accuracy")
REGRESSION_METRICS = ("pearson", "spearman", "mse")


def score_label_sets(
    metrics: Sequence[str], predicted: Sequence[Sequence[int]], gold: Sequence[Sequence[int]], labels: int
) -> dict[str, MetricScore]:
    """Score predicted sets of labels against the gold ones.

    f1_micro counts all labels of all examples together, f1_macro is the mean F1 of the labels (0 for a label
    that is neither predicted nor present, as scikit-learn's zero_division=0), subset_accuracy is the
    share of examples whose whole set is correct.

    Args:
        metrics: names from SET_METRICS; the result has their order.
        predicted: for each example the indices of its labels, 0 to K - 1; may be empty.
        gold: likewise.
        labels: K.

    Raises:
        InputError: an unknown metric, no examples, or lengths that differ.
    """
    _check_inputs(metrics, LABEL_SET_METRICS, len(predicted), len(gold))
    guess, truth = _multi_hot(predicted, labels), _multi_hot(gold, labels)
    examples = json_hash([sorted(map(int, found)) for found in gold])
    both = np.concatenate([guess, truth], axis=1).tolist()
    hits = (guess == truth).all(axis=1)
    library = f"version:scikit-learn {version('scikit-learn')}"
    scores = {}
    for metric in metrics:
        if metric == "subset_accuracy":
            rows: list[list[int | float]] = [[int(hit), 1] for hit in hits]
            statistics = Statistics(metric=metric, signature="ci:wilson", examples=examples, rows=rows)
            found = _score(statistics, interval=wilson_interval(int(hits.sum()), len(rows)))
            [(_, most)] = Counter(map(tuple, truth.tolist())).most_common(1)
            scores[metric] = found.model_copy(update={"chance": 100 * most / len(rows)})
            continue
        average = metric.removeprefix("f1_")
        signature = f"average:{average}|threshold:0.5|empty:0|{_BOOTSTRAP_SIGNATURE}|formula:{library}"
        scores[metric] = _score(Statistics(metric=metric, signature=signature, examples=examples, rows=both))
    return scores


def score_regression(
    metrics: Sequence[str], predicted: Sequence[float], gold: Sequence[float]
) -> dict[str, MetricScore]:
    """Score predicted numbers against the gold ones.

    pearson and spearman (ties share the mean of their ranks) are correlations times 100, as GLUE reports
    them; where one side is constant they are undefined and set to 0. mse is the mean squared error, in
    the labels' unit squared; lower is better.

    Args:
        metrics: names from NUMBER_METRICS; the result has their order.
        predicted: n numbers.
        gold: n numbers.

    Raises:
        InputError: an unknown metric, no examples, or lengths that differ.
    """
    _check_inputs(metrics, REGRESSION_METRICS, len(predicted), len(gold))
    examples = json_hash([float(value) for value in gold])
    rows: list[list[int | float]] = [[float(p), float(g)] for p, g in zip(predicted, gold, strict=True)]
    settings = {"pearson": "x100|constant:0", "spearman": "x100|ties:mean rank|constant:0", "mse": "mean"}
    scores = {}
    for metric in metrics:
        signature = f"{settings[metric]}|{_BOOTSTRAP_SIGNATURE}"
        statistics = Statistics(metric=metric, signature=signature, examples=examples, rows=rows)
        scores[metric] = _score(statistics)
    return scores


def _multi_hot(sets: Sequence[Sequence[int]], labels: int) -> np.ndarray:
    """Return int64 [n, K], 1 where the label is in the set."""
    out = np.zeros((len(sets), labels), dtype=np.int64)
    for row, found in zip(out, sets, strict=True):
        row[list(found)] = 1
    return out
