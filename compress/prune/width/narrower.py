"""Pruning of the hidden width: the least important channels of the hidden states go, from every tensor."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from smelt.compress.calibration.rows import calibration_rows
from smelt.compress.float_model import stored_parameters
from smelt.compress.prune.fit import channels_kept, width_is_fixed
from smelt.compress.prune.importance.of_units import on_labelled_rows
from smelt.compress.prune.rows_to_fit import rows_to_fit
from smelt.compress.prune.settings import PruneSettings
from smelt.compress.prune.width.refit import refit_readers
from smelt.compress.prune.width.scores import activation_scores, magnitude_of_channels, slope_scores
from smelt.compress.quantize.requantize import load_changeable
from smelt.compress.train.objective import label_objective
from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.stage import Context
from smelt.runtime.backends.device import torch_device
from smelt.runtime.models.edits.narrow import narrow, say_width_in_config, width_of


def prune_width(src: Artifact, settings: PruneSettings, ctx: Context) -> None:
    """Make the hidden states of `src` narrower, and write the model to `ctx.out`.

    Raises:
        InputError: a model whose width cannot change, or rows that are missing.
    """
    from smelt.runtime.models.checkpoint import save_model

    model, edits, codes = load_changeable(src, ctx, "prune", everywhere=True)
    if reason := width_is_fixed(model.config.to_dict(), ctx.task):
        raise InputError(f"prune: {reason.message}", code=reason.code, setting=reason.setting)
    before, width = stored_parameters(model), width_of(model)
    kept = channels_kept(width, settings)
    ctx.details["parameters_before"], ctx.details["width_before"] = before, width
    if kept < width:
        keep = _scores(model, width, src, settings, ctx).topk(kept).indices.sort().values
        rows = rows_to_fit(model, src, settings, ctx)
        whole = copy.deepcopy(model) if rows is not None else None
        edit = narrow(model, keep.tolist())
        if rows is not None:
            ctx.details["reconstruction_error"] = refit_readers(whole, model, keep, rows, ctx)
        if codes is not None:
            codes.narrowed(keep.tolist())
        edits = say_width_in_config(model, edits, edit)
    else:
        ctx.warn(
            "nothing-to-remove",
            f"keep_ratio {settings.ratio('width'):g} of {width} channels, rounded to a multiple of"
            f" {settings.multiple_of}, keeps"
            " all of them; nothing is removed.",
        )
    if 2 * width * settings.ratio("width") <= kept < width:
        ctx.warn(
            "minimum-kept",
            f"keep_ratio {settings.ratio('width'):g} of {width} channels is fewer than {kept}, the minimum;"
            f" {kept} are kept.",
        )
    ctx.details["width_after"] = kept
    ctx.details["parameters_after"] = stored_parameters(model)
    if codes is not None:
        edits = codes.put_back(model, edits, ctx)
    ctx.warnings.extend(save_model(model, edits, ctx.out, src.path, settings.dtype))
    if codes is not None:
        codes.write_floats(model, ctx)


def _scores(model: Any, width: int, src: Artifact, settings: PruneSettings, ctx: Context) -> Tensor:
    """Return what each channel is worth, float64 [D]."""
    if settings.importance == "magnitude":
        return magnitude_of_channels(model)
    if settings.importance == "random":
        return torch.rand(width, generator=torch.Generator().manual_seed(ctx.seed), dtype=torch.float64)
    if settings.importance == "activation":
        rows = calibration_rows(model, src, settings.calibration_samples, ctx, "prune")
        device = torch_device(ctx.device)
        try:
            batches = ({n: v.to(device) for n, v in batch.items()} for batch in rows.batches)
            return activation_scores(model.to(device), width, batches)
        finally:
            model.to("cpu")
    squared = settings.importance == "fisher"
    return on_labelled_rows(
        model,
        src,
        settings,
        ctx,
        lambda batches: slope_scores(model, width, batches, label_objective(), squared),
    )
