"""HQQ with a scale that is fitted: grids by half-quadratic splitting, without data.

Badri & Shaji 2023, Half-Quadratic Quantization of Large Machine Learning Models
(https://mobiusml.github.io/hqq_blog/), and its published code (hqq/core/optimize.py): the error
|W - W_r|^p, p = 0.7, of a group W and of what its codes stand for, W_r, is made smaller by turns. With the
codes fixed, the part of the error that the norm lets go is

    E = sign(R) max(|R| - |R|^(p - 1) / beta, 0)        R = W - W_r

and the grid is fitted to W - E by least squares; beta is 10 and grows by 1.01, 20 times. The published code
fits the zero point alone, which it keeps as a float:

    zero = mean(codes - (W - E) / scale)

A zero point that is stored as an integer is rounded, which takes back all that this gains, and a symmetric
scheme has none. So the scale is fitted too, by the same least squares:

    scale = <W - E, u> / <u, u>        u = codes - zero

With these constants E is 0 for errors below 0.17, so for all that weights of networks have: what is left,
here and in the published code, is the least squares. They cut ends of the range off, which at two bits costs
more than it gains (docs/reference/stages/quantize.md#hqq).

Of each group the grid with the least mean |error| is taken, the scheme's own among them.

Shapes: N = outputs, G = groups, g = inputs of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smelt.compress.quantize.methods.chosen import pooled, taken
from smelt.runtime.schemes.scheme import Grid, Options, Scheme

NORM, BETA, GROWTH, ITERATIONS = 0.7, 10.0, 1.01, 20


def half_quadratic_grid(groups: Tensor, width: int, scheme: Scheme, options: Options) -> Grid:
    """Return the grid of `groups`, float32 [N, G, g], as HQQ finds it: a `Fit`.

    Args:
        groups: of the weights.
        width: how many of the G * g inputs are weights; what fills up the last group has no say.
        scheme: whose grid it is.
        options: of it.
    """
    there = torch.ones(groups[0].numel(), device=groups.device)
    there[width:] = 0
    there = there.reshape(groups.shape[1:])
    kind = getattr(torch, _stored(scheme, groups, width, options))
    grid = dict(scheme.fit(groups, width, options))
    best, least, beta = grid, _errors(groups, grid, there, scheme, options), BETA
    for _ in range(ITERATIONS):
        values = scheme.values(scheme.nearest(groups, grid, options), grid, options)
        target = groups - shrunk(groups - values, beta)
        grid = _fitted(target, values, grid, there, scheme, options)
        grid["scales"] = grid["scales"].to(kind).float()
        errors = _errors(groups, grid, there, scheme, options)
        better = errors < least
        least = torch.where(better, errors, least)
        best = {name: taken(better, grid[name], kept) for name, kept in best.items()}
        beta *= GROWTH
    return best


def shrunk(x: Tensor, beta: float, norm: float = NORM) -> Tensor:
    """Return the proximal operator of |x|^norm, in the generalised form of the published code."""
    large = x.abs()
    return x.sign() * (large - large.clamp(min=1e-30) ** (norm - 1) / beta).clamp(min=0)


def _fitted(
    target: Tensor, values: Tensor, grid: Grid, there: Tensor, scheme: Scheme, options: Options
) -> dict[str, Tensor]:
    """Return the grid that fits `target` best, with the codes that stand for `values` on the one before."""
    found = dict(grid)
    scales = grid["scales"]
    steps = (values / scales[..., None]).where(scales[..., None] != 0, 0.0) * there
    if "zeros" in grid:
        moved = moved_zeros(target, steps, scales, there)
        zeros = (grid["zeros"].float() + moved).round().clamp(0, _most(scheme, grid, options))
        steps = steps + (grid["zeros"].float() - zeros)[..., None] * there
        found["zeros"] = zeros.to(grid["zeros"].dtype)
    length = pooled((steps * steps).sum(dim=-1), scheme, options)
    fitted = pooled((target * steps).sum(dim=-1), scheme, options) / length
    found["scales"] = fitted.where((length > 0) & fitted.isfinite() & (fitted != 0), scales)
    return found


def moved_zeros(target: Tensor, steps: Tensor, scales: Tensor, there: Tensor) -> Tensor:
    """Return how far the zero points, [N, G], are to move: the mean of codes - target / scale.

    Args:
        target: float32 [N, G, g], to be fitted.
        steps: likewise, codes - zero.
        scales: [N, G].
        there: [G, g], 1 for weights, 0 for what fills up.
    """
    wanted = (target / scales[..., None]).where(scales[..., None] != 0, 0.0) * there
    return (steps - wanted).sum(dim=-1) / there.sum(dim=-1)


def _most(scheme: Scheme, grid: Grid, options: Options) -> int:
    """Return the largest code of a scheme with zero points: what a weight beyond all others becomes."""
    one = {name: torch.ones_like(tensor[:1, :1]) for name, tensor in grid.items()}
    return int(scheme.nearest(torch.full((1, 1, 1), 1e6, device=one["scales"].device), one, options))


def _stored(scheme: Scheme, groups: Tensor, width: int, options: Options) -> str:
    """Return the type in which scales are stored, by torch's name: rounded to it they are tried."""
    stored = scheme.storage(groups.shape[0], width, options)["scales"]
    return stored.filed or stored.dtype


def _errors(groups: Tensor, grid: Grid, there: Tensor, scheme: Scheme, options: Options) -> Tensor:
    """Return the sum of |error| of all that share a scale, [N, G]."""
    off = scheme.values(scheme.nearest(groups, grid, options), grid, options) - groups
    return pooled(off.abs_().mul_(there).sum(dim=-1), scheme, options)
