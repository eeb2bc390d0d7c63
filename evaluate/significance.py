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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import Any, TypedDict

import numpy as np
from pydantic import BaseModel, ConfigDict

from smelt.core.errors import InputError
from smelt.core.files import json_hash
from smelt.evaluate.metrics import (
    AGREEMENT_METRIC,
    WINDOW_METRICS,
    base_metric,
    find_metric,
)
from smelt.evaluate.weighted_metrics import Array, corpus_bleu, corpus_chrf, safe_ratio, weighted_values

RESAMPLES = 1000
BOOTSTRAP_SEED = 12345  # sacrebleu's default, so that both draw the same examples
_MAX_CELLS = 4_000_000  # weights in memory at a time: 32 MB

Interval = tuple[float, float]
_POINT_TOLERANCE = 1e-9  # points; a bootstrap interval up to this width is a point


class Statistics(BaseModel):
    """The contribution of each example to a metric; JSON-able.

    rows: [n, K]. bleu: length of the prediction, length of the nearest reference, 4 counts of matching
    n-grams, 4 counts of n-grams (sacrebleu's segment statistics); chrf: 6 times the counts of n-grams
    in prediction, reference and both; rouge and token_f1: F1 in 0..1; exact_match: 1 where the response
    equals a reference, then 1; accuracy, f1, precision, recall, matthews: predicted class,
    gold class, and where only one class is scored that class; metrics of label sets: K times 0 or 1 as
    predicted, then as in the gold set; cross_entropy: nats; subset_accuracy: 1 where
    the whole set is right, then 1; pearson, spearman, mse: predicted number, gold number; agreement,
    where a row is a text: the cosine with the baseline's vector (of a graph's outputs: with the source
    graph's); relative_error: a share; top1: 1 where the row's choices are the same, then 1; perplexity and
    bits_per_byte, where a row is a window, and response_perplexity, where it is a response: nats, tokens,
    bytes.
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
    """A paired difference between two steps: first minus second, in the metric's unit."""

    difference: float
    ci95: list[float] | None
    p_value: float


def metric_value(statistics: Statistics) -> float:
    """Return the metric's value on all examples, in the metric's unit (most: 0-100)."""
    rows = np.asarray(statistics.rows, dtype=np.float64)
    return float(weighted_values(statistics.metric, rows, np.ones((1, len(rows))))[0])


def example_values(statistics: Statistics) -> Array | None:
    """Return the metric's value on each example alone, [n], in its unit; None for metrics without one.

    bleu and chrf: sacrebleu's sentence-level scores (BLEU with effective order: only orders of n-grams that
    the prediction has). accuracy, f1: 100 where the prediction is right; f1_micro and f1_macro: F1 of the
    example's own labels, 100 where it neither has nor gets any; mse: the squared error. Correlations and
    perplexity of running text have no value on one example.
    """
    rows, metric = np.asarray(statistics.rows, dtype=np.float64), base_metric(statistics.metric)
    if metric == "bleu":
        return corpus_bleu(rows, effective_order=True)
    if metric == "chrf":
        return corpus_chrf(rows)
    known = find_metric(metric)
    if known.kind == "mean":
        return np.asarray(known.scale * rows[:, 0])
    if known.kind == "proportion" or metric == "f1":
        return np.asarray(100.0 * (rows[:, 0] == rows[:, 1]))
    if metric in ("f1_micro", "f1_macro"):
        predicted, gold = np.split(rows, 2, axis=1)
        either = (predicted + gold).sum(1)
        return np.where(either > 0, safe_ratio(2 * (predicted * gold).sum(1), either), 100.0)
    return np.square(rows[:, 0] - rows[:, 1]) if metric == "mse" else None


def metric_interval(statistics: Statistics, confidence: float = 0.95) -> Interval | None:
    """Return the two-sided interval of a score, in the metric's unit: Wilson's for hits, else a bootstrap."""
    if find_metric(statistics.metric).kind == "proportion":
        hits = sum(predicted == gold for predicted, gold in statistics.rows)
        return wilson_interval(hits, len(statistics.rows), confidence)
    return bootstrap_interval(statistics, confidence)


def bootstrap_interval(statistics: Statistics, confidence: float = 0.95) -> Interval | None:
    """Return the percentile interval over 1000 resamples of the examples (Efron 1979).

    Where fewer examples than `min_examples` differ from the most frequent one, a bootstrap is nearly a point:
    it is then widened by what an unseen kind of example may change: its share (Wilson's upper end of 0 out
    of n) times the loss if such examples are worthless, or the gain if they are perfect (for F1 and
    correlations, which are no sums, the whole range). None for a point where the metric has no range.
    None for fewer examples than `min_examples`, whose resamples are too similar.
    """
    n, metric = len(statistics.rows), statistics.metric
    if n < min_examples(metric, confidence):
        return None
    low, high = _central_interval(_resampled_values(statistics), confidence)
    point = high - low <= _POINT_TOLERANCE
    [(_, equal)] = Counter(map(tuple, statistics.rows)).most_common(1)
    limits = _limits(statistics)
    if not point and (limits is None or n - equal >= min_examples(metric, confidence)):
        return low, high
    if limits is None:
        return None
    return _widen_for_unseen((low, high), n, statistics, metric_value(statistics), confidence, limits)


def difference_interval(step: Statistics, other: Statistics, confidence: float = 0.95) -> Interval | None:
    """Return the two-sided interval of `step` minus `other`: Tango's for hits, else a paired bootstrap.

    The same text in other windows (a vocabulary was trimmed) cannot be drawn in pairs: it is drawn
    separately. Where fewer examples differ than `min_examples`, a bootstrap is nearly a point; it is then
    widened as in `bootstrap_interval`, by the possible loss or gain of the other's score.
    None for too few examples, as in `bootstrap_interval`, or where so few differ and the metric has no range.
    """
    _check_pair(step, other)
    if find_metric(step.metric).kind == "proportion":
        return tango_interval(*_discordant(step, other), len(step.rows), confidence)
    n, changed, least = (
        _common_example_count(step, other),
        changed_examples(step, other),
        min_examples(step.metric, confidence),
    )
    if n < least:
        return None
    ends = _central_interval(_resampled_differences(step, other), confidence)
    if changed >= least and ends[1] - ends[0] > _POINT_TOLERANCE:
        return ends
    return _widen_for_unseen(ends, n, step, metric_value(other), confidence)


def min_examples(metric: str, confidence: float = 0.95) -> int:
    """Return how many examples an interval of `metric` needs.

    For a bootstrap: as many differences of one sign as a randomization test needs for significance,
    2 / 2^n <= 1 - confidence: 6 at 0.95, 8 at 0.99. The score intervals of shares need one.
    """
    return 1 if find_metric(metric).kind == "proportion" else 1 + math.ceil(-math.log2(1 - confidence))


def _common_example_count(step: Statistics, other: Statistics) -> int:
    return min(len(step.rows), len(other.rows))


def changed_examples(step: Statistics, other: Statistics) -> int:
    """Return in how many examples the two differ; all of them where windows cannot be paired."""
    if _have_different_windows(step, other):
        return _common_example_count(step, other)
    return sum(before != after for before, after in zip(step.rows, other.rows, strict=True))


def _have_different_windows(step: Statistics, other: Statistics) -> bool:
    """Return whether a text was cut into other windows."""
    return step.metric in WINDOW_METRICS and [r[1:] for r in step.rows] != [r[1:] for r in other.rows]


def _limits(statistics: Statistics) -> Interval | None:
    """Return the lowest and highest value of a metric; None if it has none.

    Agreement of texts and classes is no cosine: it is not below 0.
    """
    if statistics.metric == AGREEMENT_METRIC and "cosine" not in statistics.signature:
        return 0.0, 100.0
    return find_metric(statistics.metric).limits


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
    precision by that share) a changed example loses at most its contribution. value: the score that may
    change.
    """
    known, own = find_metric(statistics.metric), _limits(statistics)
    if own is None:
        return None
    least, greatest = own
    share = wilson_interval(0, n, confidence)[1] / 100
    lost, gained = (greatest - least,) * 2 if known.kind == "corpus" else (value - least, greatest - value)
    return max(ends[0] - share * lost, limits[0]), min(ends[1] + share * gained, limits[1])


def _central_interval(drawn: Array, confidence: float) -> Interval:
    low, high = np.quantile(drawn, ((1 - confidence) / 2, (1 + confidence) / 2))
    return float(low), float(high)


def wilson_interval(correct: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the Wilson score interval of `correct` out of `n`, in percent (Wilson 1927)."""
    from scipy.stats import binomtest

    found = binomtest(correct, n).proportion_ci(confidence, method="wilson")
    return 100 * float(found.low), 100 * float(found.high)


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
        above = gained - lost - n * difference
        return above / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, above)

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
    p_value: two-sided. Accuracy, also of whole sets: McNemar's exact test. All others: paired bootstrap
    resampling (Koehn 2004, https://aclanthology.org/W04-3250), twice the smaller share of the resamples in
    which the difference is not positive or not negative, each count raised by one (Davison & Hinkley 1997);
    below ten such resamples the tail of the normal distribution with their mean and deviation, because 1000
    resamples cannot show a p-value below 0.002 (a correction for 25 comparisons would leave nothing
    significant); at least 2 / 2^n, the smallest p-value of Fisher's randomization test with n differing
    examples, because resamples of few examples are too similar.

    Raises:
        InputError: the two do not have the same examples and the same metric.
    """
    interval = difference_interval(step, other)
    difference = metric_value(step) - metric_value(other)
    if find_metric(step.metric).kind == "proportion":
        p_value = _mcnemar(*_discordant(step, other))
    else:
        least = min(1.0, 2.0 ** (1 - changed_examples(step, other)))
        p_value = max(_two_sided_p_value(_resampled_differences(step, other)), least)
    return {"difference": difference, "ci95": list(interval) if interval else None, "p_value": p_value}


def _check_pair(step: Statistics, other: Statistics) -> None:
    for what in ("metric", "signature", "examples"):
        own, theirs = getattr(step, what), getattr(other, what)
        if own != theirs:
            raise InputError(
                f"These scores cannot be compared in pairs: their {what} differ, {own!r} and {theirs!r}."
                " Score both steps on the same data with the same settings.",
                code=f"other-{what}",
            )
    if len(step.rows) != len(other.rows) and step.metric not in WINDOW_METRICS:
        raise InputError(
            f"These scores cannot be compared in pairs: {len(step.rows)} and {len(other.rows)} examples."
            " Score both steps on the same data.",
            code="count-mismatch",
        )


def _resampled_differences(step: Statistics, other: Statistics) -> Array:
    """Return the difference on each of the resamples, [R]: paired where the examples are the same."""
    own, theirs = _resampled_values(step), _resampled_values(other)  # one seed: both draw the same examples
    if _have_different_windows(step, other):
        theirs = np.roll(theirs, 1)  # independent draws
    return own - theirs


_MIN_TAIL = 10  # resamples; below that a share of them is too coarse


def _two_sided_p_value(drawn: Array) -> float:
    tail = min(np.count_nonzero(drawn <= 0), np.count_nonzero(drawn >= 0))
    share = min(1.0, 2 * (tail + 1) / (len(drawn) + 1))
    deviation = float(drawn.std(ddof=1))
    if tail >= _MIN_TAIL or deviation == 0:
        return float(share)
    # erfc is accurate in the tail, where 1 - cdf is 0
    return float(min(share, math.erfc(abs(float(drawn.mean())) / deviation / math.sqrt(2))))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number, in the same order.

    A corrected p-value below 0.05 means significant at a family-wise error rate of 5 %: the chance that any
    of the comparisons without a difference is called significant. Holm 1979, Scandinavian Journal of
    Statistics 6(2): the i-th smallest of m p-values times m - i + 1, at least the one before it, at most 1.
    """
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, at in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[at]))
        corrected[at] = largest
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
    rows = np.asarray(statistics.rows, dtype=np.float64)
    return np.concatenate(
        [weighted_values(statistics.metric, rows, weights) for weights in _resample_weights(len(rows))]
    )


def _resample_weights(n: int) -> Iterable[Array]:
    """Return how often each example was drawn, blocks [some of R, n], R rows in all."""
    return _kept_weights(n) if RESAMPLES * n <= _MAX_CELLS else _draw_weights(n)


@lru_cache(maxsize=1)  # all metrics and steps of a run have the same n
def _kept_weights(n: int) -> tuple[Array, ...]:
    found = tuple(_draw_weights(n))
    for block in found:
        block.flags.writeable = False
    return found


def _draw_weights(n: int) -> Iterator[Array]:
    generator = np.random.default_rng(BOOTSTRAP_SEED)
    block_size = max(1, min(RESAMPLES, _MAX_CELLS // n))
    for start in range(0, RESAMPLES, block_size):
        count = min(block_size, RESAMPLES - start)
        drawn = generator.integers(0, n, size=(count, n)) + np.arange(count)[:, None] * n
        yield np.bincount(drawn.ravel(), minlength=count * n).reshape(count, n).astype(np.float64)


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
    found: dict[str, dict[str, Any]] = {}
    for step in folds[0]:
        if not all(step in fold for fold in folds):
            continue
        found[step] = {}
        for metric in folds[0][step]:
            parts = [_fold_statistics(fold[step], metric) for fold in folds]
            values = [metric_value(part) for part in parts]
            compared = None
            if step != baseline and all(baseline in fold for fold in folds):
                others = [_fold_statistics(fold[baseline], metric) for fold in folds]
                compared = compare_steps(_join_folds(parts), _join_folds(others))
            found[step][metric] = {
                "values": values,
                "mean": numbers.fmean(values),
                "std": numbers.stdev(values),
                "against_baseline": compared,
            }
    return found


def _fold_statistics(scores: Mapping[str, Any], metric: str) -> Statistics:
    return Statistics.model_validate(scores[metric])


def _join_folds(parts: Sequence[Statistics]) -> Statistics:
    """Return the statistics of all folds together."""
    rows = [row for part in parts for row in part.rows]
    return parts[0].model_copy(
        update={"rows": rows, "examples": json_hash([part.examples for part in parts])}
    )
