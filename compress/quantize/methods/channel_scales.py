"""AWQ's search: a scale for each input channel, and how much of each group's range is cut off.

Lin et al. 2023, AWQ, arXiv:2306.00978, equations 4 and 5, and its published code (llm-awq, auto_scale.py and
auto_clip.py). For products W that read one input X, with m_j the mean of |X_j| and alpha from 0 to 0.95 in
steps of 0.05:

    s = max(m ^ alpha, 1e-4)        s = s / sqrt(max s * min s)
    error = |(Q(W s) / s - W) X|^2, summed over the products

and the alpha of the least error is taken; with alpha 0 codes are those of rounding to nearest. The published
code looks at the output of the module around the products instead (an attention, a gated feed-forward part)
where they are several; where they are one, this is its error. Everything is computed from second moments,
over all tokens.

Shapes: N = outputs, K = inputs, G = groups, g = inputs of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from smelt.compress.quantize.coding import round_to_nearest
from smelt.compress.quantize.methods.chosen import pooled, taken
from smelt.runtime.schemes.parts.groups import groups_of
from smelt.runtime.schemes.scheme import Codes, Grid, Options, Scheme

STEPS = 20
_LEAST = 1e-4
_SHRINK = 0.5  # no more of a range is cut off


class Product(NamedTuple):
    """A matrix, float32 [N, K], and how it becomes codes."""

    weight: Tensor
    scheme: Scheme
    options: Options


class Found(NamedTuple):
    """The scales of an input, float32 [K]; the alpha that they are of; which part of the error is left."""

    scales: Tensor
    alpha: float
    left: float


def scales_of(magnitudes: Tensor, alpha: float) -> Tensor:
    """Return s, float32 [K], for the mean magnitudes of the channels."""
    scales = magnitudes.pow(alpha).clamp(min=_LEAST)
    return scales / (scales.max() * scales.min()).sqrt()


def searched_scales(products: Sequence[Product], magnitudes: Tensor, moment: Tensor) -> Found:
    """Return the scales with which the products of one input err least.

    Args:
        products: that read it.
        magnitudes: m, float32 [K]; equal where channels have to share a scale.
        moment: X X^T, float32 [K, K].
    """
    best: tuple[float, int, Tensor] | None = None
    plain = 0.0
    for step in range(STEPS):
        scales = scales_of(magnitudes, step / STEPS)
        if not bool(scales.isfinite().all()):
            continue
        error = sum(_error(product, scales, moment) for product in products)
        plain = error if step == 0 else plain
        if best is None or error < best[0]:
            best = (error, step, scales)
    assert best is not None  # with alpha 0 all scales are 1
    return Found(best[2], best[1] / STEPS, best[0] / plain if plain > 0 else 1.0)


def _error(product: Product, scales: Tensor, moment: Tensor) -> float:
    weight, scheme, options = product
    found = round_to_nearest(weight * scales, scheme, options)
    off = scheme.values(found.codes, found.grid, options).flatten(1)[:, : weight.shape[1]] / scales - weight
    return float(((off @ moment) * off).sum())


def clipped(product: Product, moment: Tensor) -> Codes:
    """Return codes on the grids that err least where up to half of each group's range is cut off.

    Each group's part of the output is compared alone, as the published code does.

    Args:
        product: with its scales in it.
        moment: X X^T of what it is fed then, float32 [K, K].
    """
    weight, scheme, options = product
    width = weight.shape[1]
    size = scheme.group(width, options)
    groups = groups_of(weight, size)
    pad = groups.shape[1] * size - width
    blocks = F.pad(moment, (0, pad, 0, pad)).reshape(groups.shape[1], size, groups.shape[1], size)
    own = torch.stack([blocks[at, :, at] for at in range(groups.shape[1])])  # [G, g, g]
    ends = groups.abs().amax(dim=-1, keepdim=True)
    best = dict(scheme.fit(groups, width, options))
    least = _group_errors(groups, best, own, scheme, options)
    for step in range(1, int(_SHRINK * STEPS)):
        end = ends * (1 - step / STEPS)
        grid = scheme.fit(groups.clamp(-end, end), width, options)
        errors = _group_errors(groups, grid, own, scheme, options)
        better = errors < least
        least = torch.where(better, errors, least)
        best = {name: taken(better, grid[name], kept) for name, kept in best.items()}
    return Codes(scheme.nearest(groups, best, options), best)


def _group_errors(groups: Tensor, grid: Grid, own: Tensor, scheme: Scheme, options: Options) -> Tensor:
    """Return |(Q(W) - W) X|^2 of all that share a scale, [N, G]."""
    off = scheme.values(scheme.nearest(groups, grid, options), grid, options) - groups
    return pooled((torch.einsum("ngi,gij->ngj", off, own) * off).sum(dim=-1), scheme, options)
