"""Products of codes in groups as DequantizeLinear and MatMul, for runtimes that read no MatMulNBits.

Source: ONNX operator DequantizeLinear-21 (blocked, with 4-bit types). Whoever runs it may multiply the codes
themselves: OpenVINO does, and turns activations into int8 blocks where it is told to. TensorRT wants signed
codes without zero points, right before the product, and leaves activations as they are.

Shapes: K = inputs, N = outputs, g = group size, G = ceil(K / g).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from smelt.runtime.layers.emit import LOAD_TIME, Layout

# the place-holders of the weights (export/weights/blocked.py): of unsigned codes, with zero points; of signed
# ones, by the axis that is cut into blocks
BLOCKED = "DequantizedBlocks"
SIGNED = {"SignedColumns": 0, "SignedRows": 1}
IN_BLOCKS = (BLOCKED, *SIGNED)


def blocked_product(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    layout: Layout,
    rounds: bool,
) -> Tensor:
    """Emit x W^T + bias, W behind a place-holder.

    Args:
        x: float32 [..., K].
        codes: uint8 [N, G, g * bits / 8], the first code in the lowest bits; a constant, as those below.
        scales: float16 [N, G].
        zeros: uint8, [N, G] of 8 bits, else [N, G / 2] or, where G is odd, all in a row, two in a byte; None
            for 2 ** (bits - 1) everywhere.
        bias: float32 [N] or None.
        layout: of the codes; 4 or 8 bits.
        rounds: whether activations are to become int8 in blocks of g.

    Returns:
        float32 [..., N].
    """
    width = codes.shape[1] * layout.group_size
    constants = [codes, scales] if zeros is None else [codes, scales, zeros]
    weights: Tensor = torch.onnx.ops.symbolic(
        f"{LOAD_TIME}::{BLOCKED}",
        constants,
        {"bits": layout.bits, "block_size": layout.group_size, "rounds": int(rounds)},
        dtype=torch.float32,
        shape=(layout.outputs, width),
        version=1,
    )
    if width != layout.inputs:  # the last group is filled up
        x = F.pad(x, (0, width - layout.inputs))
    out = torch.matmul(x, weights.t())
    return out if bias is None else out + bias


def signed_product(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, size: int) -> Tensor:
    """Emit x W + bias, W [G g, N] behind a place-holder.

    Args:
        x: float32 [..., K].
        codes: uint8 [G g N / 2], signed codes of 4 bits, the first in the lowest ones; a constant.
        scales: float32 [G, N], a constant.
        bias: float32 [N] or None.
        size: g.

    Returns:
        float32 [..., N].
    """
    groups, outputs = scales.shape
    weights = _signed("SignedColumns", codes, scales, size, (groups * size, outputs))
    if groups * size != x.shape[-1]:  # the last group is filled up
        x = F.pad(x, (0, groups * size - x.shape[-1]))
    out = torch.matmul(x, weights)
    return out if bias is None else out + bias


def signed_rows(codes: Tensor, scales: Tensor, size: int) -> Tensor:
    """Emit what the constants uint8 [N, G, g / 2] and float32 [N, G] stand for, float32 [N, G g]."""
    return _signed("SignedRows", codes, scales, size, (scales.shape[0], scales.shape[1] * size))


def _signed(word: str, codes: Tensor, scales: Tensor, size: int, shape: tuple[int, int]) -> Tensor:
    out: Tensor = torch.onnx.ops.symbolic(
        f"{LOAD_TIME}::{word}",
        [codes, scales],
        {"block_size": size},
        dtype=torch.float32,
        shape=shape,
        version=1,
    )
    return out
