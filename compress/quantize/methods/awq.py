"""AWQ: scale up input channels with large activations before quantization.

Lin et al. 2023, AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration,
arXiv:2306.00978, and its published code (llm-awq). Rounding W s and multiplying with X / s has a smaller
error than rounding W if s is large for the important channels. channel_scales.py finds the scales, and
scale_targets.py applies them. The float model is calibrated once and changed afterwards; its outputs do not
change until weights are quantized.

With `clip`, ranges are clipped where that reduces the output error of the scaled layers; except for queries
and keys, whose single errors say little about attention scores (llm-awq's auto_clip.py skips them too).

Shapes: K = inputs of a linear layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from smelt.compress.calibration.samples import CalibrationSamples
from smelt.compress.calibration.statistics import InputStatistics, collect_statistics, few_tokens_text
from smelt.compress.quantize.methods.channel_scales import (
    LayerToScale,
    ScaleSearchResult,
    clip_and_quantize,
    search_scales,
)
from smelt.compress.quantize.methods.scale_targets import ScaleTarget, find_scale_targets
from smelt.compress.quantize.plan_layers import PlannedLayer
from smelt.compress.quantize.smoothquant import DtypeOf
from smelt.core.errors import InputError
from smelt.core.stage import Context
from smelt.families.model_blocks import model_attentions
from smelt.runtime.models.structure import Edit
from smelt.runtime.schemes.registry import find_scheme
from smelt.runtime.schemes.scheme import UnpackedWeights


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
                cut = [one for one in place.layers if one.name.removesuffix(".linear") not in uncut]
                codes |= _clip_layers(cut, _second_moment(seen[name]), scales.get(name))
    _report_scales(places, names, found, ctx)
    ctx.details["awq_without_scales"] = left  # output layers and shared matrices
    fed = [
        (seen[name].tokens, int(place.layers[0].module.in_features))
        for name, place in zip(names, places, strict=True)
    ]
    _warn_of_few_tokens(fed, unreached, samples, ctx)
    renamed = {layer.module: layer for place in places for layer in place.layers}
    return AwqResult([renamed.get(one.module, one) for one in layers], edits, codes)


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
    ctx.details["awq_error"] = {name: float(f"{one.error_ratio:.3g}") for name, one in found.items()}
    ctx.details["awq_alpha"] = {name: one.alpha for name, one in found.items()}
    went: dict[str, int] = {"norm": 0, "product": 0, "factor": 0}
    for name, place in zip(names, places, strict=True):
        if name in found and found[name].alpha > 0:
            went[place.kind] += 1
    ctx.details["awq_scales_in"] = went


def _warn_of_few_tokens(
    fed: list[tuple[int, int]], unreached: list[str], samples: CalibrationSamples, ctx: Context
) -> None:
    if unreached:
        ctx.warn(
            "uncalibrated-layers",
            f"No calibration sample reaches {', '.join(unreached)}; the weights of these layers are"
            " rounded to nearest. Add calibration samples that use them.",
        )
    if few := few_tokens_text(fed, samples):
        ctx.warn(
            "few-calibration-tokens",
            f"{few}; results may overfit. Increase calibration_samples, or add data: {{calibration: FILE}}.",
        )
