"""Pruning of the hidden width: removal of the least important channels from every tensor."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from smelt.compress.calibration.samples import load_calibration_samples
from smelt.compress.float_model import count_stored_parameters
from smelt.compress.prune.check_config import count_kept_channels, fixed_width_error
from smelt.compress.prune.importance.score_units import score_on_labelled_samples
from smelt.compress.prune.reconstruction_samples import load_reconstruction_samples
from smelt.compress.prune.settings import PruneSettings
from smelt.compress.prune.width.channel_scores import activation_scores, channel_magnitudes, gradient_scores
from smelt.compress.prune.width.refit import refit_width
from smelt.compress.quantize.requantize import load_dequantized
from smelt.compress.train.objective import label_objective
from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.stage import Context
from smelt.runtime.backends.device import torch_device
from smelt.runtime.models.edits.hidden_width import hidden_width, prune_hidden_width, write_width_to_config


def prune_width(src: Artifact, settings: PruneSettings, ctx: Context) -> None:
    """Prune the hidden width of `src`, and write the model to `ctx.out`.

    Raises:
        InputError: the model's width cannot be pruned, or calibration samples are missing.
    """
    from smelt.runtime.models.checkpoint import save_model

    model, edits, codes = load_dequantized(src, ctx, "prune", everywhere=True)
    if reason := fixed_width_error(model.config.to_dict(), ctx.task):
        raise InputError(f"prune: {reason.message}", code=reason.code, setting=reason.setting)
    before, width = count_stored_parameters(model), hidden_width(model)
    kept = count_kept_channels(width, settings)
    ctx.details["parameters_before"], ctx.details["width_before"] = before, width
    if kept < width:
        keep = _channel_scores(model, width, src, settings, ctx).topk(kept).indices.sort().values
        rows = load_reconstruction_samples(model, src, settings, ctx)
        whole = copy.deepcopy(model) if rows is not None else None
        edit = prune_hidden_width(model, keep.tolist())
        if rows is not None:
            ctx.details["reconstruction_error"] = refit_width(whole, model, keep, rows, ctx)
        if codes is not None:
            codes.record_kept_channels(keep.tolist())
        edits = write_width_to_config(model, edits, edit)
    else:
        ctx.warn(
            "nothing-to-remove",
            f"keep_ratio {settings.keep_ratio_of('width'):g} of {width} channels, rounded to a multiple of"
            f" {settings.multiple_of}, keeps all of them; nothing is removed. Lower keep_ratio or"
            " multiple_of.",
        )
    if 2 * width * settings.keep_ratio_of("width") <= kept < width:
        ctx.warn(
            "minimum-kept",
            f"keep_ratio {settings.keep_ratio_of('width'):g} of {width} channels is less than {kept},"
            f" the minimum; {kept} channels are kept.",
        )
    ctx.details["width_after"] = kept
    ctx.details["parameters_after"] = count_stored_parameters(model)
    if codes is not None:
        edits = codes.requantize(model, edits, ctx)
    ctx.warnings.extend(save_model(model, edits, ctx.out, src.path, settings.dtype))
    if codes is not None:
        codes.write_master_weights(model, ctx)


def _channel_scores(model: Any, width: int, src: Artifact, settings: PruneSettings, ctx: Context) -> Tensor:
    """Return the importance of each channel, float64 [D]."""
    if settings.importance == "magnitude":
        return channel_magnitudes(model)
    if settings.importance == "random":
        return torch.rand(width, generator=torch.Generator().manual_seed(ctx.seed), dtype=torch.float64)
    if settings.importance == "activation":
        rows = load_calibration_samples(model, src, settings.calibration_samples, ctx, "prune")
        device = torch_device(ctx.device)
        try:
            batches = ({n: v.to(device) for n, v in batch.items()} for batch in rows.batches)
            return activation_scores(model.to(device), width, batches)
        finally:
            model.to("cpu")
    squared = settings.importance == "fisher"
    return score_on_labelled_samples(
        model,
        src,
        settings,
        ctx,
        lambda batches: gradient_scores(model, width, batches, label_objective(), squared),
    )
