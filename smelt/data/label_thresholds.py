"""Thresholds of a multi-label classifier: the probability above which each of its labels is predicted.

They are in config.json as `label_thresholds`, a number for all labels or a mapping by name; 0.5 without it.

Shapes: n = samples, C = labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.core.errors import InputError, did_you_mean
from smelt.data.labels import class_names

CONFIG_KEY = "label_thresholds"
DEFAULT_THRESHOLD = 0.5


def label_thresholds(config: Mapping[str, Any]) -> list[float]:
    """Return the threshold of each label of a model, in the order of its outputs.

    Raises:
        InputError: `wrong-label-thresholds`: a threshold is not between 0 and 1, or of no label of the model.
    """
    return complete_thresholds(config.get(CONFIG_KEY), class_names(config), "config.json")


def complete_thresholds(value: Any, names: Sequence[str], location: str) -> list[float]:
    """Return the threshold of each of `names`: of `value`, a number or a mapping; without one 0.5.

    Raises:
        InputError: `wrong-label-thresholds`.
    """
    by_name = value if isinstance(value, Mapping) else dict.fromkeys(names, value)
    for name, threshold in by_name.items():
        if name not in names:
            raise InputError(
                f"{location}: {CONFIG_KEY}: {name!r} is not one of the model's {len(names)} labels:"
                f" {', '.join(names[:20])}.{did_you_mean(str(name), names)}",
                code="wrong-label-thresholds",
                setting=CONFIG_KEY,
            )
        is_number = isinstance(threshold, int | float) and not isinstance(threshold, bool)
        if threshold is not None and not (is_number and 0 < threshold < 1):
            raise InputError(
                f"{location}: {CONFIG_KEY}: a threshold is a probability above 0 and below 1, got"
                f" {repr(threshold)[:40]} for {name!r}.",
                code="wrong-label-thresholds",
                setting=CONFIG_KEY,
            )
    return [float(by_name.get(name) or DEFAULT_THRESHOLD) for name in names]


def logit_thresholds(config: Mapping[str, Any]) -> NDArray[np.float64]:
    """Return log(t / (1 - t)) of the threshold t of each label: float64 [C], 0 for 0.5.

    Raises:
        InputError: as `label_thresholds`.
    """
    thresholds = np.array(label_thresholds(config))
    return np.asarray(np.log(thresholds / (1 - thresholds)))


def predicted_labels(logits: NDArray[np.float32], config: Mapping[str, Any]) -> NDArray[np.bool_]:
    """Return which labels are predicted: float32 [n, C] -> bool [n, C].

    Raises:
        InputError: as `label_thresholds`.
    """
    return np.asarray(logits.astype(np.float64) > logit_thresholds(config))


def best_f1_threshold(probabilities: NDArray[np.float64], gold: NDArray[np.bool_]) -> float:
    """Return the threshold with the highest F1, in the middle between two neighboring probabilities.

    Of equally good ones the nearest to 0.5; 0.5 if no label is true. It is above 0, so that probabilities
    that are rounded to 0 are never predicted.

    Args:
        probabilities: float [n].
        gold: bool [n].

    Source: Lipton et al. 2014, Optimal Thresholding of Classifiers to Maximize F1 Measure, arXiv:1402.1892
    """
    if not gold.any():
        return DEFAULT_THRESHOLD
    # rounded, as processors add in different orders
    rounded = probabilities.round(6)
    ascending = np.unique(rounded[rounded > 0])
    if not len(ascending):
        return DEFAULT_THRESHOLD
    num_predicted = len(rounded) - np.searchsorted(np.sort(rounded), ascending)
    hits = gold.sum() - np.searchsorted(np.sort(rounded[gold]), ascending)
    f1 = (2 * hits / (num_predicted + gold.sum())).round(9)
    candidates = (ascending + np.insert(ascending[:-1], 0, 0.0)) / 2
    best = candidates[f1 == f1.max()]
    return float(best[np.abs(best - DEFAULT_THRESHOLD).argmin()])


def choose_thresholds(
    logits: NDArray[np.float32], gold: NDArray[np.bool_], names: Sequence[str], *, is_shared: bool
) -> dict[str, float]:
    """Return the thresholds with the highest F1 on samples: of each label, or one with the highest micro F1.

    Args:
        logits: float32 [n, C].
        gold: bool [n, C].
        names: of the C labels.
        is_shared: one threshold for all labels.
    """
    from scipy.special import expit

    probabilities = expit(logits.astype(np.float64))
    if is_shared:
        return dict.fromkeys(names, best_f1_threshold(probabilities.ravel(), gold.ravel()))
    columns = zip(names, probabilities.T, gold.T, strict=True)
    return {name: best_f1_threshold(values, is_label) for name, values, is_label in columns}
