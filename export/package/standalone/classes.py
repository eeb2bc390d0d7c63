"""Convert the logits of a classifier to labels and probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np


def predict_class(
    logits: Any, labels: list[str], problem: str, thresholds: list[float] | None = None
) -> tuple[Any, Any]:
    """Return label and probabilities, a dict by label, of one input's logits, [C].

    thresholds: of a multi-label model, the probability of each label above which it is predicted.
    """
    values = logits.astype(np.float64)
    if problem == "regression":
        return (float(values[0]) if len(values) == 1 else tuple(values.tolist())), {}
    if problem == "multi_label_classification":
        probabilities = dict(zip(labels, (1 / (1 + np.exp(-values))).tolist(), strict=True))
        limits = np.array(thresholds if thresholds is not None else [0.5] * len(labels))
        is_predicted = values > np.log(limits / (1 - limits))
        return tuple(labels[index] for index in is_predicted.nonzero()[0]), probabilities
    odds = np.exp(values - values.max())
    return labels[odds.argmax()], dict(zip(labels, (odds / odds.sum()).tolist(), strict=True))


def json_predictions(predictions: list[tuple[Any, Any]]) -> list[dict[str, Any]]:
    """Return predictions as JSON values."""
    return [{"label": label, "probabilities": probabilities} for label, probabilities in predictions]


# Control characters in a label's name cannot move a terminal's cursor or end a line.
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}


def prediction_line(label: Any, chances: dict[str, float]) -> str:
    """Return an answer as a line: label, tab, probability; for a regression model only the number.

    Several labels are joined by `|`, as their probabilities, and several numbers; without a label
    both are `-`.
    """
    if not chances:
        return "|".join(f"{number:.4f}" for number in ((label,) if isinstance(label, float) else label))
    names = [label] if isinstance(label, str) else list(label)
    if not names:
        return "-\t-"
    safe_names = (name.translate(CONTROLS) for name in names)
    return "|".join(safe_names) + "\t" + "|".join(f"{chances[name]:.3f}" for name in names)
