"""Intervals and paired tests, from statistics stored per example.

A corpus score such as BLEU is a function of sums over the examples. With each example's summands stored,
an interval, or a test between two steps, only sums again: nothing is decoded twice.

Shapes: n = examples, K = summands per example (labels, for label metrics), R = resamples; weights [R, n]
count how often each example was drawn.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import Any, Literal, TypedDict

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from smelt.core.errors import InputError
from smelt.evaluate.metrics import (
    AGREEMENT_METRIC,
    RESPONSE_PERPLEXITY,
    WINDOW_METRICS,
    base_metric,
    find_metric,
)

Array = NDArray[np.float64]


def accuracy(rows: Array, weights: Array) -> Array:
    """Return the percentage of examples whose two labels are equal: [n, 2] -> [R]."""
    hits = (rows[:, 0] == rows[:, 1]).astype(np.float64)
    return np.asarray(100 * (weights @ hits) / weights.sum(1))


ClassCounts = tuple[Array, Array, Array]
"""By resample and class, [R, C]: how often it was predicted rightly, was predicted, and occurs."""


def _class_counts(rows: Array, weights: Array) -> ClassCounts:
    """Count the classes of rows with a predicted and a gold class, [n, 2].

    Where rows have a third column, a class that is the same in all of them, only that class is counted.
    """
    classes, codes = np.unique(rows[:, :2].astype(np.int64), return_inverse=True)
    predicted, gold = codes.reshape(len(rows), 2).T
    hit = predicted == gold
    found = np.empty((3, len(weights), len(classes)))
    for index, weight in enumerate(weights):
        found[0, index] = np.bincount(gold[hit], weights=weight[hit], minlength=len(classes))
        found[1, index] = np.bincount(predicted, weights=weight, minlength=len(classes))
        found[2, index] = np.bincount(gold, weights=weight, minlength=len(classes))
    if rows.shape[1] == 3:
        found = found[:, :, classes == rows[0, 2]]
    matched, guessed, present = found
    return matched, guessed, present


def _mean_of_seen(values: Array, counts: ClassCounts) -> Array:
    """Return the mean over the classes that a resample predicts or contains: [R, C] -> [R], 0 for none."""
    seen = counts[1] + counts[2] > 0
    return np.asarray(np.where(seen, values, 0).sum(1) / np.maximum(1, seen.sum(1)))


def macro_f1(rows: Array, weights: Array) -> Array:
    """Return the mean F1 over the classes that a resample predicts or contains, as sklearn's macro F1."""
    matched, predicted, gold = counts = _class_counts(rows, weights)
    return _mean_of_seen(_safe_ratio(2 * matched, predicted + gold), counts)


def macro_precision(rows: Array, weights: Array) -> Array:
    """Return the mean precision over the same classes; 0 for a class that is not predicted: [R]."""
    matched, predicted, _ = counts = _class_counts(rows, weights)
    return _mean_of_seen(_safe_ratio(matched, predicted), counts)


def macro_recall(rows: Array, weights: Array) -> Array:
    """Return the mean recall over the same classes; 0 for a class that a resample does not contain: [R]."""
    matched, _, gold = counts = _class_counts(rows, weights)
    return _mean_of_seen(_safe_ratio(matched, gold), counts)


def matthews(rows: Array, weights: Array) -> Array:
    """Return 100 times Matthews' correlation of predicted and gold classes; 0 where one is constant: [R].

    Gorodkin 2004, Computational Biology and Chemistry 28(5), for any number of classes.
    """
    matched, predicted, gold = _class_counts(rows, weights)
    total = weights.sum(1)
    together = matched.sum(1) * total - (predicted * gold).sum(1)
    spread = (total**2 - (predicted**2).sum(1)) * (total**2 - (gold**2).sum(1))
    return _safe_ratio(together, np.sqrt(np.maximum(0, spread)))


def _label_sets_metric(over_all: bool, of: Literal["f1", "precision", "recall"]) -> Callable[..., Array]:
    """Return F1, precision or recall of label sets: of all labels together (micro), or their mean (macro).

    Rows hold K predictions, then K gold: [n, 2K] -> [R]. 0 for a label without denominator in a resample.
    """

    def value(rows: Array, weights: Array) -> Array:
        predicted, gold = np.split(rows, 2, axis=1)
        counts = [weights @ (predicted * gold), weights @ predicted, weights @ gold]
        matched, guessed, present = (each.sum(1, keepdims=True) for each in counts) if over_all else counts
        below = {"f1": (guessed + present) / 2, "precision": guessed, "recall": present}[of]
        return np.asarray(_safe_ratio(matched, below).mean(axis=1))

    return value


def _safe_ratio(above: Array, below: Array) -> Array:
    """Return 100 times the ratio, 0 where `below` is 0."""
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
    "f1": macro_f1,
    "precision": macro_precision,
    "recall": macro_recall,
    "matthews": matthews,
    "f1_micro": _label_sets_metric(True, "f1"),
    "f1_macro": _label_sets_metric(False, "f1"),
    "precision_micro": _label_sets_metric(True, "precision"),
    "precision_macro": _label_sets_metric(False, "precision"),
    "recall_micro": _label_sets_metric(True, "recall"),
    "recall_macro": _label_sets_metric(False, "recall"),
    "pearson": pearson,
    "spearman": spearman,
    "mse": mean_squared_error,
}


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
    return float(_metric_values(statistics.metric, rows, np.ones((1, len(rows))))[0])


def example_values(statistics: Statistics) -> Array | None:
    """Return the metric's value on each example alone, [n], in its unit; None for metrics without one.

    bleu and chrf: sacrebleu's sentence-level scores (BLEU with effective order: only orders of n-grams that
    the prediction has). accuracy, f1: 100 where the prediction is right; f1_micro and f1_macro: F1 of the
    example's own labels, 100 where it neither has nor gets any; mse: the squared error. Correlations and
    perplexity of running text have no value on one example.
    """
    rows, metric = np.asarray(statistics.rows, dtype=np.float64), base_metric(statistics.metric)
    if metric == "bleu":
        return _bleu(rows, effective_order=True)
    if metric == "chrf":
        return _chrf(rows)
    known = find_metric(metric)
    if known.kind == "mean":
        return np.asarray(known.scale * rows[:, 0])
    if known.kind == "proportion" or metric == "f1":
        return np.asarray(100.0 * (rows[:, 0] == rows[:, 1]))
    if metric in ("f1_micro", "f1_macro"):
        predicted, gold = np.split(rows, 2, axis=1)
        either = (predicted + gold).sum(1)
        return np.where(either > 0, _safe_ratio(2 * (predicted * gold).sum(1), either), 100.0)
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
        [_metric_values(statistics.metric, rows, weights) for weights in _resample_weights(len(rows))]
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


def _metric_values(metric: str, rows: Array, weights: Array) -> Array:
    """Return the metric for each row of weights: [n, K], [R, n] -> [R]."""
    known = find_metric(metric)
    function = accuracy if known.kind == "proportion" else LABEL_METRIC_FUNCTIONS.get(base_metric(metric))
    if function is not None:
        return function(rows, weights)
    sums = weights @ rows
    if metric == "bleu":
        return _bleu(sums)
    if metric == "chrf":
        return _chrf(sums)
    if metric in ("perplexity", RESPONSE_PERPLEXITY):
        # beyond 700 nats a float64 would be infinite, which a report cannot contain
        return np.asarray(np.exp(np.minimum(700.0, sums[:, 0] / sums[:, 1])))
    if metric == "bits_per_byte":
        return np.asarray(sums[:, 0] / np.log(2) / np.maximum(1, sums[:, 2]))
    if known.kind == "mean":
        return np.asarray(known.scale * sums[:, 0] / weights.sum(1))
    raise KeyError(f"'{metric}' has no value on resamples")


def _bleu(sums: Array, effective_order: bool = False) -> Array:
    """Return corpus BLEU with exponential smoothing from summed statistics, [R, 10] -> [R].

    Papineni et al. 2002, as in sacrebleu's `BLEU.compute_bleu` (Post 2018), over all resamples at once.
    effective_order: whether orders without n-grams are left out of the mean; otherwise the score is then 0.
    """
    length, reference = sums[:, 0], sums[:, 1]
    correct, total = sums[:, 2:6], sums[:, 6:10]
    orders = np.maximum(1, (total > 0).sum(1)) if effective_order else 4
    with np.errstate(divide="ignore", invalid="ignore"):
        brevity = np.where(length < reference, np.exp(1 - reference / length), 1.0)
        smooth = np.ones(len(sums))
        logarithms = np.zeros(len(sums))
        for order in range(4):
            none = (correct[:, order] == 0) & (total[:, order] > 0)
            smooth = np.where(none, 2 * smooth, smooth)
            matches = np.where(none, 1 / smooth, correct[:, order])
            # no n-gram of this order: log 0, the score is 0
            absent = 1.0 if effective_order else 0.0
            precision = np.where(total[:, order] > 0, 100 * matches / total[:, order], absent)
            logarithms += np.log(precision)
        score = brevity * np.exp(logarithms / orders)
    return np.where((correct.sum(1) == 0) | (length == 0), 0.0, score)


def _chrf(sums: Array) -> Array:
    """Return corpus chrF2 over character 1- to 6-grams from summed statistics, [R, 18] -> [R].

    Popovic 2015, as in sacrebleu's `CHRF._compute_f_score`: orders that neither side has do not count.
    """
    predicted, reference, matched = (sums[:, i::3] for i in range(3))
    present = (predicted > 0) & (reference > 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        orders = np.maximum(present.sum(1), 1)
        precision = np.where(present, matched / predicted, 0.0).sum(1) / orders
        recall = np.where(present, matched / reference, 0.0).sum(1) / orders
        score = 100 * 5 * precision * recall / (4 * precision + recall)
    return np.where(precision + recall > 0, score, 0.0)
