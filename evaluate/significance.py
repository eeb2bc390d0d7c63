"""Intervals and paired tests, from statistics that are kept per example.

A corpus score such as BLEU is a function of sums over the examples. Keeping each example's summands
makes an interval, or a test between two steps, a matter of summing again: nothing is decoded twice.

Shapes: n = examples, K = summands per example, R = resamples.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from statistics import NormalDist
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from smelt.core.errors import InputError
from smelt.evaluate.label_values import LABEL_VALUES
from smelt.evaluate.metrics import METRICS, WINDOW_METRICS

RESAMPLES = 1000
SEED = 12345  # sacrebleu's own default, so that both draw the same examples
_CELLS = 4_000_000  # weights held at a time: 32 MB

Array = NDArray[np.float64]
Interval = tuple[float, float]
# whose rows are a prediction and what it should have been, right or wrong
_HITS = frozenset({"accuracy", "subset_accuracy", "top1"})
# whose value is 100 times the mean of what the examples have
_MEANS = frozenset({"rouge1", "rouge2", "rougeL", "rougeLsum", "agreement", "relative_error"})

# of which an example gives its part
_SUMS = frozenset({"bleu", "chrf", *_MEANS})

# The least and the greatest value; those of `_UNLIMITED` metrics have no end.
_LIMITS = dict.fromkeys(METRICS, (0.0, 100.0)) | dict.fromkeys(
    ("agreement", "pearson", "spearman"), (-100.0, 100.0)
)
_UNLIMITED = frozenset({*WINDOW_METRICS, "mse", "relative_error"})
_ALIKE = 1e-9  # points; a bootstrap interval that is no wider is a point


class Statistics(BaseModel):
    """What each example adds to a metric; JSON-able.

    rows: [n, K]. bleu: length of the prediction, length of the nearest reference, 4 counts of matching
    n-grams, 4 counts of n-grams (sacrebleu's segment statistics); chrf: 6 times the counts of n-grams
    in prediction, reference and both; rouge: F1 in 0..1; accuracy and f1: predicted label, gold label;
    f1_micro and f1_macro: K times 0 or 1 as predicted, then as in the gold set; subset_accuracy: 1 where
    the whole set is right, then 1; pearson, spearman, mse: predicted number, gold number; agreement,
    where a row is a text: the cosine with the baseline's vector (of a graph's outputs: with the untouched
    one's); relative_error: a share; top1: 1 where the row's choices are the same, then 1; perplexity and
    bits_per_byte, where a row is a window: nats, tokens, bytes.
    examples: a hash of the references or gold labels; only equal ones can be compared in pairs.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    metric: str
    signature: str
    examples: str
    rows: list[list[int | float]]

    def dump(self) -> dict[str, Any]:
        """Return a JSON-able dict; `Statistics.model_validate` reads it back."""
        return self.model_dump(mode="json")


class Comparison(TypedDict):
    """A paired difference between two steps: first minus second, in the metric's unit."""

    difference: float
    ci95: list[float] | None
    p_value: float


def value_of(statistics: Statistics) -> float:
    """Return the metric's value on all examples, in the metric's unit (most: 0-100)."""
    rows = np.asarray(statistics.rows, dtype=np.float64)
    return float(_values(statistics.metric, rows, np.ones((1, len(rows))))[0])


def interval_of(statistics: Statistics, confidence: float = 0.95) -> Interval | None:
    """Return the two-sided interval of a score, in the metric's unit: Wilson's for hits, else a bootstrap."""
    if statistics.metric in _HITS:
        hits = sum(predicted == gold for predicted, gold in statistics.rows)
        return wilson_interval(hits, len(statistics.rows), confidence)
    return bootstrap_interval(statistics, confidence)


def bootstrap_interval(statistics: Statistics, confidence: float = 0.95) -> Interval | None:
    """Return the percentile interval over 1000 resamples of the examples (Efron 1979).

    Where fewer examples than `fewest` differ from the most frequent one, a bootstrap is a point or nearly so:
    it is then widened by what examples of a kind that was not seen may take or give: their share (Wilson's
    upper end of none of n) times what is lost where they are worthless, or gained where they are perfect (of
    F1 and correlations, which are no sums, the whole range). None of a point where the metric has no range.
    None of fewer examples than `fewest`, whose resamples are too alike: of one they are all the same.
    """
    n, metric = len(statistics.rows), statistics.metric
    if n < fewest(metric, confidence):
        return None
    low, high = _middle(_resampled(statistics), confidence)
    point = high - low <= _ALIKE
    [(_, equal)] = Counter(map(tuple, statistics.rows)).most_common(1)
    if not point and (metric in _UNLIMITED or n - equal >= fewest(metric, confidence)):
        return low, high
    return _widened((low, high), n, metric, value_of(statistics), confidence, _LIMITS[metric])


def difference_interval(step: Statistics, other: Statistics, confidence: float = 0.95) -> Interval | None:
    """Return the two-sided interval of `step` minus `other`: Tango's for hits, else a paired bootstrap.

    The same text in other windows (a vocabulary was trimmed) cannot be drawn in pairs: it is drawn apart.
    Where fewer examples differ than `fewest`, a bootstrap is a point or nearly so; it is then widened as in
    `bootstrap_interval`, by what may be lost of the other's score, or gained.
    None of too few examples, as in `bootstrap_interval`, or where so few differ and the metric has no range.
    """
    _check_pair(step, other)
    if step.metric in _HITS:
        return tango_interval(*_discordant(step, other), len(step.rows), confidence)
    n, changed, least = _examples(step, other), changed_examples(step, other), fewest(step.metric, confidence)
    if n < least:
        return None
    ends = _middle(_differences(step, other), confidence)
    if changed >= least and ends[1] - ends[0] > _ALIKE:
        return ends
    return _widened(ends, n, step.metric, value_of(other), confidence)


def fewest(metric: str, confidence: float = 0.95) -> int:
    """Return how many examples an interval of `metric` takes.

    A bootstrap's: as many differences of one sign as a randomization test needs to call them significant,
    2 / 2^n <= 1 - confidence: 6 at 0.95, 8 at 0.99. The score intervals of shares hold for one.
    """
    return 1 if metric in _HITS else 1 + math.ceil(-math.log2(1 - confidence))


def _examples(step: Statistics, other: Statistics) -> int:
    return min(len(step.rows), len(other.rows))


def changed_examples(step: Statistics, other: Statistics) -> int:
    """Return in how many examples the two differ; windows that make no pairs all do."""
    if _apart(step, other):
        return _examples(step, other)
    return sum(one != two for one, two in zip(step.rows, other.rows, strict=True))


def _apart(step: Statistics, other: Statistics) -> bool:
    """Tell whether a text was cut into other windows."""
    return step.metric in WINDOW_METRICS and [r[1:] for r in step.rows] != [r[1:] for r in other.rows]


def _widened(
    ends: Interval,
    n: int,
    metric: str,
    value: float,
    confidence: float,
    limits: Interval = (-math.inf, math.inf),
) -> Interval | None:
    """Return `ends`, widened by what the examples that were not seen may change; None for no known range.

    Of a sum over examples (BLEU nearly: a share of sentences without any match takes that share of every
    precision) those that change take away no more than they gave. value: of the score that may change.
    """
    if metric in _UNLIMITED:
        return None
    least, greatest = _LIMITS[metric]
    share = wilson_interval(0, n, confidence)[1] / 100
    lost, gained = (value - least, greatest - value) if metric in _SUMS else (greatest - least,) * 2
    return max(ends[0] - share * lost, limits[0]), min(ends[1] + share * gained, limits[1])


def _middle(drawn: Array, confidence: float) -> Interval:
    low, high = np.quantile(drawn, ((1 - confidence) / 2, (1 + confidence) / 2))
    return float(low), float(high)


def wilson_interval(correct: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the Wilson score interval of `correct` out of `n`, in percent (Wilson 1927)."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share, spread = correct / n, z * z / n
    middle = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * np.sqrt(share * (1 - share) / n + spread / (4 * n))
    return 100 * max(0.0, float(middle - half)), 100 * min(1.0, float(middle + half))


def tango_interval(gained: int, lost: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the score interval of a paired difference of two shares, in percent points.

    It holds the differences that a score test does not reject (Tango 1998, Statistics in Medicine 17(8)),
    as Wilson's does for one share. A bootstrap of few or no changed examples is a point or nearly so:
    of 50 examples of which none changed it would say that the difference is 0, where it may be 7 points.

    Args:
        gained: examples that only the first gets right.
        lost: examples that only the second gets right.
        n: all examples.
        confidence: of the two-sided interval.
    """
    z = NormalDist().inv_cdf((1 + confidence) / 2)

    def distance(difference: float) -> float:
        """How many standard errors the observed difference is above this one, were this one true."""
        b = (2 * n - gained + lost) * difference - gained - lost
        c = -lost * difference * (1 - difference)
        share = (math.sqrt(max(0.0, b * b - 8 * n * c)) - b) / (4 * n)  # most likely P(lost), given it
        variance = n * (2 * share + difference * (1 - difference))
        above = gained - lost - n * difference
        return above / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, above)

    middle = (gained - lost) / n
    return 100 * _crossing(distance, z, -1.0, middle), 100 * _crossing(distance, -z, middle, 1.0)


def _crossing(falling: Callable[[float], float], level: float, low: float, high: float) -> float:
    """Return where a falling function crosses `level` between two places, by halving."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > level else (low, middle)
    return (low + high) / 2


def compare(step: Statistics, other: Statistics) -> Comparison:
    """Compare two steps on the same examples: `step` minus `other`.

    difference and ci95: in the metric's unit; see `difference_interval`.
    p_value: two-sided. Accuracy, also of whole sets: McNemar's exact test. All others: paired bootstrap
    resampling (Koehn 2004, https://aclanthology.org/W04-3250), twice the smaller share of the resamples in
    which the difference is not positive or not negative, each count raised by one (Davison & Hinkley 1997),
    so that it never reads 0; nor less than 2 / 2^n, what turning the signs of the n examples that differ at
    will can give at least (Fisher's randomization test): resamples of one example are all alike.

    Raises:
        InputError: the two were not taken from the same examples with the same metric.
    """
    interval = difference_interval(step, other)
    difference = value_of(step) - value_of(other)
    if step.metric in _HITS:
        p_value = _mcnemar(*_discordant(step, other))
    else:
        least = min(1.0, 2.0 ** (1 - changed_examples(step, other)))
        p_value = max(_two_sided(_differences(step, other)), least)
    return {"difference": difference, "ci95": list(interval) if interval else None, "p_value": p_value}


def _check_pair(step: Statistics, other: Statistics) -> None:
    for what in ("metric", "signature", "examples"):
        one, two = getattr(step, what), getattr(other, what)
        if one != two:
            raise InputError(
                f"These scores cannot be compared in pairs: their {what} differ, {one!r} and {two!r}."
                " Score both steps on the same data with the same settings.",
                code=f"other-{what}",
            )
    if len(step.rows) != len(other.rows) and step.metric not in WINDOW_METRICS:
        raise InputError(
            f"These scores cannot be compared in pairs: {len(step.rows)} and {len(other.rows)} examples.",
            code="count-mismatch",
        )


def _differences(step: Statistics, other: Statistics) -> Array:
    """Return the difference on each of the resamples, [R]: in pairs where the examples are the same ones."""
    one, two = _resampled(step), _resampled(other)  # one seed: both see the same examples
    if _apart(step, other):
        two = np.roll(two, 1)  # another draw beside each
    return one - two


def _two_sided(drawn: Array) -> float:
    tails = (np.count_nonzero(drawn <= 0), np.count_nonzero(drawn >= 0))
    return float(min(1.0, 2 * (min(tails) + 1) / (len(drawn) + 1)))


def _discordant(step: Statistics, other: Statistics) -> tuple[int, int]:
    """Return how many examples only `step` gets right, and how many only `other`."""
    one = np.array([predicted == gold for predicted, gold in step.rows])
    two = np.array([predicted == gold for predicted, gold in other.rows])
    return int(np.sum(one & ~two)), int(np.sum(two & ~one))


def _mcnemar(only_one: int, only_two: int) -> float:
    """McNemar (1947), exact: a fair coin over the examples that only one of the two gets right."""
    from scipy.stats import binomtest

    if only_one + only_two == 0:
        return 1.0
    return float(binomtest(only_one, only_one + only_two, 0.5).pvalue)


def _resampled(statistics: Statistics) -> Array:
    """Return the metric on each of the resamples, [R]; equal n gives equal resamples."""
    rows = np.asarray(statistics.rows, dtype=np.float64)
    return np.concatenate([_values(statistics.metric, rows, weights) for weights in _weights(len(rows))])


def _weights(n: int) -> Iterator[Array]:
    """Yield how often each example was drawn, [some of R, n], R rows in all."""
    generator = np.random.default_rng(SEED)
    at_once = max(1, min(RESAMPLES, _CELLS // n))
    for start in range(0, RESAMPLES, at_once):
        count = min(at_once, RESAMPLES - start)
        drawn = generator.integers(0, n, size=(count, n)) + np.arange(count)[:, None] * n
        yield np.bincount(drawn.ravel(), minlength=count * n).reshape(count, n).astype(np.float64)


def _values(metric: str, rows: Array, weights: Array) -> Array:
    """Return the metric for each row of weights: [n, K], [R, n] -> [R]."""
    if metric in LABEL_VALUES:
        return LABEL_VALUES[metric](rows, weights)
    sums = weights @ rows
    if metric == "bleu":
        return _bleu(sums)
    if metric == "chrf":
        return _chrf(sums)
    if metric == "perplexity":
        # beyond 700 nats a float64 would be infinite, which no report can hold
        return np.asarray(np.exp(np.minimum(700.0, sums[:, 0] / sums[:, 1])))
    if metric == "bits_per_byte":
        return np.asarray(sums[:, 0] / np.log(2) / np.maximum(1, sums[:, 2]))
    if metric in _MEANS:
        return np.asarray(100 * sums[:, 0] / weights.sum(1))
    raise KeyError(f"'{metric}' has no value on resamples here; label_values.py holds those of labels")


def _bleu(sums: Array) -> Array:
    """Corpus BLEU with exponential smoothing from summed statistics, [R, 10] -> [R].

    Papineni et al. 2002, as in sacrebleu's `BLEU.compute_bleu` (Post 2018), over all resamples at once.
    """
    length, reference = sums[:, 0], sums[:, 1]
    correct, total = sums[:, 2:6], sums[:, 6:10]
    with np.errstate(divide="ignore", invalid="ignore"):
        brevity = np.where(length < reference, np.exp(1 - reference / length), 1.0)
        smooth = np.ones(len(sums))
        logarithms = np.zeros(len(sums))
        for order in range(4):
            none = (correct[:, order] == 0) & (total[:, order] > 0)
            smooth = np.where(none, 2 * smooth, smooth)
            matches = np.where(none, 1 / smooth, correct[:, order])
            # no n-gram of this order at all: log 0, the score is 0
            precision = np.where(total[:, order] > 0, 100 * matches / total[:, order], 0.0)
            logarithms += np.log(precision)
        score = brevity * np.exp(logarithms / 4)
    return np.where((correct.sum(1) == 0) | (length == 0), 0.0, score)


def _chrf(sums: Array) -> Array:
    """Corpus chrF2 over character 1- to 6-grams from summed statistics, [R, 18] -> [R].

    Popovic 2015, as in sacrebleu's `CHRF._compute_f_score`: orders that neither side has do not count.
    """
    predicted, reference, matched = (sums[:, i::3] for i in range(3))
    there = (predicted > 0) & (reference > 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        orders = np.maximum(there.sum(1), 1)
        precision = np.where(there, matched / predicted, 0.0).sum(1) / orders
        recall = np.where(there, matched / reference, 0.0).sum(1) / orders
        score = 100 * 5 * precision * recall / (4 * precision + recall)
    return np.where(precision + recall > 0, score, 0.0)
