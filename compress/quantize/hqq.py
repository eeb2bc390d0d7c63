"""HQQ with fitted scales: grids by half-quadratic splitting, without data.

Badri & Shaji 2023, Half-Quadratic Quantization of Large Machine Learning Models
(https://mobiusml.github.io/hqq_blog/), and its published code (hqq/core/optimize.py): the error
|W - W_r|^p, p = 0.7, of a group W and its dequantized values W_r is minimized in alternating steps. With the
quantized values fixed, the outlier part of the error is

    E = sign(R) max(|R| - |R|^(p - 1) / beta, 0)        R = W - W_r

and the grid is fitted to W - E by least squares; beta is 10 and grows by 1.01, 20 times. The published code
fits only the zero point, which it stores as a float:

    zero = mean(codes - (W - E) / scale)

A zero point that is stored as an integer is rounded, which cancels the gain, and a symmetric scheme has none.
Therefore the scale is fitted too, by the same least squares:

    scale = <W - E, u> / <u, u>        u = codes - zero

With these constants E is 0 for errors below 0.17, so for all practical weights: only the least squares are
left, here and in the published code. The published code clips the range, which at two bits costs more than it
gains (docs/reference/stages/quantize.md#hqq).

Each group, or each matrix for per-tensor scales, gets the grid with the least mean |error|, including the
scheme's own.

Shapes: N = outputs, G = groups, g = inputs of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smelt.core.near_ties import is_better
from smelt.quantization.scheme import QuantParams, Scheme, SchemeOptions


def select_per_group(better: Tensor, candidate: Tensor, current: Tensor) -> Tensor:
    """Return the grid tensor with `candidate` for the groups where it is better, else `current`.

    Args:
        better: bool [N, G].
        candidate: [N, G, ...], or [N] if all groups of a row share a value.
        current: like `candidate`.
    """
    selected = (
        better.reshape(*better.shape, *[1] * (candidate.dim() - better.dim()))
        if candidate.dim() > 1
        else better[:, 0]
    )
    return torch.where(selected, candidate, current)


def pool_errors(sums: Tensor, scheme: Scheme, options: SchemeOptions) -> Tensor:
    """Return the errors [N, G], summed over all groups that share a scale."""
    return sums.sum().expand_as(sums) if scheme.is_per_tensor(options) else sums


NORM, BETA, GROWTH, ITERATIONS = 0.7, 10.0, 1.01, 20


def hqq_grid(groups: Tensor, width: int, scheme: Scheme, options: SchemeOptions) -> QuantParams:
    """Return the HQQ grid of `groups`, float32 [N, G, g]; a `GridFinder`.

    Args:
        groups: groups of weights.
        width: how many of the G * g inputs are weights; padding is ignored.
        scheme: the scheme of the grid.
        options: options of the scheme.
    """
    valid = torch.ones(groups[0].numel(), device=groups.device)
    valid[width:] = 0
    valid = valid.reshape(groups.shape[1:])
    dtype = getattr(torch, _scale_dtype(scheme, groups, width, options))
    grid = dict(scheme.compute_qparams(groups, width, options))
    best_grid, least_errors, beta = grid, _grid_errors(groups, grid, valid, scheme, options), BETA
    for _ in range(ITERATIONS):
        values = scheme.dequantize(scheme.quantize(groups, grid, options), grid, options)
        target = groups - shrink(groups - values, beta)
        grid = _fit_grid(target, values, grid, valid, scheme, options)
        grid["scales"] = grid["scales"].to(dtype).float()
        errors = _grid_errors(groups, grid, valid, scheme, options)
        better = is_better(errors, least_errors)
        least_errors = torch.where(better, errors, least_errors)
        best_grid = {
            name: select_per_group(better, grid[name], current) for name, current in best_grid.items()
        }
        beta *= GROWTH
    return best_grid


def shrink(x: Tensor, beta: float, norm: float = NORM) -> Tensor:
    """Return the proximal operator of |x|^norm, in the generalized form of the published code."""
    large = x.abs()
    return x.sign() * (large - large.clamp(min=1e-30) ** (norm - 1) / beta).clamp(min=0)


def _fit_grid(
    target: Tensor, values: Tensor, grid: QuantParams, mask: Tensor, scheme: Scheme, options: SchemeOptions
) -> dict[str, Tensor]:
    """Return the grid that fits `target` best, with the quantized values of `values` on the previous grid."""
    new_grid = dict(grid)
    scales = grid["scales"]
    steps = (values / scales[..., None]).where(scales[..., None] != 0, 0.0) * mask
    if "zeros" in grid:
        shift = zero_point_shift(target, steps, scales, mask)
        if scheme.is_per_tensor(options):
            shift = shift.mean().expand_as(shift)
        zeros = (grid["zeros"].float() + shift).round().clamp(0, _max_code(scheme, grid, options))
        steps = steps + (grid["zeros"].float() - zeros)[..., None] * mask
        new_grid["zeros"] = zeros.to(grid["zeros"].dtype)
    length = pool_errors((steps * steps).sum(dim=-1), scheme, options)
    fitted = pool_errors((target * steps).sum(dim=-1), scheme, options) / length
    new_grid["scales"] = fitted.where((length > 0) & fitted.isfinite() & (fitted != 0), scales)
    return new_grid


def zero_point_shift(target: Tensor, steps: Tensor, scales: Tensor, valid: Tensor) -> Tensor:
    """Return the shift of the zero points, [N, G]: the mean of steps - target / scale.

    Args:
        target: float32 [N, G, g], the values to fit.
        steps: codes - zero, same shape.
        scales: [N, G].
        valid: [G, g], 1 for weights, 0 for padding.
    """
    exact_steps = (target / scales[..., None]).where(scales[..., None] != 0, 0.0) * valid
    return (steps - exact_steps).sum(dim=-1) / valid.sum(dim=-1)


def _max_code(scheme: Scheme, grid: QuantParams, options: SchemeOptions) -> int:
    """Return the largest quantized value of a scheme with zero points."""
    unit_grid = {name: torch.ones_like(tensor[:1, :1]) for name, tensor in grid.items()}
    return int(
        scheme.quantize(torch.full((1, 1, 1), 1e6, device=unit_grid["scales"].device), unit_grid, options)
    )


def _scale_dtype(scheme: Scheme, groups: Tensor, width: int, options: SchemeOptions) -> str:
    """Return the stored dtype of scales, by its torch name; candidates are rounded to it."""
    stored = scheme.stored_tensors(groups.shape[0], width, options).get("scales")
    return "float32" if stored is None else stored.file_dtype or stored.dtype


def _grid_errors(
    groups: Tensor, grid: QuantParams, mask: Tensor, scheme: Scheme, options: SchemeOptions
) -> Tensor:
    """Return the sum of |error| over all weights that share a scale, [N, G]."""
    difference = scheme.dequantize(scheme.quantize(groups, grid, options), grid, options) - groups
    return pool_errors(difference.abs_().mul_(mask).sum(dim=-1), scheme, options)
