"""Values of the label metrics on resamples, from statistics stored per example.

Shapes: n = examples, K = labels, R = resamples; weights [R, n] count how often each example was drawn.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def accuracy(rows: Array, weights: Array) -> Array:
    """Return the percentage of examples whose two labels are equal: [n, 2] -> [R]."""
    hits = (rows[:, 0] == rows[:, 1]).astype(np.float64)
    return np.asarray(100 * (weights @ hits) / weights.sum(1))


def macro_f1(rows: Array, weights: Array) -> Array:
    """Return the mean F1 over the classes that a resample predicts or contains, as sklearn's macro F1."""
    classes, codes = np.unique(rows.astype(np.int64), return_inverse=True)
    predicted, gold = codes.reshape(rows.shape).T
    hit = predicted == gold
    values = np.empty(len(weights))
    for index, weight in enumerate(weights):
        matched = np.bincount(gold[hit], weights=weight[hit], minlength=len(classes))
        either = np.bincount(gold, weights=weight, minlength=len(classes))
        either += np.bincount(predicted, weights=weight, minlength=len(classes))
        seen = either > 0
        values[index] = 100 * np.mean(2 * matched[seen] / either[seen])
    return values


def micro_f1(rows: Array, weights: Array) -> Array:
    """Return F1 over all labels of all examples; rows hold K predictions, then K gold: [n, 2K] -> [R]."""
    matched, either = _label_counts(rows, weights)
    return _safe_ratio(2 * matched.sum(1), either.sum(1))


def mean_f1(rows: Array, weights: Array) -> Array:
    """Return the mean F1 of the labels; 0 for a label neither predicted nor present in a resample: [R]."""
    matched, either = _label_counts(rows, weights)
    return np.asarray(_safe_ratio(2 * matched, either).mean(axis=1))


def _label_counts(rows: Array, weights: Array) -> tuple[Array, Array]:
    """Return, by resample and label, the number of true positives and of predicted plus gold: [R, K]."""
    predicted, gold = np.split(rows, 2, axis=1)
    return weights @ (predicted * gold), weights @ (predicted + gold)


def _safe_ratio(above: Array, below: Array) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(below > 0, 100 * above / below, 0.0)


def mean_squared_error(rows: Array, weights: Array) -> Array:
    """Return the mean of (prediction - gold)^2: [n, 2] -> [R]."""
    return np.asarray(weights @ np.square(rows[:, 0] - rows[:, 1]) / weights.sum(1))


def pearson(rows: Array, weights: Array) -> Array:
    """Return 100 times Pearson's correlation of prediction and gold; 0 where one is constant: [R]."""
    x, y = (np.broadcast_to(column, weights.shape) for column in rows.T)
    return _correlation(x, y, weights)


def spearman(rows: Array, weights: Array) -> Array:
    """Return 100 times Spearman's correlation: Pearson's of the ranks, ties sharing their mean rank: [R].

    Each resample is ranked separately; an example that was drawn w times counts as w equal values.
    """
    return _correlation(_ranks(rows[:, 0], weights), _ranks(rows[:, 1], weights), weights)


def _ranks(values: Array, weights: Array) -> Array:
    """Return each example's mean rank within each resample: [n], [R, n] -> [R, n]."""
    distinct, codes = np.unique(values, return_inverse=True)
    order = np.argsort(codes, kind="stable")
    starts = np.searchsorted(codes[order], np.arange(len(distinct)))
    counts = np.add.reduceat(weights[:, order], starts, axis=1)
    ranks = np.cumsum(counts, axis=1) - (counts - 1) / 2
    return np.asarray(ranks[:, codes])


def _correlation(x: Array, y: Array, weights: Array) -> Array:
    total = weights.sum(1, keepdims=True)
    # what remains of a constant after its mean is subtracted is a rounding error, not variance
    least_x, least_y = (1e-24 * (weights * v * v).sum(1) for v in (x, y))
    x = x - (weights * x).sum(1, keepdims=True) / total
    y = y - (weights * y).sum(1, keepdims=True) / total
    together = (weights * x * y).sum(1)
    xx, yy = (weights * x * x).sum(1), (weights * y * y).sum(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = 100 * together / np.sqrt(xx * yy)
    return np.where((xx > least_x) & (yy > least_y), np.clip(value, -100, 100), 0.0)


LABEL_METRIC_FUNCTIONS: dict[str, Callable[[Array, Array], Array]] = {
    "accuracy": accuracy,
    "f1": macro_f1,
    "f1_micro": micro_f1,
    "f1_macro": mean_f1,
    "subset_accuracy": accuracy,
    "top1": accuracy,
    "pearson": pearson,
    "spearman": spearman,
    "mse": mean_squared_error,
}
