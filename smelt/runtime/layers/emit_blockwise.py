"""Groupwise quantized linear layers as DequantizeLinear and MatMul, for runtimes without MatMulNBits.

Source: ONNX operator DequantizeLinear-21 (blocked, with 4-bit types). A runtime may multiply the quantized
weights directly: OpenVINO does, and turns activations into int8 blocks if its option is set. TensorRT needs
signed weights without zero points, directly before the MatMul, and does not round activations.

Shapes: K = inputs, N = outputs, g = group size, G = ceil(K / g).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from smelt.runtime.layers.emit import LOAD_TIME_DOMAIN, NBitsLayout

# the placeholders of the weights (export/weights/blocked_weights.py): unsigned, with zero points; signed, by
# the axis that is divided into blocks
BLOCKWISE_OP = "DequantizedBlocks"
SIGNED_BLOCK_OPS = {"SignedColumns": 0, "SignedRows": 1}
BLOCK_OPS = (BLOCKWISE_OP, *SIGNED_BLOCK_OPS)


def blockwise_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    layout: NBitsLayout,
    quantizes_activations: bool,
) -> Tensor:
    """Emit x W^T + bias, with a placeholder for W.

    Args:
        x: float32 [..., K].
        codes: uint8 [N, G, g * bits / 8], the first code in the lowest bits; a constant, like those below.
        scales: float16 [N, G].
        zeros: uint8, [N, G] of 8 bits, else [N, G / 2] or, where G is odd, all in a row, two in a byte; None
            for 2 ** (bits - 1) everywhere.
        bias: float32 [N] or None.
        layout: of the codes; 4 or 8 bits.
        quantizes_activations: whether activations are to become int8 in blocks of g.

    Returns:
        float32 [..., N].
    """
    width = codes.shape[1] * layout.group_size
    constants = [codes, scales] if zeros is None else [codes, scales, zeros]
    weights: Tensor = torch.onnx.ops.symbolic(
        f"{LOAD_TIME_DOMAIN}::{BLOCKWISE_OP}",
        constants,
        {"bits": layout.bits, "block_size": layout.group_size, "rounds": int(quantizes_activations)},
        dtype=torch.float32,
        shape=(layout.outputs, width),
        version=1,
    )
    if width != layout.inputs:  # the last group is padded
        x = F.pad(x, (0, width - layout.inputs))
    out = torch.matmul(x, weights.t())
    return out if bias is None else out + bias


def signed_block_linear(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, size: int) -> Tensor:
    """Emit x W + bias, W [G g, N], with a placeholder for W.

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
    weights = _signed_placeholder("SignedColumns", codes, scales, size, (groups * size, outputs))
    if groups * size != x.shape[-1]:  # the last group is padded
        x = F.pad(x, (0, groups * size - x.shape[-1]))
    out = torch.matmul(x, weights)
    return out if bias is None else out + bias


def signed_block_weight(codes: Tensor, scales: Tensor, size: int) -> Tensor:
    """Emit dequantized constants: uint8 [N, G, g / 2] and float32 [N, G] -> float32 [N, G g]."""
    return _signed_placeholder("SignedRows", codes, scales, size, (scales.shape[0], scales.shape[1] * size))


def _signed_placeholder(
    word: str, codes: Tensor, scales: Tensor, size: int, shape: tuple[int, int]
) -> Tensor:
    out: Tensor = torch.onnx.ops.symbolic(
        f"{LOAD_TIME_DOMAIN}::{word}",
        [codes, scales],
        {"block_size": size},
        dtype=torch.float32,
        shape=shape,
        version=1,
    )
    return out
