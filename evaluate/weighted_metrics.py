"""Values of metrics from the summands of examples, for many weightings of the examples at once.

Shapes: n = examples, K = summands per example (labels, for label metrics), R = resamples; weights [R, n]
count how often each example was drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from smelt.evaluate.metrics import RESPONSE_PERPLEXITY, base_metric, find_metric

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
    return _mean_of_seen(safe_ratio(2 * matched, predicted + gold), counts)


def macro_precision(rows: Array, weights: Array) -> Array:
    """Return the mean precision over the same classes; 0 for a class that is not predicted: [R]."""
    matched, predicted, _ = counts = _class_counts(rows, weights)
    return _mean_of_seen(safe_ratio(matched, predicted), counts)


def macro_recall(rows: Array, weights: Array) -> Array:
    """Return the mean recall over the same classes; 0 for a class that a resample does not contain: [R]."""
    matched, _, gold = counts = _class_counts(rows, weights)
    return _mean_of_seen(safe_ratio(matched, gold), counts)


def matthews(rows: Array, weights: Array) -> Array:
    """Return 100 times Matthews' correlation of predicted and gold classes; 0 where one is constant: [R].

    Gorodkin 2004, Computational Biology and Chemistry 28(5), for any number of classes.
    """
    matched, predicted, gold = _class_counts(rows, weights)
    total = weights.sum(1)
    together = matched.sum(1) * total - (predicted * gold).sum(1)
    spread = (total**2 - (predicted**2).sum(1)) * (total**2 - (gold**2).sum(1))
    return safe_ratio(together, np.sqrt(np.maximum(0, spread)))


LabelSetStatistic = Literal["f1", "precision", "recall"]


def _label_sets_metric(over_all: bool, of: LabelSetStatistic) -> Callable[..., Array]:
    """Return F1, precision or recall of label sets: of all labels together (micro), or their mean (macro).

    Rows hold K predictions, then K gold: [n, 2K] -> [R]. 0 for a label without denominator in a resample.
    """

    def value(rows: Array, weights: Array) -> Array:
        predicted, gold = np.split(rows, 2, axis=1)
        return _label_sets_value(
            (weights @ (predicted * gold), weights @ predicted, weights @ gold), over_all, of
        )

    return value


def _label_sets_value(counts: ClassCounts, over_all: bool, of: LabelSetStatistic) -> Array:
    """Return the value of `_label_sets_metric` from counts by label, [R, K] -> [R]."""
    matched, guessed, present = (each.sum(1, keepdims=True) for each in counts) if over_all else counts
    below = {"f1": (guessed + present) / 2, "precision": guessed, "recall": present}[of]
    return np.asarray(safe_ratio(matched, below).mean(axis=1))


def single_change(metric: str, rows: Array) -> tuple[float, float]:
    """Return the largest loss and the largest gain of a metric by one other prediction.

    Of a mean over classes, that is an example of the rarest class. 0 for metrics of numbers, where one
    prediction may change as much as it likes.

    Args:
        metric: its name.
        rows: [n, K], as in `smelt.evaluate.significance.Statistics`.
    """
    base, name = float(weighted_values(metric, rows, np.ones((1, len(rows))))[0]), base_metric(metric)
    average, _, kind = name.partition("_")
    if kind in ("micro", "macro"):
        values = _label_sets_value(_changed_label_counts(rows), kind == "micro", average)  # type: ignore[arg-type]
    elif name in ("f1", "precision", "recall", "matthews"):
        values = weighted_values(metric, *_changed_classes(rows))
    else:
        return 0.0, 0.0
    return max(0.0, base - float(values.min())), max(0.0, float(values.max()) - base)


def _changed_label_counts(rows: Array) -> ClassCounts:
    """Return the counts by label after one prediction of one label changed, each [changes, K]."""
    predicted, gold = np.split(rows, 2, axis=1)
    matched, guessed, present = (predicted * gold).sum(0), predicted.sum(0), gold.sum(0)
    unit = np.eye(len(matched))
    changes = (
        (matched > 0, -unit, -unit),  # a right label is missing
        (present > matched, unit, unit),  # a missing label is right
        (guessed > matched, 0 * unit, -unit),  # an extra label is left out
        (len(rows) - guessed - present + matched > 0, 0 * unit, unit),  # an extra label
    )
    hits = np.concatenate([matched + change[possible] for possible, change, _ in changes])
    guesses = np.concatenate([guessed + change[possible] for possible, _, change in changes])
    return hits, guesses, np.broadcast_to(present, hits.shape)


def _changed_classes(rows: Array) -> tuple[Array, Array]:
    """Return rows and weights, [r, K] and [changes, r], after the class of one example changed.

    A right prediction becomes the most frequent other class, a wrong one becomes right.
    """
    kinds, counts = np.unique(rows, axis=0, return_counts=True)
    classes, frequency = np.unique(rows[:, 0], return_counts=True)
    frequent = classes[np.argsort(-frequency, kind="stable")]
    changed = kinds.copy()
    for row in changed:
        other = next((label for label in frequent if label != row[1]), rows[:, :2].max() + 1)
        row[0] = other if row[0] == row[1] else row[1]
    unit = np.eye(len(kinds))
    return np.concatenate([kinds, changed]), np.concatenate([counts - unit, unit], axis=1)


def safe_ratio(above: Array, below: Array) -> Array:
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


def weighted_values(metric: str, rows: Array, weights: Array) -> Array:
    """Return the metric for each row of weights: [n, K], [R, n] -> [R]."""
    known = find_metric(metric)
    function = accuracy if known.kind == "proportion" else LABEL_METRIC_FUNCTIONS.get(base_metric(metric))
    if function is not None:
        return function(rows, weights)
    sums = weights @ rows
    if metric == "bleu":
        return corpus_bleu(sums)
    if metric == "chrf":
        return corpus_chrf(sums)
    if metric in ("perplexity", RESPONSE_PERPLEXITY):
        # beyond 700 nats a float64 would be infinite, which a report cannot contain
        return np.asarray(np.exp(np.minimum(700.0, sums[:, 0] / sums[:, 1])))
    if metric == "bits_per_byte":
        return np.asarray(sums[:, 0] / np.log(2) / np.maximum(1, sums[:, 2]))
    if known.kind == "mean":
        return np.asarray(known.scale * sums[:, 0] / weights.sum(1))
    raise KeyError(f"'{metric}' has no value on resamples")


def corpus_bleu(sums: Array, effective_order: bool = False) -> Array:
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


def corpus_chrf(sums: Array) -> Array:
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
