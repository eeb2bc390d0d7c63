"""Intervals and paired tests, from statistics stored per example.

A corpus score such as BLEU is a function of sums over the examples. With each example's summands stored,
an interval, or a test between two steps, only sums again: nothing is decoded twice.

Shapes: n = examples, K = summands per example (labels, for label metrics), R = resamples; weights [R, n]
count how often each example was drawn.

In k-fold cross-validation, a fold is a run of the whole recipe without one of the k parts of the training
samples (`smelt.data.split_division.divide_folds`), and is scored on that part, so that every training sample
is scored once, by models that have not seen it.
"""

from __future__ import annotations

import math
import statistics as numbers
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from smelt.core.errors import InputError
from smelt.core.files import json_hash
from smelt.evaluate.metrics.metric import BOOTSTRAP_SEED, RESAMPLES, Array, WindowSamples, value_on_all
from smelt.evaluate.metrics.registry import find_metric, metrics_of

_MAX_CELLS = 4_000_000  # weights in memory at a time: 32 MB

Interval = tuple[float, float]
_POINT_TOLERANCE = 1e-9  # points; smaller differences are rounding errors
_MAX_EXACT = 12  # differing examples, of which all swaps are tried
_SWAPS = 10_000  # sacrebleu's default; fewer, but at least RESAMPLES, where they do not fit into memory
_MIN_TAIL = 10  # swaps; below that a share of them is too coarse


class Statistics(BaseModel):
    """The contribution of each example to a metric; JSON-able.

    rows: [n, K], as the class of the metric documents them.
    examples: a hash of the references or gold labels; only scores with equal ones can be compared in pairs.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    metric: str
    signature: str
    examples: str
    rows: list[list[int | float]]

    def dump(self) -> dict[str, Any]:
        """Return a JSON-able dict; `Statistics.model_validate` reads it back."""
        return self.model_dump(mode="json")


class PairedComparison(TypedDict):
    """A paired difference between two steps: first minus second, in the metric's unit; n: examples."""

    difference: float
    ci95: list[float] | None
    p_value: float
    n: int


def metric_value(statistics: Statistics) -> float:
    """Return the metric's value on all examples, in the metric's unit (most: 0-100)."""
    return value_on_all(find_metric(statistics.metric), statistics.rows)


def example_values(statistics: Statistics) -> Array | None:
    """Return the metric's value on each example alone, [n], in its unit; None for metrics without one."""
    rows = np.asarray(statistics.rows, dtype=np.float64)
    return find_metric(statistics.metric).example_values(rows)


def metric_interval(statistics: Statistics, confidence: float = 0.95) -> Interval | None:
    """Return the two-sided interval of a score, in the metric's unit: Wilson's for hits, else Student's."""
    if find_metric(statistics.metric).kind == "proportion":
        hits = sum(predicted == gold for predicted, gold in statistics.rows)
        return wilson_interval(hits, len(statistics.rows), confidence)
    return student_interval(statistics, confidence)


def student_interval(statistics: Statistics, confidence: float = 0.95) -> Interval | None:
    """Return Student's interval with the standard error of 1000 resamples of the examples.

    The quantiles of a bootstrap are too narrow for few examples: of 6 to 20 they contain the true value in
    80 to 92 % of samples instead of 95 (Hesterberg 2015, The American Statistician 69(4)). Here its standard
    error (Efron 1979) is multiplied by sqrt(n / (n - 1)) and the quantile of Student's t with n - 1 degrees
    of freedom; benchmarks/interval_coverage.py simulates how often that interval contains the true value. It
    is symmetric on a scale without limits: the logit of a metric with a lowest and a highest value (for
    correlations that is Fisher's z), the logarithm of one with a lowest value.

    Where nearly all examples are equal (but for fewer than `min_examples` - 1), the standard error is nearly
    0: the interval is then widened by what an unseen kind of example may change: its share (Wilson's upper
    end of 0 out of n) times the loss if such examples are worthless, or the gain if they are perfect (for F1
    and correlations, which are no sums, the whole range). None for a point where the metric has no range.
    None for fewer examples than `min_examples`.
    """
    n, metric = len(statistics.rows), statistics.metric
    if n < min_examples(metric, confidence):
        return None
    value, limits = metric_value(statistics), _limits(statistics)
    degrees = find_metric(metric).effective_examples(np.asarray(statistics.rows, dtype=np.float64)) - 1
    half = _half_width(_resampled_values(statistics), n, degrees, confidence)
    ends = _unlimited_interval(value, half, limits)
    [(_, equal)] = Counter(map(tuple, statistics.rows)).most_common(1)
    has_variance = half > _POINT_TOLERANCE
    if has_variance and (not _is_bounded(limits) or n - equal + 1 >= min_examples(metric, confidence)):
        return ends
    return _widen_for_unseen(ends, n, statistics, value, confidence, limits)


def difference_interval(step: Statistics, other: Statistics, confidence: float = 0.95) -> Interval | None:
    """Return the two-sided interval of `step` minus `other`: Tango's for hits, else Student's for pairs.

    Student's has the standard error of the difference on 1000 resamples, which both steps share, and the
    degrees of freedom of the examples that differ. The same text in other windows (a vocabulary was trimmed)
    cannot be drawn in pairs: it is drawn separately. Where fewer examples differ than `min_examples`, the
    standard error is nearly 0; the interval is then widened as in `student_interval`, by the possible loss or
    gain of the other's score. None for too few examples, as there, or where so few differ and the metric has
    no range.
    """
    _check_pair(step, other)
    if find_metric(step.metric).kind == "proportion":
        return tango_interval(*_discordant(step, other), len(step.rows), confidence)
    n, num_changed, min_changed = (
        _common_example_count(step, other),
        changed_examples(step, other),
        min_examples(step.metric, confidence),
    )
    if n < min_changed:
        return None
    middle = metric_value(step) - metric_value(other)
    half = _half_width(_resampled_differences(step, other), n, max(num_changed, min_changed) - 1, confidence)
    ends = (middle - half, middle + half)
    if num_changed >= min_changed and half > _POINT_TOLERANCE:
        return ends
    return _widen_for_unseen(ends, n, step, metric_value(other), confidence)


def _half_width(resampled: Array, n: int, degrees: float, confidence: float) -> float:
    """Return half of Student's interval from the values on resamples of n examples, [R]."""
    from scipy.special import stdtrit

    error = float(resampled.std(ddof=1)) * math.sqrt(n / (n - 1))
    return error * float(stdtrit(degrees, (1 + confidence) / 2))


def _unlimited_interval(value: float, half: float, limits: Interval) -> Interval:
    """Return the interval that is `value` -+ `half`, to first order, and symmetric on a scale without limits.

    The scale is the logit between two limits, the logarithm above one. Its width is `half` times the
    derivative at `value`; where that is infinite, at a limit, the interval is `value` -+ `half`, clipped.
    """
    low, high = limits
    if not low < value < high or half == 0 or low == -math.inf:
        return max(low, value - half), min(high, value + half)
    distance_to_low = value - low
    if high == math.inf:
        width = min(700.0, half / distance_to_low)  # exp(710) is beyond float64, and so may the product be
        high_odds = min(low + distance_to_low * math.exp(width), sys.float_info.max)
        return low + distance_to_low * math.exp(-width), high_odds
    odds, width = distance_to_low / (high - value), half * (high - low) / (distance_to_low * (high - value))
    low_odds, high_odds = (odds * math.exp(min(700.0, max(-700.0, side * width))) for side in (-1, 1))
    return low + (high - low) * low_odds / (1 + low_odds), low + (high - low) * high_odds / (1 + high_odds)


def min_examples(metric: str, confidence: float = 0.95) -> int:
    """Return how many examples an interval of `metric` needs.

    As many differences of one sign as a randomization test needs for significance, 2 / 2^n <= 1 -
    confidence: 6 at 0.95, 8 at 0.99. The score intervals of shares need one.
    """
    return 1 if find_metric(metric).kind == "proportion" else 1 + math.ceil(-math.log2(1 - confidence))


def _common_example_count(step: Statistics, other: Statistics) -> int:
    return min(len(step.rows), len(other.rows))


def changed_examples(step: Statistics, other: Statistics) -> int:
    """Return in how many examples the two differ; all of them where windows cannot be paired."""
    if _have_different_windows(step, other):
        return _common_example_count(step, other)
    return sum(step_row != other_row for step_row, other_row in zip(step.rows, other.rows, strict=True))


def _have_different_windows(step: Statistics, other: Statistics) -> bool:
    """Return whether a text was cut into other windows."""
    return step.metric in metrics_of(WindowSamples) and [r[1:] for r in step.rows] != [
        r[1:] for r in other.rows
    ]


def _limits(statistics: Statistics) -> Interval:
    """Return the lowest and highest value of a score, infinite where it has none."""
    return find_metric(statistics.metric).value_limits(statistics.signature)


def _is_bounded(limits: Interval) -> bool:
    return all(map(math.isfinite, limits))


def _widen_for_unseen(
    ends: Interval,
    n: int,
    statistics: Statistics,
    value: float,
    confidence: float,
    limits: Interval = (-math.inf, math.inf),
) -> Interval | None:
    """Return `ends`, widened by the possible change by unseen examples; None where the range is not known.

    In a sum over examples (BLEU approximately: a share of sentences without any match reduces every
    precision by that share) a changed example loses at most its contribution. A class with few examples
    changes more: at least by what one other prediction changes (`Metric.changed_values`). value: the score
    that may change.
    """
    metric = find_metric(statistics.metric)
    lowest, greatest = possible_range = _limits(statistics)
    if not _is_bounded(possible_range):
        return None
    share = wilson_interval(0, n, confidence)[1] / 100
    max_loss, max_gain = share * (value - lowest), share * (greatest - value)
    if metric.kind == "corpus":
        max_loss = max_gain = share * (greatest - lowest)
        changed_values = metric.changed_values(np.asarray(statistics.rows, dtype=np.float64))
        if changed_values is not None:
            base = metric_value(statistics)
            max_loss, max_gain = (
                max(max_loss, base - float(changed_values.min())),
                max(max_gain, float(changed_values.max()) - base),
            )
    return max(ends[0] - max_loss, limits[0]), min(ends[1] + max_gain, limits[1])


def wilson_interval(correct: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the Wilson score interval of `correct` out of `n`, in percent (Wilson 1927)."""
    from scipy.stats import binomtest

    interval = binomtest(correct, n).proportion_ci(confidence, method="wilson")
    return 100 * float(interval.low), 100 * float(interval.high)


def tango_interval(gained: int, lost: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the score interval of a paired difference of two shares, in percent points.

    It contains the differences that a score test does not reject (Tango 1998, Statistics in Medicine 17(8)),
    as Wilson's does for one share. A bootstrap of few or no changed examples is nearly a point: for 50
    examples of which none changed it would be a difference of exactly 0, where it may be 7 points.

    Args:
        gained: examples that only the first gets right.
        lost: examples that only the second gets right.
        n: all examples.
        confidence: of the two-sided interval.
    """
    z = NormalDist().inv_cdf((1 + confidence) / 2)

    def distance(difference: float) -> float:
        """Return how many standard errors the observed difference is above `difference`."""
        b = (2 * n - gained + lost) * difference - gained - lost
        c = -lost * difference * (1 - difference)
        share = (math.sqrt(max(0.0, b * b - 8 * n * c)) - b) / (4 * n)  # most likely P(lost), given it
        variance = n * (2 * share + difference * (1 - difference))
        excess = gained - lost - n * difference
        return excess / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, excess)

    middle = (gained - lost) / n
    return 100 * _bisect_crossing(distance, z, -1.0, middle), 100 * _bisect_crossing(
        distance, -z, middle, 1.0
    )


def _bisect_crossing(falling: Callable[[float], float], level: float, low: float, high: float) -> float:
    """Return where a falling function crosses `level` between two values, by bisection."""
    # scipy's brentq agrees to 5e-11, but fails without a crossing, where an end is -1 or 1: 54 of 303 cases
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > level else (low, middle)
    return (low + high) / 2


def compare_steps(step: Statistics, other: Statistics) -> PairedComparison:
    """Compare two steps on the same examples: `step` minus `other`.

    difference and ci95: in the metric's unit; see `difference_interval`.
    p_value: two-sided. Accuracy, also of whole sets: McNemar's exact test. All others: Fisher's randomization
    test, as `randomization_p_value`.

    Raises:
        InputError: the two do not have the same examples and the same metric.
    """
    interval = difference_interval(step, other)
    difference = metric_value(step) - metric_value(other)
    if find_metric(step.metric).kind == "proportion":
        p_value = _mcnemar(*_discordant(step, other))
    else:
        p_value = randomization_p_value(step, other)
    return {
        "difference": difference,
        "ci95": list(interval) if interval else None,
        "p_value": p_value,
        "n": _common_example_count(step, other),
    }


def randomization_p_value(step: Statistics, other: Statistics) -> float:
    """Return the two-sided p-value of Fisher's randomization test, which swaps examples between the steps.

    Without a difference between the steps, each example's two outputs could as well have come from the other
    step: the p-value is the share of swaps whose difference is at least as large as the observed one (of a
    mean this is the sign-flip test). It is exact up to 12 differing examples. Of more, 1000 to 10,000 swaps
    are drawn (approximate randomization: Riezler & Maxwell 2005, https://aclanthology.org/W05-0908, as
    sacrebleu's `--paired-ar`), and both counts are raised by one (Davison & Hinkley 1997). Below ten such
    swaps it is the tail of the normal distribution with their deviation, because 1000 swaps cannot show a
    p-value below 0.001 (a correction for 25 comparisons would leave nothing significant).

    The same text in other windows has no pairs: all windows are divided between the two.
    """
    rows = np.concatenate([np.asarray(statistics.rows, dtype=np.float64) for statistics in (step, other)])
    unchanged = np.arange(len(rows)) < len(step.rows)
    observed = abs(float(_swapped_differences(step.metric, rows, unchanged[None])[0]))
    count, assignments, min_p_value = _assignments(step, other, unchanged)
    resampled = np.abs(
        np.concatenate([_swapped_differences(step.metric, rows, block) for block in assignments])
    )
    # the order of additions changes the last digits
    tail = int(np.count_nonzero(resampled >= observed * (1 - 1e-9) - _POINT_TOLERANCE))
    if count is not None:
        return tail / count
    share = (tail + 1) / (len(resampled) + 1)
    deviation = math.sqrt(float(np.square(resampled).mean()))
    if tail >= _MIN_TAIL or deviation == 0:
        return share
    # erfc is accurate in the tail, where 1 - cdf is 0
    return max(min_p_value, min(share, math.erfc(observed / deviation / math.sqrt(2))))


def _swapped_differences(metric: str, rows: Array, assignments: NDArray[np.bool_]) -> Array:
    """Return the difference between the examples that are the first step's and the others, [A].

    rows: [n, K], of both steps. assignments: [A, n], whether an example is the first step's.
    """
    first, second = assignments.astype(np.float64), (~assignments).astype(np.float64)
    metric_definition = find_metric(metric)
    return metric_definition.value(rows, first) - metric_definition.value(rows, second)


def _assignments(
    step: Statistics, other: Statistics, unchanged: NDArray[np.bool_]
) -> tuple[int | None, Iterator[NDArray[np.bool_]], float]:
    """Return how the examples of both steps may be divided between them.

    Returns:
        How many assignments these are if they are all of them (up to exchanging the steps), else None; blocks
        of them, bool [some, n]; the least p-value that all of them could show.
    """
    n, generator = len(step.rows), np.random.default_rng(BOOTSTRAP_SEED)
    if _have_different_windows(step, other):
        total = len(unchanged)
        blocks = (generator.permuted(block, axis=1) for block in _repeat_blocks(unchanged))
        return None, blocks, min(1.0, 2 / math.comb(total, n))
    changed_indices = np.flatnonzero(
        [step_row != other_row for step_row, other_row in zip(step.rows, other.rows, strict=True)]
    )

    def swap(block: NDArray[np.bool_], swapped: NDArray[np.bool_]) -> NDArray[np.bool_]:
        block[:, changed_indices], block[:, n + changed_indices] = ~swapped, swapped
        return block

    if len(changed_indices) <= _MAX_EXACT:
        # the first differing example is not swapped: the others' swaps give each difference but for its sign
        count = 2 ** max(0, len(changed_indices) - 1)
        bits = (np.arange(count)[:, None] >> np.arange(len(changed_indices))) & 1 == 1
        return count, iter([swap(np.tile(unchanged, (count, 1)), bits)]), 1 / count
    blocks = (
        swap(block, generator.random((len(block), len(changed_indices))) < 0.5)
        for block in _repeat_blocks(unchanged)
    )
    return None, blocks, 2.0 ** (1 - len(changed_indices))


def _repeat_blocks(row: NDArray[np.bool_]) -> Iterator[NDArray[np.bool_]]:
    """Yield a copy of `row` for each swap, in blocks that fit into memory."""
    count = min(_SWAPS, max(RESAMPLES, _MAX_CELLS // len(row)))
    size = max(1, min(count, _MAX_CELLS // len(row)))
    for start in range(0, count, size):
        yield np.tile(row, (min(size, count - start), 1))


def _check_pair(step: Statistics, other: Statistics) -> None:
    for attribute in ("metric", "signature", "examples"):
        step_value, other_value = getattr(step, attribute), getattr(other, attribute)
        if step_value != other_value:
            raise InputError(
                f"These scores cannot be compared in pairs: their {attribute} differ, {step_value!r} "
                f"and {other_value!r}."
                " Score both steps on the same data with the same settings.",
                code=f"other-{attribute}",
            )
    if len(step.rows) != len(other.rows) and step.metric not in metrics_of(WindowSamples):
        raise InputError(
            f"These scores cannot be compared in pairs: {len(step.rows)} and {len(other.rows)} examples."
            " Score both steps on the same data.",
            code="count-mismatch",
        )


def _resampled_differences(step: Statistics, other: Statistics) -> Array:
    """Return the difference on each of the resamples, [R]: paired where the examples are the same."""
    step_values, other_values = (
        _resampled_values(step),
        _resampled_values(other),
    )  # one seed: both draw the same examples
    if _have_different_windows(step, other):
        other_values = np.roll(other_values, 1)  # independent draws
    return step_values - other_values


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number, in the same order.

    A corrected p-value below 0.05 means significant at a family-wise error rate of 5 %: the chance that any
    of the comparisons without a difference is called significant. Holm 1979, Scandinavian Journal of
    Statistics 6(2): the i-th smallest of m p-values times m - i + 1, at least the one before it, at most 1.
    """
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def _discordant(step: Statistics, other: Statistics) -> tuple[int, int]:
    """Return how many examples only `step` gets right, and how many only `other`."""
    own_correct = np.array([predicted == gold for predicted, gold in step.rows])
    other_correct = np.array([predicted == gold for predicted, gold in other.rows])
    return int(np.sum(own_correct & ~other_correct)), int(np.sum(other_correct & ~own_correct))


def _mcnemar(only_one: int, only_two: int) -> float:
    """Return the p-value of McNemar's exact test (1947) for the numbers of discordant examples."""
    from scipy.stats import binomtest

    if only_one + only_two == 0:
        return 1.0
    return float(binomtest(only_one, only_one + only_two, 0.5).pvalue)


def _resampled_values(statistics: Statistics) -> Array:
    """Return the metric on each of the resamples, [R]; equal n gives equal resamples."""
    rows, metric = np.asarray(statistics.rows, dtype=np.float64), find_metric(statistics.metric)
    return np.concatenate([metric.value(rows, weights) for weights in _resample_weights(len(rows))])


def _resample_weights(n: int) -> Iterable[Array]:
    """Return how often each example was drawn, blocks [some of R, n], R rows in all."""
    return _kept_weights(n) if RESAMPLES * n <= _MAX_CELLS else _draw_weights(n)


@lru_cache(maxsize=1)  # all metrics and steps of a run have the same n
def _kept_weights(n: int) -> tuple[Array, ...]:
    weights = tuple(_draw_weights(n))
    for block in weights:
        block.flags.writeable = False
    return weights


def _draw_weights(n: int) -> Iterator[Array]:
    generator = np.random.default_rng(BOOTSTRAP_SEED)
    block_size = max(1, min(RESAMPLES, _MAX_CELLS // n))
    for start in range(0, RESAMPLES, block_size):
        count = min(block_size, RESAMPLES - start)
        indices = generator.integers(0, n, size=(count, n)) + np.arange(count)[:, None] * n
        yield np.bincount(indices.ravel(), minlength=count * n).reshape(count, n).astype(np.float64)


def summarize_folds(
    folds: Sequence[Mapping[str, Mapping[str, Any]]], baseline: str
) -> dict[str, dict[str, Any]]:
    """Return the scores of all folds by step and metric, for report.json.

    Each has `values`, one for each fold, their `mean` and `std` (of the sample, with n - 1), and
    `against_baseline`: the paired difference on all held-out samples together, as `compare_steps` returns it;
    None for the baseline. A step that has not been scored in every fold is left out.

    Args:
        folds: `Statistics` as plain values, by step and metric, of each fold.
        baseline: the step that others are compared with.
    """
    summary: dict[str, dict[str, Any]] = {}
    for step in folds[0]:
        if not all(step in fold for fold in folds):
            continue
        summary[step] = {}
        for metric in folds[0][step]:
            parts = [_fold_statistics(fold[step], metric) for fold in folds]
            values = [metric_value(part) for part in parts]
            comparison = None
            if step != baseline and all(baseline in fold for fold in folds):
                baseline_parts = [_fold_statistics(fold[baseline], metric) for fold in folds]
                comparison = compare_steps(_join_folds(parts), _join_folds(baseline_parts))
            summary[step][metric] = {
                "values": values,
                "mean": numbers.fmean(values),
                "std": numbers.stdev(values),
                "against_baseline": comparison,
            }
    return summary


def _fold_statistics(scores: Mapping[str, Any], metric: str) -> Statistics:
    return Statistics.model_validate(scores[metric])


def _join_folds(parts: Sequence[Statistics]) -> Statistics:
    """Return the statistics of all folds together."""
    rows = [row for part in parts for row in part.rows]
    return parts[0].model_copy(
        update={"rows": rows, "examples": json_hash([part.examples for part in parts])}
    )
