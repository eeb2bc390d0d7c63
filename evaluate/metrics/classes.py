"""Accuracy, F1, precision, recall and Matthews' correlation of predicted classes, as scikit-learn's.

Shapes: n = examples, R = resamples, C = classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import numpy as np
from pydantic import Field

from smelt.data.labels import SINGLE_LABEL
from smelt.evaluate.metrics.metric import (
    BOOTSTRAP_SIGNATURE,
    CORRELATION_LIMITS,
    Array,
    ClassSamples,
    ExampleRows,
    Metric,
    Rows,
    most_frequent_gold,
    safe_ratio,
    value_on_all,
)
from smelt.stage import Settings


class ClassSettings(Settings):
    """Settings of `precision`, `recall` and `f1` of a classifier with one label."""

    label: str | int | None = Field(
        default=None, description="the only class that is scored; default: the mean over all classes"
    )


class ClassMetric(Metric[ClassSamples]):
    """Rows, K = 2 or 3: predicted class, gold class, and where only one class is scored that class."""

    samples = (ClassSamples,)

    def example_rows(self, samples: ClassSamples, settings: Mapping[str, Any]) -> ExampleRows:
        """Return the classes of each example; settings: `label`, the number of the only class."""
        label = settings.get("label")
        label_columns = [] if label is None else [label]
        pairs = zip(samples.predicted, samples.gold, strict=True)
        rows: Rows = [[int(predicted), int(gold), *label_columns] for predicted, gold in pairs]
        return ExampleRows(rows, self._signature(label), self._library_value(samples, label))

    def _signature(self, label: int | None) -> str:
        average = "average:macro" if label is None else f"class:{label}"
        return f"{average}|{BOOTSTRAP_SIGNATURE}|{_library()}"

    def _library_value(self, samples: ClassSamples, label: int | None) -> float | None:
        """Return the value as scikit-learn computes it, if `value` may round it differently."""
        return None

    def changed_values(self, rows: Array) -> Array:
        """Return the values after the class of one example changed, of each kind of example."""
        return self.value(*_changed_classes(rows))

    def chance_level(self, rows: Rows) -> float:
        """Return the value of the most frequent class for every example."""
        return value_on_all(self, most_frequent_gold(rows, 1))


def _library() -> str:
    return f"version:scikit-learn {version('scikit-learn')}"


class Accuracy(ClassMetric):
    """The percentage of examples whose class is right."""

    def _signature(self, label: int | None) -> str:
        return f"ci:wilson|{_library()}"

    def _library_value(self, samples: ClassSamples, label: int | None) -> float:
        from sklearn.metrics import accuracy_score

        return 100 * float(accuracy_score(samples.gold, samples.predicted))


ClassCounts = tuple[Array, Array, Array]
"""By resample and class, [R, C]: how often it was predicted rightly, was predicted, and occurs."""


def _class_counts(rows: Array, weights: Array) -> ClassCounts:
    """Count the classes of rows with a predicted and a gold class, [n, 2].

    Where rows have a third column, a class that is the same in all of them, only that class is counted.
    """
    classes, codes = np.unique(rows[:, :2].astype(np.int64), return_inverse=True)
    predicted, gold = codes.reshape(len(rows), 2).T
    hit = predicted == gold
    class_counts = np.empty((3, len(weights), len(classes)))
    for index, weight in enumerate(weights):
        class_counts[0, index] = np.bincount(gold[hit], weights=weight[hit], minlength=len(classes))
        class_counts[1, index] = np.bincount(predicted, weights=weight, minlength=len(classes))
        class_counts[2, index] = np.bincount(gold, weights=weight, minlength=len(classes))
    if rows.shape[1] == 3:
        class_counts = class_counts[:, :, classes == rows[0, 2]]
    true_positives, guessed, present = class_counts
    return true_positives, guessed, present


def _mean_of_seen(values: Array, counts: ClassCounts) -> Array:
    """Return the mean over the classes that a resample predicts or contains: [R, C] -> [R], 0 for none."""
    is_present = counts[1] + counts[2] > 0
    return np.asarray(np.where(is_present, values, 0).sum(1) / np.maximum(1, is_present.sum(1)))


class F1(ClassMetric):
    """The mean F1 over the classes that a resample predicts or contains, as sklearn's macro F1."""

    def value(self, rows: Array, weights: Array) -> Array:
        """Return macro F1, or that of one class: [R]."""
        true_positives, predicted, gold = counts = _class_counts(rows, weights)
        return _mean_of_seen(safe_ratio(2 * true_positives, predicted + gold), counts)

    def _library_value(self, samples: ClassSamples, label: int | None) -> float | None:
        from sklearn.metrics import f1_score

        if label is not None:
            return None
        return 100 * float(f1_score(samples.gold, samples.predicted, average="macro"))

    def example_values(self, rows: Array) -> Array:
        """Return 100 where the prediction is right: of one example it is accuracy."""
        return np.asarray(100.0 * (rows[:, 0] == rows[:, 1]))


class Precision(ClassMetric):
    """The mean precision over the same classes; 0 for a class that is not predicted."""

    def value(self, rows: Array, weights: Array) -> Array:
        """Return macro precision, or that of one class: [R]."""
        true_positives, predicted, _ = counts = _class_counts(rows, weights)
        return _mean_of_seen(safe_ratio(true_positives, predicted), counts)


class Recall(ClassMetric):
    """The mean recall over the same classes; 0 for a class that a resample does not contain."""

    def value(self, rows: Array, weights: Array) -> Array:
        """Return macro recall, or that of one class: [R]."""
        true_positives, _, gold = counts = _class_counts(rows, weights)
        return _mean_of_seen(safe_ratio(true_positives, gold), counts)


class Matthews(ClassMetric):
    """100 times Matthews' correlation of predicted and gold classes; 0 where one is constant.

    Gorodkin 2004, Computational Biology and Chemistry 28(5), for any number of classes.
    """

    def value(self, rows: Array, weights: Array) -> Array:
        """Return the correlation: [R]."""
        true_positives, predicted, gold = _class_counts(rows, weights)
        total = weights.sum(1)
        together = true_positives.sum(1) * total - (predicted * gold).sum(1)
        variance_product = (total**2 - (predicted**2).sum(1)) * (total**2 - (gold**2).sum(1))
        return safe_ratio(together, np.sqrt(np.maximum(0, variance_product)))

    def _signature(self, label: int | None) -> str:
        return f"x100|constant:0|{BOOTSTRAP_SIGNATURE}|formula:{_library()}"


def _changed_classes(rows: Array) -> tuple[Array, Array]:
    """Return rows and weights, [r, K] and [changes, r], after the class of one example changed.

    A right prediction becomes the most frequent other class, a wrong one becomes right.
    """
    unique_rows, counts = np.unique(rows, axis=0, return_counts=True)
    classes, frequency = np.unique(rows[:, 0], return_counts=True)
    frequent = classes[np.argsort(-frequency, kind="stable")]
    changed_rows = unique_rows.copy()
    for row in changed_rows:
        other = next((label for label in frequent if label != row[1]), rows[:, :2].max() + 1)
        row[0] = other if row[0] == row[1] else row[1]
    unit = np.eye(len(unique_rows))
    return np.concatenate([unique_rows, changed_rows]), np.concatenate([counts - unit, unit], axis=1)


_SINGLE = (SINGLE_LABEL,)
_OF_CLASSES = "mean over the classes that occur, or of one class; 0 where undefined"
ACCURACY = Accuracy(
    name="accuracy",
    title="Accuracy",
    unit="%",
    description="predictions that are right",
    tasks=_SINGLE,
    optional=("image-text",),
    kind="proportion",
    libraries=("scikit-learn",),
)
F1_OF_CLASSES = F1(
    name="f1",
    title="F1",
    unit="F1",
    description=f"F1, {_OF_CLASSES}",
    tasks=_SINGLE,
    libraries=("scikit-learn",),
    settings=ClassSettings,
    has_variants=True,
    example_metric="accuracy",
)
PRECISION = Precision(
    name="precision",
    title="Precision",
    unit="%",
    description=f"precision, {_OF_CLASSES}",
    optional=_SINGLE,
    libraries=("scikit-learn",),
    settings=ClassSettings,
    has_variants=True,
)
RECALL = Recall(
    name="recall",
    title="Recall",
    unit="%",
    description=f"recall, {_OF_CLASSES}",
    optional=_SINGLE,
    libraries=("scikit-learn",),
    settings=ClassSettings,
    has_variants=True,
)
MATTHEWS = Matthews(
    name="matthews",
    title="Matthews correlation",
    unit="Matthews",
    description="Matthews' correlation times 100; 0 where undefined",
    optional=_SINGLE,
    limits=CORRELATION_LIMITS,
    libraries=("scikit-learn",),
)
