"""F1, precision, recall and accuracy of sets of labels, as scikit-learn's.

Shapes: n = examples, R = resamples, C = labels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal

import numpy as np

from smelt.data.labels import MULTI_LABEL
from smelt.evaluate.metrics.metric import (
    BOOTSTRAP_SIGNATURE,
    Array,
    ExampleRows,
    LabelSetSamples,
    Metric,
    Rows,
    most_frequent_gold,
    safe_ratio,
    value_on_all,
)

LabelCounts = tuple[Array, Array, Array]
"""By resample and label, [R, C]: how often it was predicted rightly, was predicted, and occurs."""


@dataclass(frozen=True, kw_only=True)
class LabelSetMetric(Metric[LabelSetSamples]):
    """Rows, K = 2 C: 0 or 1 by label as predicted, then as in the gold set.

    statistic: F1, precision or recall. average: of all labels together (micro), or the mean of the labels'
    (macro), with 0 for a label without denominator in a resample.
    """

    samples = (LabelSetSamples,)
    statistic: Literal["f1", "precision", "recall"]
    average: Literal["micro", "macro"]

    def example_rows(self, samples: LabelSetSamples, settings: Mapping[str, Any]) -> ExampleRows:
        """Return the predicted and the gold labels of each example.

        The signature is that of all steps, which may have other `label_thresholds` in their configs.
        """
        library = f"version:scikit-learn {version('scikit-learn')}"
        signature = f"average:{self.average}|threshold:model|empty:0|{BOOTSTRAP_SIGNATURE}|formula:{library}"
        return ExampleRows(np.concatenate([samples.predicted, samples.gold], axis=1).tolist(), signature)

    def value(self, rows: Array, weights: Array) -> Array:
        """Return the statistic: [R]."""
        predicted, gold = np.split(rows, 2, axis=1)
        return self._combine((weights @ (predicted * gold), weights @ predicted, weights @ gold))

    def _combine(self, counts: LabelCounts) -> Array:
        """Return the statistic from counts by label, [R, C] -> [R]."""
        together = self.average == "micro"
        true_positives, guessed, present = (
            (label_counts.sum(1, keepdims=True) for label_counts in counts) if together else counts
        )
        denominators = {"f1": (guessed + present) / 2, "precision": guessed, "recall": present}[
            self.statistic
        ]
        return np.asarray(safe_ratio(true_positives, denominators).mean(axis=1))

    def example_values(self, rows: Array) -> Array | None:
        """Return F1 of each example's own labels, 100 where it neither has nor gets any."""
        if self.statistic != "f1":
            return None
        predicted, gold = np.split(rows, 2, axis=1)
        total_labels = (predicted + gold).sum(1)
        return np.where(total_labels > 0, safe_ratio(2 * (predicted * gold).sum(1), total_labels), 100.0)

    def changed_values(self, rows: Array) -> Array:
        """Return the values after one label of an example changed."""
        return self._combine(_changed_label_counts(rows))

    def chance_level(self, rows: Rows) -> float:
        """Return the value of the most frequent set for every example."""
        return value_on_all(self, most_frequent_gold(rows, len(rows[0]) // 2))


class SubsetAccuracy(Metric[LabelSetSamples]):
    """Rows, K = 2: 1 where the whole set is right, then 1."""

    samples = (LabelSetSamples,)

    def example_rows(self, samples: LabelSetSamples, settings: Mapping[str, Any]) -> ExampleRows:
        """Return whether each set is right."""
        hits = (samples.predicted == samples.gold).all(axis=1)
        [(_, max_frequency)] = Counter(map(tuple, samples.gold.tolist())).most_common(1)
        return ExampleRows(
            [[int(hit), 1] for hit in hits], "ci:wilson", chance=100 * max_frequency / len(hits)
        )


def _changed_label_counts(rows: Array) -> LabelCounts:
    """Return the counts by label after one prediction of one label changed, each [changes, K]."""
    predicted, gold = np.split(rows, 2, axis=1)
    true_positives, guessed, present = (predicted * gold).sum(0), predicted.sum(0), gold.sum(0)
    unit = np.eye(len(true_positives))
    changes = (
        (true_positives > 0, -unit, -unit),  # a right label is missing
        (present > true_positives, unit, unit),  # a missing label is right
        (guessed > true_positives, 0 * unit, -unit),  # an extra label is left out
        (len(rows) - guessed - present + true_positives > 0, 0 * unit, unit),  # an extra label
    )
    hits = np.concatenate([true_positives + change[possible] for possible, change, _ in changes])
    guesses = np.concatenate([guessed + change[possible] for possible, _, change in changes])
    return hits, guesses, np.broadcast_to(present, hits.shape)


_MULTI = (MULTI_LABEL,)
_ALL, _MEAN = "all labels together; 0 where undefined", "mean over the labels; 0 where undefined"
F1_MICRO = LabelSetMetric(
    name="f1_micro",
    title="F1 micro",
    unit="F1",
    description=f"F1, {_ALL}",
    tasks=_MULTI,
    libraries=("scikit-learn",),
    statistic="f1",
    average="micro",
)
F1_MACRO = LabelSetMetric(
    name="f1_macro",
    title="F1 macro",
    unit="F1",
    description=f"F1, {_MEAN}",
    tasks=_MULTI,
    libraries=("scikit-learn",),
    statistic="f1",
    average="macro",
)
SUBSET_ACCURACY = SubsetAccuracy(
    name="subset_accuracy",
    title="Subset accuracy",
    unit="%",
    description="sets with no label missing or extra",
    tasks=_MULTI,
    kind="proportion",
    libraries=("scikit-learn",),
)


def _optional(
    statistic: Literal["precision", "recall"], average: Literal["micro", "macro"]
) -> LabelSetMetric:
    return LabelSetMetric(
        name=f"{statistic}_{average}",
        title=f"{statistic.capitalize()} {average}",
        unit="%",
        description=f"{statistic}, {_ALL if average == 'micro' else _MEAN}",
        optional=_MULTI,
        libraries=("scikit-learn",),
        statistic=statistic,
        average=average,
    )


PRECISION_OF_LABELS = (_optional("precision", "micro"), _optional("precision", "macro"))
RECALL_OF_LABELS = (_optional("recall", "micro"), _optional("recall", "macro"))
