"""AWQ: scale up input channels with large activations before quantization, and clip the ranges of groups.

Lin et al. 2023, AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration,
arXiv:2306.00978, and its published code (llm-awq). Rounding W s and multiplying with X / s has a smaller
error than rounding W if s is large for the important channels. `channel_scales.py` finds the scales and
applies them. The float model is calibrated once and changed afterwards; its outputs do not change until
weights are quantized.

With `clip`, ranges are clipped where that reduces the output error of the scaled layers; except for queries
and keys, whose own errors hardly predict those of attention scores (as in llm-awq's auto_clip.py).

`mse_grid` and `percentile_grid` clip the ranges of groups without input statistics.

Shapes: N = outputs, K = inputs of a linear layer, G = groups, g = inputs of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from smelt.calibration.samples import CalibrationSamples
from smelt.calibration.statistics import InputStatistics, collect_statistics, few_tokens_text
from smelt.compress.quantize.channel_scales import (
    LayerToScale,
    ScaleSearchResult,
    ScaleTarget,
    clip_and_quantize,
    find_scale_targets,
    search_scales,
)
from smelt.compress.quantize.hqq import pool_errors, select_per_group
from smelt.compress.quantize.plan_layers import PlannedLayer
from smelt.compress.quantize.smoothquant import DtypeOf
from smelt.core.errors import InputError
from smelt.core.stage import Context
from smelt.models.families.model_blocks import model_attentions
from smelt.models.structure import Edit
from smelt.quantization.scheme import QuantParams, Scheme, SchemeOptions, UnpackedWeights
from smelt.quantization.schemes.registry import find_scheme


class AwqResult(NamedTuple):
    """Result of AWQ: layers, some renamed; edits; quantized weights by `PlannedLayer.weight_id`."""

    layers: list[PlannedLayer]
    edits: list[Edit]
    codes: dict[int, UnpackedWeights]


def apply_awq(
    model: Any,
    layers: Sequence[PlannedLayer],
    samples: CalibrationSamples,
    clip: bool,
    dtype_of: DtypeOf,
    ctx: Context,
) -> AwqResult:
    """Scale the linear layers among `layers` and the producers of their inputs.

    Args:
        model: float32, in eval mode, on the CPU; changed in place with the same outputs.
        layers: its planned layers.
        samples: calibration samples.
        clip: whether to clip ranges too; else no weights are quantized.
        dtype_of: returns the stored dtype of a tensor from its names.
        ctx: gets the details and warnings.

    Raises:
        InputError: inputs of a linear layer are not finite.
    """
    places, left = find_scale_targets(model, layers)
    names = [place.layers[0].name for place in places]
    firsts = {name: [place.layers[0].module] for name, place in zip(names, places, strict=True)}
    uncut = _attention_score_layers(model) if clip else set()
    edits: list[Edit] = []
    codes: dict[int, UnpackedWeights] = {}
    found: dict[str, ScaleSearchResult] = {}
    unreached: list[str] = []
    with collect_statistics(model, samples, firsts, ctx) as seen:
        _require_finite([layer.name for layer in layers], seen, samples)
        # find all scales before applying any: applying them changes the rows of producers
        for name, place in zip(names, places, strict=True):
            if seen[name].tokens:
                found[name] = _search_target(place, seen[name])
            else:
                unreached += [layer.name for layer in place.layers]
        scales = {
            name: place.apply(model, found[name].scales, dtype_of, edits)
            for name, place in zip(names, places, strict=True)
            if name in found and found[name].alpha > 0
        }
        for name, place in zip(names, places, strict=True):
            if clip and name in found:
                cut = [layer for layer in place.layers if layer.name.removesuffix(".linear") not in uncut]
                codes |= _clip_layers(cut, _second_moment(seen[name]), scales.get(name))
    _report_scales(places, names, found, ctx)
    ctx.details["awq_without_scales"] = left  # output layers and shared matrices
    token_counts = [
        (seen[name].tokens, int(place.layers[0].module.in_features))
        for name, place in zip(names, places, strict=True)
    ]
    _warn_of_few_tokens(token_counts, unreached, samples, ctx)
    renamed = {layer.module: layer for place in places for layer in place.layers}
    return AwqResult([renamed.get(layer.module, layer) for layer in layers], edits, codes)


def _require_finite(
    order: list[str], statistics: dict[str, InputStatistics], samples: CalibrationSamples
) -> None:
    """Raise an error for inputs that are not finite; it names the first such layer in the model's order."""
    for name in sorted(statistics, key=order.index):
        if not bool(statistics[name].squares.isfinite().all()):
            raise InputError(
                f"quantize: {name}: the layer's inputs on samples of {samples.origin} are not finite."
                " The training before this step has probably diverged; lower its learning_rate.",
                code="non-finite-activations",
            )


def _search_target(place: ScaleTarget, statistics: InputStatistics) -> ScaleSearchResult:
    magnitudes = place.pool((statistics.magnitudes / statistics.tokens).float())
    return search_scales(
        [_layer_to_scale(layer) for layer in place.layers], magnitudes, _second_moment(statistics)
    )


def _layer_to_scale(layer: PlannedLayer) -> LayerToScale:
    return LayerToScale(layer.module.weight.detach().float(), find_scheme(layer.scheme), layer.options)


def _second_moment(statistics: InputStatistics) -> Tensor:
    assert statistics.second_moment is not None
    return statistics.second_moment.float()


def _clip_layers(
    layers: Sequence[PlannedLayer], moment: Tensor, scales: Tensor | None
) -> dict[int, UnpackedWeights]:
    """Return the quantized weights of linear layers with one input, with clipped ranges."""
    if scales is not None:
        moment = moment / scales / scales[:, None]
    return {layer.weight_id: clip_and_quantize(_layer_to_scale(layer), moment) for layer in layers}


def _attention_score_layers(model: Any) -> set[str]:
    """Return the names of query and key projections, and of both factors of factorized ones."""
    whole = [name for attention in model_attentions(model) for name in (attention.query, attention.key)]
    return {f"{name}{half}" for name in whole for half in ("", ".down", ".up")}


def _report_scales(
    places: Sequence[ScaleTarget], names: Sequence[str], found: dict[str, ScaleSearchResult], ctx: Context
) -> None:
    """Write alpha, relative error and scale target of each input to the details of `ctx`."""
    ctx.details["awq_error"] = {name: float(f"{search.error_ratio:.3g}") for name, search in found.items()}
    ctx.details["awq_alpha"] = {name: search.alpha for name, search in found.items()}
    went: dict[str, int] = {"norm": 0, "product": 0, "factor": 0}
    for name, place in zip(names, places, strict=True):
        if name in found and found[name].alpha > 0:
            went[place.kind] += 1
    ctx.details["awq_scales_in"] = went


def _warn_of_few_tokens(
    token_counts: list[tuple[int, int]], unreached: list[str], samples: CalibrationSamples, ctx: Context
) -> None:
    if unreached:
        ctx.warn(
            "uncalibrated-layers",
            f"No calibration sample reaches {', '.join(unreached)}; the weights of these layers are"
            " rounded to nearest. Add calibration samples that use them.",
        )
    if few := few_tokens_text(token_counts, samples):
        ctx.warn(
            "few-calibration-tokens",
            f"{few}; results may overfit. Increase calibration_samples, or add data: {{calibration: FILE}}.",
        )


_SHRINK_STEPS, _SHRINK_PARTS, _ERROR_POWER = 80, 100, 2.4


def mse_grid(groups: Tensor, width: int, scheme: Scheme, options: SchemeOptions) -> QuantParams:
    """Return the grid of `groups`, float32 [N, G, g], with each range clipped for the least error.

    This follows GPTQ's published code (quant.py, Quantizer.find_params with mse): the range is shrunk in
    steps of a hundredth, down to a fifth, and each group gets the range with the least sum of |error|^2.4.
    The grid of a shrunk group is the shrunk grid, so this works for every scheme.
    """
    best = dict(scheme.compute_qparams(groups, width, options))
    least = _grid_errors(groups, best, scheme, options)
    for step in range(1, _SHRINK_STEPS):
        grid = scheme.compute_qparams(groups * (1 - step / _SHRINK_PARTS), width, options)
        errors = _grid_errors(groups, grid, scheme, options)
        better = errors < least
        least = torch.where(better, errors, least)
        best = {name: select_per_group(better, grid[name], kept) for name, kept in best.items()}
    return best


def percentile_grid(
    percentile: float, groups: Tensor, width: int, scheme: Scheme, options: SchemeOptions
) -> QuantParams:
    """Return the grid of `groups`, float32 [N, G, g], with ranges clipped at a percentile of magnitudes.

    The percentile of each group's magnitudes is interpolated linearly, as in numpy.percentile; larger weights
    are clipped.

    Args:
        percentile: above 0, at most 100.
        groups: groups of weights.
        width: how many of the G * g inputs are weights; padding is ignored.
        scheme: the scheme of the grid.
        options: options of the scheme.
    """
    size = groups.shape[1] * groups.shape[2]
    given, whole = groups, scheme.is_per_tensor(options)
    groups = groups.reshape(1, 1, -1) if whole else groups
    ordered = groups.abs().sort(dim=-1, descending=True).values  # padding comes last
    counts = torch.full(groups.shape[1:2], groups.shape[2])
    counts[-1] -= (size - width) * (len(given) if whole else 1)
    place = ((counts - 1) * (1 - percentile / 100)).to(ordered)  # counted from the largest
    low = place.floor().long()
    pair = [ordered.gather(-1, at.expand(len(groups), -1)[..., None]) for at in (low, place.ceil().long())]
    ends = pair[0] + (pair[1] - pair[0]) * (place - low)[:, None]
    return scheme.compute_qparams(given.clamp(-ends, ends), width, options)


def _grid_errors(groups: Tensor, grid: QuantParams, scheme: Scheme, options: SchemeOptions) -> Tensor:
    """Return the sum of |error|^2.4 over all weights that share a scale, [N, G]."""
    off = scheme.dequantize(scheme.quantize(groups, grid, options), grid, options) - groups
    return pool_errors(off.abs_().pow_(_ERROR_POWER).sum(dim=-1), scheme, options)
