"""How sure a difference between two arms is: over seeds of the whole arm, and over the rows that are scored.

The two answer different questions. Over seeds: what another draw of rows and another order of training would
give, on these rows. Over rows: what other rows would give, of these trained models.

Shapes: n = rows, S = seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import t as student

from smelt.evaluate.significance import Statistics, _resampled_values, metric_value


@dataclass(frozen=True)
class Interval:
    """A number with the ends of its two-sided 95 % interval; None where one value has none."""

    value: float
    low: float | None = None
    high: float | None = None


def interval_over_seeds(values: Sequence[float]) -> Interval:
    """Return the mean of a value by seed with Student's interval."""
    mean, n = float(np.mean(values)), len(values)
    if n < 2 or min(values) == max(values):  # of one seed, or of something that no seed changes
        return Interval(mean)
    half = float(student.ppf(0.975, n - 1) * np.std(values, ddof=1) / math.sqrt(n))
    return Interval(mean, mean - half, mean + half)


def mean_loss(nats: Sequence[float], tokens: Sequence[int]) -> float:
    """Return the mean cross-entropy of a token, nats: the sums of all rows."""
    return sum(nats) / sum(tokens)


def loss_difference_interval(
    one: Sequence[Sequence[float]], other: Sequence[Sequence[float]], tokens: Sequence[int]
) -> Interval:
    """Return the loss of `one` minus that of `other`, means of their seeds, with the interval over rows.

    A ratio of sums over rows that were drawn in pairs: Student's interval of the linearised ratio (Cochran
    1977, Sampling Techniques, section 6.4).

    Args:
        one, other: [S, n] nats of each row; their S may differ.
        tokens: [n] of each row.
    """
    apart = np.mean(one, axis=0) - np.mean(other, axis=0)
    of_row = np.asarray(tokens, dtype=np.float64)
    n = len(of_row)
    ratio = float(apart.sum() / of_row.sum())
    spread = float(np.std(apart - ratio * of_row, ddof=1))
    half = float(student.ppf(0.975, n - 1)) * math.sqrt(n) * spread / float(of_row.sum())
    return Interval(ratio, ratio - half, ratio + half)


def merge_seeds(seeds: Sequence[Statistics]) -> Statistics:
    """Return the texts of all seeds as one corpus whose rows are drawn together, row by row."""
    rows = np.sum([each.rows for each in seeds], axis=0)
    return seeds[0].model_copy(update={"rows": rows.tolist()})


def score_difference_interval(plus: Sequence[Statistics], minus: Sequence[Statistics]) -> Interval:
    """Return the sum of the scores `plus` less that of `minus`, with the paired bootstrap's interval.

    All are drawn by the same rows. Two on each side give a difference of differences.
    """
    drawn = sum(_resampled_values(each) for each in plus) - sum(_resampled_values(each) for each in minus)
    value = sum(metric_value(each) for each in plus) - sum(metric_value(each) for each in minus)
    low, high = np.quantile(drawn, (0.025, 0.975))
    return Interval(value, float(low), float(high))


def seed_difference_interval(one: Sequence[float], other: Sequence[float]) -> Interval:
    """Return the difference of two values by seed: in pairs, or of a value that has no seeds.

    A control without a seed (the untouched model) has one value, which stands against each.
    """
    others = list(other) * len(one) if len(other) == 1 else list(other)
    return interval_over_seeds([a - b for a, b in zip(one, others, strict=False)])
