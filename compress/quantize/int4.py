"""Which 4-bit codes and scales stand for a matrix: scheme int4.

Symmetric: the value of largest magnitude in a group becomes code 0 (that is -8), so that all 16 codes
are used; the zero point is 8 everywhere. A value of the other sign that is as large would be +8 and is cut
to +7, by a step at most; all others are half a step off at most. That is worth it: a scale of amax / 7,
which cuts nothing, has a mean squared error that is 28 % larger (groups of 64, normal or trained
weights). Asymmetric: smallest and largest value become 0 and 15, and zero itself stays exact. Both as
ONNX Runtime's own quantizer does (onnxruntime/core/mlas/lib/q4_dq.cpp, range2scale and range2scalezp);
scales are rounded to float16 before codes are chosen.

Shapes: N = outputs, K = inputs, g = group size, G = ceil(K / g).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from smelt.compress.quantize.straight_through import straight_through
from smelt.runtime.layers.quantized_groups import groups_of
from smelt.runtime.layers.quantized_int4 import ZERO, Int4Matrix


class Int4Codes(NamedTuple):
    """codes: uint8 [N, G, g]; scales: float32 [N, G], each a float16; zeros: uint8 [N, G] or None."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None


def decide(weight: Tensor, group_size: int, symmetric: bool) -> Int4Codes:
    """Return codes and scales for `weight`, float [N, K]."""
    groups = groups_of(weight.detach().float(), group_size)
    scales, zeros = _scales(groups, symmetric)
    codes = torch.round(groups * _inverse(scales)[..., None]).add_(zeros[..., None]).clamp_(0, 15)
    return Int4Codes(codes.to(torch.uint8), scales, None if symmetric else zeros.to(torch.uint8))


def _scales(groups: Tensor, symmetric: bool) -> tuple[Tensor, Tensor]:
    low, high = groups.amin(dim=-1).clamp_(max=0), groups.amax(dim=-1).clamp_(min=0)
    if symmetric:
        scales = (torch.where(high > -low, high, low) / -8).half().float()
        return scales, torch.full_like(scales, ZERO)
    scales = ((high - low) / 15).half().float()
    return scales, torch.round(-low * _inverse(scales)).clamp_(0, 15)


def _inverse(scales: Tensor) -> Tensor:
    """Return 1 / scale; 0 for groups of zeros, whose codes are then the zero point."""
    return torch.where(scales != 0, scales.reciprocal(), 0.0)


def fill_(matrix: Int4Matrix, weight: Tensor) -> None:
    """Put the codes and scales of `weight` into `matrix`."""
    matrix.set_(*decide(weight, matrix.group_size, matrix.symmetric))


def fake(weight: Tensor, matrix: Int4Matrix) -> Tensor:
    """Return what codes of `weight` would stand for, [N, K]; gradients pass straight through.

    The range follows the weights, so that at most a step is cut off: see above.
    """
    with torch.no_grad():
        codes, scales, zeros = decide(weight, matrix.group_size, matrix.symmetric)
        offset = ZERO if zeros is None else zeros[..., None].float()
        values = (codes.float() - offset) * scales[..., None]
    return straight_through(weight, values.flatten(1)[:, : weight.shape[1]])
