"""AWQ's search for channel scales, and for the clipping of each group's range.

Lin et al. 2023, AWQ, arXiv:2306.00978, equations 4 and 5, and its published code (llm-awq, auto_scale.py and
auto_clip.py). For linear layers W with one input X, with m_j the mean of |X_j| and alpha from 0 to 0.95 in
steps of 0.05:

    s = max(m ^ alpha, 1e-4)        s = s / sqrt(max s * min s)
    error = |(Q(W s) / s - W) X|^2, summed over the layers

    The alpha with the least error is used; alpha 0 is rounding to nearest. For several layers, the published
    code compares the output of the module around them instead (an attention, a gated feed-forward part); for
    one layer the errors are the same. Everything is computed from second moments over all tokens.

Shapes: N = outputs, K = inputs, G = groups, g = inputs of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from smelt.compress.quantize.methods.select_grid import pool_errors, select_per_group
from smelt.compress.quantize.weight_quantizer import round_to_nearest
from smelt.runtime.schemes.common.groupwise import split_into_groups
from smelt.runtime.schemes.scheme import QuantParams, Scheme, SchemeOptions, UnpackedWeights

ALPHA_STEPS = 20
_MIN_SCALE = 1e-4
_MIN_SHRINK = 0.5  # ranges are clipped to this fraction at most


class LayerToScale(NamedTuple):
    """A matrix, float32 [N, K], with its scheme and options."""

    weight: Tensor
    scheme: Scheme
    options: SchemeOptions


class ScaleSearchResult(NamedTuple):
    """The scales of an input, float32 [K], their alpha, and the error relative to unscaled rounding."""

    scales: Tensor
    alpha: float
    error_ratio: float


def scales_from_magnitudes(magnitudes: Tensor, alpha: float) -> Tensor:
    """Return s, float32 [K], from the mean magnitudes of the channels."""
    scales = magnitudes.pow(alpha).clamp(min=_MIN_SCALE)
    return scales / (scales.max() * scales.min()).sqrt()


def search_scales(products: Sequence[LayerToScale], magnitudes: Tensor, moment: Tensor) -> ScaleSearchResult:
    """Return the scales with the least output error of the linear layers with one input.

    Args:
        products: the layers that read it.
        magnitudes: m, float32 [K]; equal in channels that have to share a scale.
        moment: X X^T, float32 [K, K].
    """
    best: tuple[float, int, Tensor] | None = None
    plain = 0.0
    for step in range(ALPHA_STEPS):
        scales = scales_from_magnitudes(magnitudes, step / ALPHA_STEPS)
        if not bool(scales.isfinite().all()):
            continue
        error = sum(_output_error(product, scales, moment) for product in products)
        plain = error if step == 0 else plain
        if best is None or error < best[0]:
            best = (error, step, scales)
    assert best is not None  # with alpha 0 all scales are 1
    return ScaleSearchResult(best[2], best[1] / ALPHA_STEPS, best[0] / plain if plain > 0 else 1.0)


def _output_error(product: LayerToScale, scales: Tensor, moment: Tensor) -> float:
    weight, scheme, options = product
    found = round_to_nearest(weight * scales, scheme, options)
    off = (
        scheme.dequantize(found.q_weight, found.qparams, options).flatten(1)[:, : weight.shape[1]] / scales
        - weight
    )
    return float(((off @ moment) * off).sum())


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
    own = torch.stack([blocks[at, :, at] for at in range(groups.shape[1])])  # [G, g, g]
    ends = groups.abs().amax(dim=-1, keepdim=True)
    best = dict(scheme.compute_qparams(groups, width, options))
    least = _group_errors(groups, best, own, scheme, options)
    for step in range(1, int(_MIN_SHRINK * ALPHA_STEPS)):
        end = ends * (1 - step / ALPHA_STEPS)
        grid = scheme.compute_qparams(groups.clamp(-end, end), width, options)
        errors = _group_errors(groups, grid, own, scheme, options)
        better = errors < least
        least = torch.where(better, errors, least)
        best = {name: select_per_group(better, grid[name], kept) for name, kept in best.items()}
    return UnpackedWeights(scheme.quantize(groups, best, options), best)


def _group_errors(
    groups: Tensor, grid: QuantParams, own: Tensor, scheme: Scheme, options: SchemeOptions
) -> Tensor:
    """Return |(Q(W) - W) X|^2 over all weights that share a scale, [N, G]."""
    off = scheme.dequantize(scheme.quantize(groups, grid, options), grid, options) - groups
    return pool_errors((torch.einsum("ngi,gij->ngj", off, own) * off).sum(dim=-1), scheme, options)
