"""k-fold cross-validation: how the scores of a recipe vary with the samples that it learns from.

The training samples are divided into k parts (`smelt.data.split_division.divide_folds`). A fold is a run of
the whole recipe without one part, and is scored on that part, so that every training sample is scored once,
by models that have not seen it.
"""

from __future__ import annotations

import statistics as numbers
from collections.abc import Mapping, Sequence
from typing import Any

from smelt.core.files import json_hash


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
