"""Pearson's and Spearman's correlation, and the mean squared error, of predicted numbers.

Shapes: n = examples, R = resamples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from smelt.data.labels import REGRESSION
from smelt.evaluate.metrics.metric import (
    BOOTSTRAP_SIGNATURE,
    CORRELATION_LIMITS,
    ERROR_LIMITS,
    Array,
    ExampleRows,
    Metric,
    NumberSamples,
    Rows,
    value_on_all,
)


@dataclass(frozen=True, kw_only=True)
class NumberMetric(Metric[NumberSamples]):
    """Rows, K = 2: predicted number, gold number; definition: for the signature."""

    samples = (NumberSamples,)
    definition: str

    def example_rows(self, samples: NumberSamples, settings: Mapping[str, Any]) -> ExampleRows:
        """Return both numbers of each example."""
        pairs = zip(samples.predicted, samples.gold, strict=True)
        rows: Rows = [[float(predicted), float(gold)] for predicted, gold in pairs]
        return ExampleRows(rows, f"{self.definition}|{BOOTSTRAP_SIGNATURE}")


class Pearson(NumberMetric):
    """100 times Pearson's correlation; 0 where one side is constant."""

    def value(self, rows: Array, weights: Array) -> Array:
        """Return the correlation: [n, 2] -> [R]."""
        x, y = (np.broadcast_to(column, weights.shape) for column in rows.T)
        return _correlation(x, y, weights)

    def chance_level(self, rows: Rows) -> float:
        """Return the correlation of a constant."""
        return 0.0


class Spearman(Pearson):
    """100 times Spearman's correlation: Pearson's of the ranks, ties sharing their mean rank.

    Each resample is ranked separately; an example that was drawn w times counts as w equal values.
    """

    def value(self, rows: Array, weights: Array) -> Array:
        """Return the correlation: [n, 2] -> [R]."""
        return _correlation(_ranks(rows[:, 0], weights), _ranks(rows[:, 1], weights), weights)


class MeanSquaredError(NumberMetric):
    """The mean of (prediction - gold)^2."""

    def value(self, rows: Array, weights: Array) -> Array:
        """Return the error: [n, 2] -> [R]."""
        return np.asarray(weights @ np.square(rows[:, 0] - rows[:, 1]) / weights.sum(1))

    def example_values(self, rows: Array) -> Array:
        """Return the squared error of each example."""
        return np.asarray(np.square(rows[:, 0] - rows[:, 1]))

    def chance_level(self, rows: Rows) -> float:
        """Return the error of the gold numbers' mean."""
        mean = sum(gold for _, gold in rows) / len(rows)
        return value_on_all(self, [[mean, gold] for _, gold in rows])


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


PEARSON = Pearson(
    name="pearson",
    title="Pearson",
    unit="Pearson",
    description="correlation times 100; 0 if one side does not vary",
    tasks=(REGRESSION, "sentence-similarity"),
    main=(REGRESSION,),
    limits=CORRELATION_LIMITS,
    definition="x100|constant:0",
)
SPEARMAN = Spearman(
    name="spearman",
    title="Spearman",
    unit="Spearman",
    description="correlation of ranks times 100; ties share their mean rank; 0 if one side does not vary",
    tasks=(REGRESSION, "sentence-similarity"),
    main=("sentence-similarity",),
    limits=CORRELATION_LIMITS,
    definition="x100|ties:mean rank|constant:0",
)
MSE = MeanSquaredError(
    name="mse",
    title="MSE",
    unit="MSE",
    description="mean squared error, in the squared unit of the labels",
    tasks=(REGRESSION,),
    limits=ERROR_LIMITS,
    higher_is_better=False,
    definition="mean",
)
