"""Pearson's and Spearman's correlation, and the mean squared error, of predicted numbers.

Of several outputs the metrics are means over the outputs, each output alone as in scikit-learn's
`multioutput="uniform_average"`; `parts` has the value of each.

Shapes: n = examples, R = resamples, C = outputs.
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
    """Rows, K = 2 C: the predicted numbers, then the gold ones; definition: for the signature."""

    samples = (NumberSamples,)
    definition: str

    def example_rows(self, samples: NumberSamples, settings: Mapping[str, Any]) -> ExampleRows:
        """Return both numbers of each example."""
        sides = (np.asarray(side, np.float64) for side in (samples.predicted, samples.gold))
        values = np.hstack([side.reshape(len(side), -1) for side in sides])
        outputs = values.shape[1] // 2
        definition = self.definition if outputs == 1 else f"{self.definition}|mean of {outputs} outputs"
        return ExampleRows(values.tolist(), f"{definition}|{BOOTSTRAP_SIGNATURE}")

    def output_value(self, predicted: Array, gold: Array, weights: Array) -> Array:
        """Return the value of one output: [n], [n], [R, n] -> [R]."""
        raise NotImplementedError

    def value(self, rows: Array, weights: Array) -> Array:
        """Return the mean value of the outputs: [n, 2 C] -> [R]."""
        values = [self.output_value(predicted, gold, weights) for predicted, gold in _outputs(rows)]
        return np.asarray(np.mean(values, axis=0))

    def parts(self, rows: Rows) -> dict[str, float]:
        """Return the value of each output of several, by its number."""
        outputs = _outputs(np.asarray(rows))
        weights = np.ones((1, len(rows)))
        values = [float(self.output_value(predicted, gold, weights)[0]) for predicted, gold in outputs]
        return {f"output {index}": value for index, value in enumerate(values)} if len(values) > 1 else {}


def _outputs(rows: Array) -> list[tuple[Array, Array]]:
    """Return predicted and gold numbers, [n] each, of each output."""
    predicted, gold = np.split(rows, 2, axis=1)
    return list(zip(predicted.T, gold.T, strict=True))


class Pearson(NumberMetric):
    """100 times Pearson's correlation; 0 where one side is constant."""

    def output_value(self, predicted: Array, gold: Array, weights: Array) -> Array:
        """Return the correlation: [n], [n], [R, n] -> [R]."""
        x, y = (np.broadcast_to(column, weights.shape) for column in (predicted, gold))
        return _correlation(x, y, weights)

    def chance_level(self, rows: Rows) -> float:
        """Return the correlation of a constant."""
        return 0.0


class Spearman(Pearson):
    """100 times Spearman's correlation: Pearson's of the ranks, ties sharing their mean rank.

    Each resample is ranked separately; an example that was drawn w times counts as w equal values.
    """

    def output_value(self, predicted: Array, gold: Array, weights: Array) -> Array:
        """Return the correlation: [n], [n], [R, n] -> [R]."""
        return _correlation(_ranks(predicted, weights), _ranks(gold, weights), weights)


class MeanSquaredError(NumberMetric):
    """The mean of (prediction - gold)^2."""

    def output_value(self, predicted: Array, gold: Array, weights: Array) -> Array:
        """Return the error: [n], [n], [R, n] -> [R]."""
        return np.asarray(weights @ np.square(predicted - gold) / weights.sum(1))

    def example_values(self, rows: Array) -> Array:
        """Return the squared error of each example, the mean over its outputs."""
        return np.asarray(np.mean([np.square(predicted - gold) for predicted, gold in _outputs(rows)], 0))

    def chance_level(self, rows: Rows) -> float:
        """Return the error of the gold numbers' means."""
        gold = np.split(np.asarray(rows), 2, axis=1)[1]
        means = np.broadcast_to(gold.mean(axis=0), gold.shape)
        return value_on_all(self, np.hstack([means, gold]).tolist())


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
