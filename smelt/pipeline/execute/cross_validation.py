"""k-fold cross-validation: how the scores of a recipe vary with the samples that it learns from.

The training samples are divided into k parts. A fold is a run of the whole recipe without one part, and is
scored on that part, so that every training sample is scored once, by models that have not seen it. Equal
texts are in the same part; with one label per sample the parts have the same shares of the classes
(scikit-learn's StratifiedGroupKFold).
"""

from __future__ import annotations

import statistics as numbers
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from smelt.core.errors import InputError
from smelt.core.files import json_hash
from smelt.data.splits import Split


def divide_samples(split: Split, folds: int, seed: int) -> list[tuple[Split, Split]]:
    """Return the samples to learn from and the held-out ones of each fold.

    Args:
        split: the training samples.
        folds: k.
        seed: of the division.

    Raises:
        InputError: there are fewer different texts than folds.
    """
    import numpy as np
    from sklearn.model_selection import GroupKFold, StratifiedGroupKFold

    groups = np.unique([json_hash([e.text, e.text_pair]) for e in split.examples], return_inverse=True)[1]
    if groups.max() + 1 < folds:
        raise InputError(
            f"score.folds: {split.origin} has {groups.max() + 1} different texts, fewer than {folds} folds.",
            code="too-few-samples",
            setting="score.folds",
        )
    labels = [e.label for e in split.examples]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a class has fewer samples than there are folds
        if all(isinstance(label, str | int) for label in labels):
            classes = np.unique([str(label) for label in labels], return_inverse=True)[1]
            stratified = StratifiedGroupKFold(folds, shuffle=True, random_state=seed)
            parts = list(stratified.split(classes, classes, groups))
        else:
            grouped = GroupKFold(folds, shuffle=True, random_state=seed)
            parts = list(grouped.split(groups, groups=groups))
    return [(split.select(rest.tolist()), split.select(part.tolist())) for rest, part in parts]


def summarize_folds(
    folds: Sequence[Mapping[str, Mapping[str, Any]]], baseline: str
) -> dict[str, dict[str, Any]]:
    """Return the scores of all folds by step and metric, for report.json.

    Each has `values`, one for each fold, their `mean` and `std` (of the sample, with n - 1), and
    `against_baseline`: the paired difference on all held-out samples together, as `compare_steps` returns it;
    None for the baseline. A step that has not been scored in every fold is left out.

    Args:
        folds: `Statistics` as plain values, by step and metric, of each fold.
        baseline: the step that others are compared with.
    """
    from smelt.evaluate.significance import compare_steps, metric_value

    found: dict[str, dict[str, Any]] = {}
    for step in folds[0]:
        if not all(step in fold for fold in folds):
            continue
        found[step] = {}
        for metric in folds[0][step]:
            parts = [_statistics(fold[step], metric) for fold in folds]
            values = [metric_value(part) for part in parts]
            compared = None
            if step != baseline and all(baseline in fold for fold in folds):
                others = [_statistics(fold[baseline], metric) for fold in folds]
                compared = compare_steps(_join(parts), _join(others))
            found[step][metric] = {
                "values": values,
                "mean": numbers.fmean(values),
                "std": numbers.stdev(values),
                "against_baseline": compared,
            }
    return found


def _statistics(scores: Mapping[str, Any], metric: str) -> Any:
    from smelt.evaluate.significance import Statistics

    return Statistics.model_validate(scores[metric])


def _join(parts: Sequence[Any]) -> Any:
    """Return the statistics of all folds together."""
    rows = [row for part in parts for row in part.rows]
    return parts[0].model_copy(
        update={"rows": rows, "examples": json_hash([part.examples for part in parts])}
    )
