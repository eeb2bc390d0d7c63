"""Quality of a classifier that gives several labels to a text, or a number.

Shapes: n = examples, K = labels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version

import numpy as np

from smelt.core.files import hash_of
from smelt.evaluate.quality import _BOOTSTRAP, Score, _check, _score
from smelt.evaluate.significance import Statistics, wilson_interval

SET_METRICS = ("f1_micro", "f1_macro", "subset_accuracy")
NUMBER_METRICS = ("pearson", "spearman", "mse")


def score_label_sets(
    metrics: Sequence[str], predicted: Sequence[Sequence[int]], gold: Sequence[Sequence[int]], labels: int
) -> dict[str, Score]:
    """Score predicted sets of labels against the gold ones.

    f1_micro counts all labels of all examples together, f1_macro is the mean of each label's F1 (0 for
    one that is neither predicted nor there, as scikit-learn's zero_division=0), subset_accuracy is the
    share of examples whose whole set is right.

    Args:
        metrics: names from SET_METRICS; the result has their order.
        predicted: for each example the numbers of its labels, 0 to K - 1; may be empty.
        gold: likewise.
        labels: K.

    Raises:
        InputError: an unknown metric, no examples, or lengths that differ.
    """
    _check(metrics, SET_METRICS, len(predicted), len(gold))
    guess, truth = _indicators(predicted, labels), _indicators(gold, labels)
    examples = hash_of([sorted(map(int, found)) for found in gold])
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
        signature = f"average:{average}|threshold:0.5|empty:0|{_BOOTSTRAP}|formula:{library}"
        scores[metric] = _score(Statistics(metric=metric, signature=signature, examples=examples, rows=both))
    return scores


def score_numbers(
    metrics: Sequence[str], predicted: Sequence[float], gold: Sequence[float]
) -> dict[str, Score]:
    """Score predicted numbers against the gold ones.

    pearson and spearman (ties share the mean of their ranks) are correlations times 100, as GLUE reports
    them; where one side does not vary they are not defined and read 0. mse is the mean squared error, in
    the labels' unit squared, and lower is better.

    Args:
        metrics: names from NUMBER_METRICS; the result has their order.
        predicted: n numbers.
        gold: n numbers.

    Raises:
        InputError: an unknown metric, no examples, or lengths that differ.
    """
    _check(metrics, NUMBER_METRICS, len(predicted), len(gold))
    examples = hash_of([float(value) for value in gold])
    rows: list[list[int | float]] = [[float(p), float(g)] for p, g in zip(predicted, gold, strict=True)]
    settings = {"pearson": "x100|constant:0", "spearman": "x100|ties:mean rank|constant:0", "mse": "mean"}
    scores = {}
    for metric in metrics:
        signature = f"{settings[metric]}|{_BOOTSTRAP}"
        statistics = Statistics(metric=metric, signature=signature, examples=examples, rows=rows)
        scores[metric] = _score(statistics)
    return scores


def _indicators(sets: Sequence[Sequence[int]], labels: int) -> np.ndarray:
    """Return int64 [n, K], 1 where the label is in the set."""
    out = np.zeros((len(sets), labels), dtype=np.int64)
    for row, found in zip(out, sets, strict=True):
        row[list(found)] = 1
    return out
