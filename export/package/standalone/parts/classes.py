"""What the logits of a classifier mean."""

from __future__ import annotations

from typing import Any

import numpy as np


def class_of(logits: Any, labels: list[str], problem: str) -> tuple[Any, Any]:
    """Return label and probabilities, a dict by label, of one input's logits, [C]."""
    values = logits.astype(np.float64)
    if problem == "regression":
        return float(values[0]), {}
    if problem == "multi_label_classification":
        chances = dict(zip(labels, (1 / (1 + np.exp(-values))).tolist(), strict=True))
        return tuple(name for name, chance in chances.items() if chance > 0.5), chances
    odds = np.exp(values - values.max())
    return labels[odds.argmax()], dict(zip(labels, (odds / odds.sum()).tolist(), strict=True))


# No name of a label moves a terminal's cursor or ends a line.
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}


def line(label: Any, chances: dict[str, float]) -> str:
    """Return an answer as a line: label, tab, probability; a number alone."""
    if isinstance(label, float):
        return f"{label:.4f}"
    names = [label] if isinstance(label, str) else list(label)
    shown = (name.translate(CONTROLS) for name in names)
    return "|".join(shown) + "\t" + "|".join(f"{chances[name]:.3f}" for name in names)
