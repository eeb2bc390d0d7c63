"""Ranges that cut off the ends of a group where that has the smaller error: a search of each group's grid.

GPTQ's published code (quant.py, Quantizer.find_params with mse): the range is shrunk by a hundredth at a
time, to a fifth at least, and of each group that one is taken whose sum of |error|^2.4 is least. A scheme's
grid of the shrunk group is the shrunk grid, so that it serves every scheme.

Shapes: N = outputs, G = groups, g = inputs of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
        best = {name: _taken(better, grid[name], kept) for name, kept in best.items()}
    return best


def _errors(groups: Tensor, grid: Grid, scheme: Scheme, options: Options) -> Tensor:
    """Return the sum of |error|^2.4 of each group, [N, G]."""
    off = scheme.values(scheme.nearest(groups, grid, options), grid, options) - groups
    return off.abs_().pow_(_POWER).sum(dim=-1)


def _taken(better: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Return of each group the new part of a grid where it is better; a grid may have more axes behind."""
    there = (
        better.reshape(*better.shape, *[1] * (new.dim() - better.dim())) if new.dim() > 1 else better[:, 0]
    )
    return torch.where(there, new, old)
