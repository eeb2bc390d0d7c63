"""Clipped ranges of groups: by the least error, or by a percentile.

`mse_grid` follows GPTQ's published code (quant.py, Quantizer.find_params with mse): the range is shrunk in
steps of a hundredth, down to a fifth, and each group gets the range with the least sum of |error|^2.4. The
grid of a shrunk group is the shrunk grid, so this works for every scheme.

`percentile_grid` uses the range that contains a percentile of a group's magnitudes, with linear interpolation
as in numpy.percentile; larger weights are clipped.

Shapes: N = outputs, G = groups, g = inputs of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smelt.compress.quantize.methods.select_grid import pool_errors, select_per_group
from smelt.runtime.schemes.scheme import QuantParams, Scheme, SchemeOptions

_SHRINK_STEPS, _SHRINK_PARTS, _ERROR_POWER = 80, 100, 2.4


def mse_grid(groups: Tensor, width: int, scheme: Scheme, options: SchemeOptions) -> QuantParams:
    """Return the grid of `groups`, float32 [N, G, g], with each range clipped for the least error."""
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
