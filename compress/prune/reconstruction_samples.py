"""Calibration samples for the least-squares reconstruction after pruning."""

from __future__ import annotations

from typing import Any

from smelt.compress.calibration.samples import CalibrationSamples, load_calibration_samples
from smelt.compress.prune.settings import PruneSettings
from smelt.core.artifact import Artifact
from smelt.core.stage import Context


def load_reconstruction_samples(
    model: Any, src: Artifact, settings: PruneSettings, ctx: Context
) -> CalibrationSamples | None:
    """Return the calibration samples for the reconstruction; None without reconstruction or samples."""
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
    return load_calibration_samples(model, src, settings.calibration_samples, ctx, "prune", padded=True)
