"""Ranges that cut off the ends of a group: where that has the smaller error, or a given share of it.

`searched_grid` does as GPTQ's published code (quant.py, Quantizer.find_params with mse): the range is shrunk
by a hundredth at a time, to a fifth at least, and of each group that one is taken whose sum of |error|^2.4 is
least. A scheme's grid of the shrunk group is the shrunk grid, so that it serves every scheme.

`percentile_grid` takes the range inside of which a percentile of a group's magnitudes lies, linear between
two of them as numpy.percentile has it; what is beyond becomes the end of the range.

Shapes: N = outputs, G = groups, g = inputs of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smelt.compress.quantize.methods.chosen import pooled, taken
from smelt.runtime.schemes.scheme import Grid, Options, Scheme

_STEPS, _PARTS, _POWER = 80, 100, 2.4


def searched_grid(groups: Tensor, width: int, scheme: Scheme, options: Options) -> Grid:
    """Return the grid of `groups`, float32 [N, G, g], each group's range shrunk to its least error."""
    best = dict(scheme.fit(groups, width, options))
    least = _errors(groups, best, scheme, options)
    for step in range(1, _STEPS):
        grid = scheme.fit(groups * (1 - step / _PARTS), width, options)
        errors = _errors(groups, grid, scheme, options)
        better = errors < least
        least = torch.where(better, errors, least)
        best = {name: taken(better, grid[name], kept) for name, kept in best.items()}
    return best


def percentile_grid(percentile: float, groups: Tensor, width: int, scheme: Scheme, options: Options) -> Grid:
    """Return the grid of `groups`, float32 [N, G, g], cut off where `percentile` of their magnitudes end.

    Args:
        percentile: above 0, at most 100.
        groups: of the weights.
        width: how many of the G * g inputs are weights; what fills up the last group does not count.
        scheme: whose grid it is.
        options: of it.
    """
    size = groups.shape[1] * groups.shape[2]
    given, whole = groups, scheme.whole(options)
    groups = groups.reshape(1, 1, -1) if whole else groups
    ordered = groups.abs().sort(dim=-1, descending=True).values  # what fills up comes last
    counts = torch.full(groups.shape[1:2], groups.shape[2])
    counts[-1] -= (size - width) * (len(given) if whole else 1)
    place = ((counts - 1) * (1 - percentile / 100)).to(ordered)  # from the largest on
    low = place.floor().long()
    pair = [ordered.gather(-1, at.expand(len(groups), -1)[..., None]) for at in (low, place.ceil().long())]
    ends = pair[0] + (pair[1] - pair[0]) * (place - low)[:, None]
    return scheme.fit(given.clamp(-ends, ends), width, options)


def _errors(groups: Tensor, grid: Grid, scheme: Scheme, options: Options) -> Tensor:
    """Return the sum of |error|^2.4 of all that share a scale, [N, G]."""
    off = scheme.values(scheme.nearest(groups, grid, options), grid, options) - groups
    return pooled(off.abs_().pow_(_POWER).sum(dim=-1), scheme, options)
