"""Labels and probabilities from a classifier's logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.core.labels import MULTI_LABEL, REGRESSION, class_names, problem_type


@dataclass(frozen=True)
class ClassPrediction:
    """A classifier's prediction for one text.

    label: the class with the highest probability; of a multi-label model the classes above one half; of a
    regression model the number. probabilities: by class, 0 to 1; empty for regression.
    """

    label: str | tuple[str, ...] | float
    probabilities: Mapping[str, float]


def predictions_from_logits(logits: NDArray[np.float32], config: Mapping[str, Any]) -> list[ClassPrediction]:
    """Return the predictions of float32 `logits` [n, C], by the config's labels and problem type."""
    problem = problem_type(config)
    if problem == REGRESSION:
        return [ClassPrediction(float(row[0]), {}) for row in logits]
    names = class_names(config)
    values = logits.astype(np.float64)
    if problem == MULTI_LABEL:
        odds = 1 / (1 + np.exp(-values))
        chosen = [tuple(n for n, p in zip(names, row, strict=True) if p > 0.5) for row in odds]
        return [
            ClassPrediction(label, dict(zip(names, map(float, row), strict=True)))
            for label, row in zip(chosen, odds, strict=True)
        ]
    odds = np.exp(values - values.max(axis=1, keepdims=True))
    odds /= odds.sum(axis=1, keepdims=True)
    return [
        ClassPrediction(names[int(row.argmax())], dict(zip(names, map(float, row), strict=True)))
        for row in odds
    ]
