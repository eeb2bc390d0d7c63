"""What a classifier's logits say: labels and probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.core.labels import MULTI, REGRESSION, class_names, problem_type


@dataclass(frozen=True)
class Prediction:
    """What a classifier says of one text.

    label: the class with the highest probability; of a model that gives a text several classes, those
    above one half; of a model that predicts a number, the number. probabilities: by class, 0 to 1;
    empty where a number is predicted.
    """

    label: str | tuple[str, ...] | float
    probabilities: Mapping[str, float]


def predictions(logits: NDArray[np.float32], config: Mapping[str, Any]) -> list[Prediction]:
    """Return what float32 `logits` [n, C] say, by the config's labels and kind of problem."""
    problem = problem_type(config)
    if problem == REGRESSION:
        return [Prediction(float(row[0]), {}) for row in logits]
    names = class_names(config)
    values = logits.astype(np.float64)
    if problem == MULTI:
        odds = 1 / (1 + np.exp(-values))
        chosen = [tuple(n for n, p in zip(names, row, strict=True) if p > 0.5) for row in odds]
        return [
            Prediction(label, dict(zip(names, map(float, row), strict=True)))
            for label, row in zip(chosen, odds, strict=True)
        ]
    odds = np.exp(values - values.max(axis=1, keepdims=True))
    odds /= odds.sum(axis=1, keepdims=True)
    return [
        Prediction(names[int(row.argmax())], dict(zip(names, map(float, row), strict=True))) for row in odds
    ]
