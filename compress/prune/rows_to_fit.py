"""The rows that what stays of a pruned model is refitted on."""

from __future__ import annotations

from typing import Any

from smelt.compress.calibration.rows import CalibrationRows, calibration_rows
from smelt.compress.prune.settings import PruneSettings
from smelt.core.artifact import Artifact
from smelt.core.stage import Context


def rows_to_fit(model: Any, src: Artifact, settings: PruneSettings, ctx: Context) -> CalibrationRows | None:
    """Return the rows that what stays is refitted on; None where it is to be cut alone."""
    if not settings.reconstruct:
        return None
    split = ctx.data.get("calibration") or ctx.data.get("train")
    if split is None or not len(split):
        ctx.warn(
            "no-calibration-data",
            "Without samples the remaining weights are not refitted (reconstruct), and quality drops more."
            " Add data: {calibration: FILE} or data: {train: FILE}, or set reconstruct: false.",
        )
        return None
    return calibration_rows(model, src, settings.calibration_samples, ctx, "prune", padded=True)
