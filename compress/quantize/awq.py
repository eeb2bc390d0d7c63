"""AWQ: scale up input channels with large activations before quantization, and clip the ranges of groups.

Lin et al. 2023, AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration,
arXiv:2306.00978, and its published code (llm-awq). Rounding W s and multiplying with X / s has a smaller
error than rounding W if s is large for the important channels. The scales are searched as in its code. The
float model is calibrated once and changed afterwards; its outputs do not change until weights are quantized.

With `clip`, ranges are clipped where that reduces the output error of the scaled layers; except for queries
and keys, whose own errors hardly predict those of attention scores (as in llm-awq's auto_clip.py).

`mse_grid` and `percentile_grid` clip the ranges of groups without input statistics.

The search follows equations 4 and 5 of the paper and auto_scale.py of its code. For linear layers W with one
input X, with m_j the mean of |X_j| and alpha from 0 to 0.95 in steps of 0.05:

    s = max(m ^ alpha, 1e-4)        s = s / sqrt(max s * min s)
    error = |(Q(W s) / s - W) X|^2, summed over the layers

With duo scaling, as in AutoAWQ and llm-compressor, weights count too: with w_j the mean over the rows of
|W_j| relative to the largest weight with the same scale,

    s = max(m ^ alpha / (w ^ (1 - alpha) + 1e-4), 1e-4)

The alpha with the least error is used, or no scales if none has less error than rounding W to nearest. For
several layers, the published code compares the output of the module around them instead (an attention, a
gated feed-forward part); for one layer the errors are the same. Everything is computed from second moments
over all tokens.

Where the scales go is in `scale_targets.py`.

Shapes: N = outputs, K = inputs of a linear layer, G = groups, g = inputs of a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from smelt.calibration.samples import CalibrationSamples
from smelt.calibration.sequential import ModelPart
from smelt.calibration.statistics import InputStatistics, warn_of_few_tokens
from smelt.compress.quantize.hqq import pool_errors, select_per_group
from smelt.compress.quantize.plan_layers import PlannedLayer, dequantize_codes, round_to_nearest
from smelt.compress.quantize.scale_targets import (
    DtypeOf,
    ScaleKind,
    ScaleRunner,
    ScaleTarget,
    find_scale_targets,
)
from smelt.core.near_ties import first_within_tolerance, is_better
from smelt.models.families.registry import model_attentions
from smelt.quantization.groupwise import split_into_groups
from smelt.quantization.scheme import QuantParams, Scheme, SchemeOptions, UnpackedWeights
from smelt.quantization.schemes.registry import find_scheme
from smelt.stage import Context

ALPHA_STEPS = 20
_MIN_SCALE = _WEIGHT_OFFSET = 1e-4
_GROUP_OFFSET = 1e-6
_MIN_SHRINK = 0.5  # ranges are clipped to this fraction at most


class LayerToScale(NamedTuple):
    """A matrix, float32 [N, K], with its scheme and options."""

    weight: Tensor
    scheme: Scheme
    options: SchemeOptions


class ScaleSearchResult(NamedTuple):
    """The scales of an input, float32 [K], their alpha, and the error relative to unscaled rounding.

    alpha is None if all scales are 1.
    """

    scales: Tensor
    alpha: float | None
    error_ratio: float


def scales_from_magnitudes(
    magnitudes: Tensor, alpha: float, weight_magnitudes: Tensor | None = None
) -> Tensor:
    """Return s, float32 [K], from m and, for duo scaling, w; both float32 [K]."""
    scales = magnitudes.pow(alpha)
    if weight_magnitudes is not None:
        scales = scales / (weight_magnitudes.pow(1 - alpha) + _WEIGHT_OFFSET)
    scales = scales.clamp(min=_MIN_SCALE)
    return scales / (scales.max() * scales.min()).sqrt()


def relative_weight_magnitudes(products: Sequence[LayerToScale]) -> Tensor:
    """Return w, float32 [K]: the mean over all rows of |W_j| relative to the largest weight of its scale."""
    sums = torch.zeros(products[0].weight.shape[1])
    for weight, scheme, options in products:
        groups = split_into_groups(weight.abs(), scheme.group_size(len(sums), options))
        shared = (0, 1, 2) if scheme.is_per_tensor(options) else -1
        groups = groups / (groups.amax(dim=shared, keepdim=True) + _GROUP_OFFSET)
        sums += groups.flatten(1)[:, : len(sums)].sum(dim=0)
    return sums / sum(len(product.weight) for product in products)


def search_scales(
    products: Sequence[LayerToScale],
    magnitudes: Tensor,
    moment: Tensor,
    weight_magnitudes: Tensor | None = None,
) -> ScaleSearchResult:
    """Return the scales with the least output error of the linear layers with one input.

    Args:
        products: the layers that read it.
        magnitudes: m, float32 [K]; equal in channels that have to share a scale.
        moment: X X^T, float32 [K, K].
        weight_magnitudes: w, float32 [K], for duo scaling; equal in the same channels.
    """
    candidates: list[tuple[Tensor, float | None]] = [(torch.ones_like(magnitudes), None)]
    for step in range(weight_magnitudes is None, ALPHA_STEPS):  # m ^ 0 is 1
        alpha = step / ALPHA_STEPS
        scales = scales_from_magnitudes(magnitudes, alpha, weight_magnitudes)
        if bool(scales.isfinite().all()):
            candidates.append((scales, alpha))
    errors = [sum(_output_error(product, scales, moment) for product in products) for scales, _ in candidates]
    best, plain = first_within_tolerance(errors), errors[0]
    return ScaleSearchResult(*candidates[best], errors[best] / plain if plain > 0 else 1.0)


def _output_error(product: LayerToScale, scales: Tensor, moment: Tensor) -> float:
    weight, scheme, options = product
    quantized = round_to_nearest(weight * scales, scheme, options)
    difference = dequantize_codes(quantized, scheme, options, weight) / scales - weight
    return float(((difference @ moment) * difference).sum())


def clip_and_quantize(product: LayerToScale, moment: Tensor) -> UnpackedWeights:
    """Return the quantized weights with the least output error when up to half of each range is clipped.

    Each group's part of the output is compared alone, as in the published code.

    Args:
        product: the layer, with scales applied.
        moment: X X^T of its scaled inputs, float32 [K, K].
    """
    weight, scheme, options = product
    width = weight.shape[1]
    size = scheme.group_size(width, options)
    groups = split_into_groups(weight, size)
    pad = groups.shape[1] * size - width
    blocks = F.pad(moment, (0, pad, 0, pad)).reshape(groups.shape[1], size, groups.shape[1], size)
    group_moments = torch.stack([blocks[index, :, index] for index in range(groups.shape[1])])  # [G, g, g]
    ends = groups.abs().amax(dim=-1, keepdim=True)
    best = dict(scheme.compute_qparams(groups, width, options))
    least = _group_errors(groups, best, group_moments, scheme, options)
    for step in range(1, int(_MIN_SHRINK * ALPHA_STEPS)):
        end = ends * (1 - step / ALPHA_STEPS)
        grid = scheme.compute_qparams(groups.clamp(-end, end), width, options)
        errors = _group_errors(groups, grid, group_moments, scheme, options)
        better = is_better(errors, least)
        least = torch.where(better, errors, least)
        best = {name: select_per_group(better, grid[name], is_kept) for name, is_kept in best.items()}
    return UnpackedWeights(scheme.quantize(groups, best, options), best)


def _group_errors(
    groups: Tensor, grid: QuantParams, group_moments: Tensor, scheme: Scheme, options: SchemeOptions
) -> Tensor:
    """Return |(Q(W) - W) X|^2 over all weights that share a scale, [N, G]."""
    off = scheme.dequantize(scheme.quantize(groups, grid, options), grid, options) - groups
    return pool_errors((torch.einsum("ngi,gij->ngj", off, group_moments) * off).sum(dim=-1), scheme, options)


class AwqRunner(ScaleRunner):
    """AWQ of all scale targets at once or of one block after another.

    Args:
        model: float32, in eval mode, on the CPU; changed in place with the same outputs.
        layers: its planned layers.
        samples: calibration samples.
        clip: whether to clip ranges too; else no weights are quantized.
        duo_scaling: whether scales depend on weights, too.
        dtype_of: returns the stored dtype of a tensor from its names.
        ctx: gets the details and warnings.

    Attributes:
        codes: quantized weights by `PlannedLayer.weight_id`.
    """

    def __init__(
        self,
        model: Any,
        layers: Sequence[PlannedLayer],
        samples: CalibrationSamples,
        clip: bool,
        duo_scaling: bool,
        dtype_of: DtypeOf,
        ctx: Context,
    ) -> None:
        targets, self._unscaled = find_scale_targets(model, layers)
        super().__init__(model, targets, layers, samples, dtype_of, ctx)
        self.codes: dict[int, UnpackedWeights] = {}
        self._duo_scaling = duo_scaling
        self._clip, self._unclipped = clip, _attention_score_layers(model) if clip else set()
        self._searches: dict[str, ScaleSearchResult] = {}
        self._token_counts: dict[str, tuple[int, int]] = {}

    def calibrate(self, targets: Sequence[ScaleTarget], part: ModelPart, *, apply: bool = True) -> None:
        """Find the scales of `targets`, and clip ranges if they are applied (see `ScaleRunner`)."""
        with part.collect(self._layers_to_observe(targets)) as seen:
            part.run()
            self._search(targets, seen)  # all of them first: scales change the rows of producers
            scales = self.apply(targets) if apply else {}
            for target in targets if apply and self._clip else ():
                name = self._names[id(target)]
                if name in self._searches:
                    clipped = [
                        layer
                        for layer in target.layers
                        if layer.name.removesuffix(".linear") not in self._unclipped
                    ]
                    self.codes |= _clip_layers(clipped, _second_moment(seen[name]), scales.get(name))

    def _search(self, targets: Sequence[ScaleTarget], seen: Mapping[str, InputStatistics]) -> None:
        self._require_finite({name: statistics.squares for name, statistics in seen.items()})
        for target in targets:
            name = self._names[id(target)]
            if seen[name].tokens:
                self._searches[name] = search = _search_target(target, seen[name], self._duo_scaling)
                if search.alpha is not None:
                    self.scales[name] = search.scales
            width = int(target.layers[0].module.in_features)
            self._token_counts[name] = (seen[name].tokens, width)

    def report(self) -> None:
        """Write the results to the details and warnings of the context, in the order of the targets."""
        names = [self._names[id(target)] for target in self.targets]
        searches = {name: self._searches[name] for name in names if name in self._searches}
        _report_scales(self.targets, names, searches, self._ctx)
        self._ctx.details["awq_without_scales"] = self._unscaled  # output layers and shared matrices
        unreached = [
            layer.name
            for target, name in zip(self.targets, names, strict=True)
            if name not in searches
            for layer in target.layers
        ]
        if unreached:
            self._ctx.warn(
                "uncalibrated-layers",
                f"No calibration sample reaches {', '.join(unreached)}; the weights of these layers are"
                " rounded to nearest. Add calibration samples that use them.",
            )
        warn_of_few_tokens((self._token_counts[name] for name in names), self._samples, self._ctx)


def _search_target(target: ScaleTarget, statistics: InputStatistics, duo_scaling: bool) -> ScaleSearchResult:
    products = [_layer_to_scale(layer) for layer in target.layers]
    magnitudes = target.pool((statistics.magnitudes / statistics.tokens).float())
    weight_magnitudes = target.pool(relative_weight_magnitudes(products)) if duo_scaling else None
    result = search_scales(products, magnitudes, _second_moment(statistics), weight_magnitudes)
    if statistics.judged is statistics:
        return result
    moment = _second_moment(statistics.judged)
    error, plain_error = (
        sum(_output_error(product, scales, moment) for product in products)
        for scales in (result.scales, torch.ones_like(result.scales))
    )
    return result._replace(error_ratio=error / plain_error if plain_error > 0 else 1.0)


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
    projections = [name for attention in model_attentions(model) for name in (attention.query, attention.key)]
    return {f"{name}{half}" for name in projections for half in ("", ".down", ".up")}


def _report_scales(
    places: Sequence[ScaleTarget], names: Sequence[str], searches: dict[str, ScaleSearchResult], ctx: Context
) -> None:
    """Write alpha, relative error and scale target of each input to the details of `ctx`."""
    ctx.details["awq_error"] = {name: float(f"{search.error_ratio:.3g}") for name, search in searches.items()}
    alphas = {name: search.alpha for name, search in searches.items() if search.alpha is not None}
    ctx.details["awq_alpha"] = alphas
    counts: dict[str, int] = dict.fromkeys(get_args(ScaleKind), 0)
    for name, target in zip(names, places, strict=True):
        if name in alphas:
            counts[target.kind] += 1
    ctx.details["awq_scales_in"] = counts


_SHRINK_STEPS, _SHRINK_PARTS, _ERROR_POWER = 80, 100, 2.4


def mse_grid(groups: Tensor, width: int, scheme: Scheme, options: SchemeOptions) -> QuantParams:
    """Return the grid of `groups`, float32 [N, G, g], with each range clipped for the least error.

    This follows GPTQ's published code (quant.py, Quantizer.find_params with mse): the range is shrunk in
    steps of a hundredth, down to a fifth, and each group gets the range with the least sum of |error|^2.4.
    The grid of a shrunk group is the shrunk grid, so this works for every scheme.
    """
    best_grid = dict(scheme.compute_qparams(groups, width, options))
    least_errors = _grid_errors(groups, best_grid, scheme, options)
    for step in range(1, _SHRINK_STEPS):
        grid = scheme.compute_qparams(groups * (1 - step / _SHRINK_PARTS), width, options)
        errors = _grid_errors(groups, grid, scheme, options)
        better = is_better(errors, least_errors)
        least_errors = torch.where(better, errors, least_errors)
        best_grid = {
            name: select_per_group(better, grid[name], current) for name, current in best_grid.items()
        }
    return best_grid


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
    original_groups, is_per_tensor = groups, scheme.is_per_tensor(options)
    groups = groups.reshape(1, 1, -1) if is_per_tensor else groups
    ordered = groups.abs().sort(dim=-1, descending=True).values  # padding comes last
    counts = torch.full(groups.shape[1:2], groups.shape[2])
    counts[-1] -= (size - width) * (len(original_groups) if is_per_tensor else 1)
    position = ((counts - 1) * (1 - percentile / 100)).to(ordered)  # counted from the largest
    low = position.floor().long()
    pair = [
        ordered.gather(-1, indices.expand(len(groups), -1)[..., None])
        for indices in (low, position.ceil().long())
    ]
    ends = pair[0] + (pair[1] - pair[0]) * (position - low)[:, None]
    return scheme.compute_qparams(original_groups.clamp(-ends, ends), width, options)


def _grid_errors(groups: Tensor, grid: QuantParams, scheme: Scheme, options: SchemeOptions) -> Tensor:
    """Return the sum of |error|^2.4 over all weights that share a scale, [N, G]."""
    difference = scheme.dequantize(scheme.quantize(groups, grid, options), grid, options) - groups
    return pool_errors(difference.abs_().pow_(_ERROR_POWER).sum(dim=-1), scheme, options)
