"""What layers with one scale per group of inputs share: the groups, and activations as int8 blocks.

ONNX Runtime's MatMulNBits multiplies float32 activations with the weights that the codes stand for
(accuracy level 0), or first turns every block of activations, as long as a group, into int8 (level 4):

    scale = max |x| / 127        x_q = round(x / scale)        round half to even

Source: onnxruntime/core/mlas/lib, sqnbitgemm (QuantizeARow_CompInt8). Which levels are computed as said
was measured with ONNX Runtime 1.31 on x86-64: 4-bit codes with groups of 16 to 128, 2-bit codes with
groups of 32 to 128; there torch and runtime differ by 2e-6 of the output's spread.

Shapes: N = outputs, K = inputs, g = group size, G = groups = ceil(K / g).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from smelt.core.errors import InputError

GROUP_SIZES = (16, 32, 64, 128)
ACCURACY_LEVELS = (0, 4)


def groups_of(weight: Tensor, group_size: int) -> Tensor:
    """Cut [N, K] into groups along the inputs, [N, G, g]; the last one is filled up with zeros."""
    rest = -weight.shape[1] % group_size
    groups: Tensor = F.pad(weight, (0, rest)).unflatten(1, (-1, group_size))
    return groups


def group_count(columns: int, group_size: int) -> int:
    """Return G."""
    return -(-columns // group_size)


def blocks_as_int8(x: Tensor, group_size: int) -> Tensor:
    """Return what is left of float32 `x` [..., K] after each block of g values went through int8."""
    width = x.shape[-1]
    blocks = F.pad(x, (0, -width % group_size)).unflatten(-1, (-1, group_size))
    scales = blocks.abs().amax(dim=-1, keepdim=True) / 127
    inverse = torch.where(scales > 0, scales.reciprocal(), 0.0)
    left: Tensor = torch.round(blocks * inverse) * scales
    return left.flatten(-2)[..., :width]


def check_group(group_size: object, allowed: tuple[int, ...], accuracy_level: object) -> None:
    """Check what a stored structure says of a layer's groups.

    Raises:
        InputError: a group size or an accuracy level that no layer has.
    """
    if isinstance(group_size, bool) or group_size not in allowed:
        raise InputError(f"group size {group_size!r}; expected one of {', '.join(map(str, allowed))}.")
    if isinstance(accuracy_level, bool) or accuracy_level not in ACCURACY_LEVELS:
        raise InputError(f"accuracy level {accuracy_level!r}; expected 0 (float32) or 4 (int8 blocks).")
