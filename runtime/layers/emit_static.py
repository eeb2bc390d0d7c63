"""Products of int8 codes whose activations have a range that is known before.

Sources: ONNX operators QuantizeLinear and DequantizeLinear; ONNX Runtime's docs/ContribOperators.md,
MatMulIntegerToFloat; NVIDIA's TensorRT documentation, "Working with Quantized Types" (explicit quantization).

Shapes: K = inputs, N = outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smelt.runtime.layers.emit import LOAD_TIME

# Place-holders of constants, by the axis that has a scale for each of its places.
DEQUANTIZED = {"DequantizedRows": 0, "DequantizedColumns": 1}
_MIDDLE = 128


def integer_product(x: Tensor, scale: Tensor, columns: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Emit QuantizeLinear to uint8 and com.microsoft::MatMulIntegerToFloat.

    The codes are those of int8 plus 128: ONNX Runtime multiplies uint8 by int8 fast, int8 by int8 ten times
    slower.

    Args:
        x: float32 [..., K].
        scale: of its codes, float32 scalar, a constant.
        columns: int8 [K, N], a constant; its zero point is 0.
        scales: float32 [N], or [] of all: its kernels are faster then where rows are few.
        bias: float32 [N] or None.

    Returns:
        float32 [..., N].
    """
    zero = torch.full((), _MIDDLE, dtype=torch.uint8)
    codes = _quantized(x, scale, zero)
    inputs = [codes, columns, scale, scales, zero, None, bias]
    out: Tensor = torch.onnx.ops.symbolic(
        "com.microsoft::MatMulIntegerToFloat",
        inputs if bias is not None else inputs[:5],
        dtype=torch.float32,
        shape=(*x.shape[:-1], columns.shape[1]),
        version=1,
    )
    return out


def explicit_product(
    x: Tensor, scale: Tensor, columns: Tensor, scales: Tensor, bias: Tensor | None
) -> Tensor:
    """Emit MatMul between QuantizeLinear and DequantizeLinear, all int8 with zero point 0; see above.

    A bias is added behind it and stays float: TensorRT takes no codes for it.
    """
    zero = torch.full((), 0, dtype=torch.int8)
    codes = _quantized(x, scale, zero)
    left: Tensor = torch.onnx.ops.symbolic(
        "DequantizeLinear", [codes, scale, zero], dtype=torch.float32, shape=tuple(x.shape)
    )
    out = torch.matmul(left, _dequantized("DequantizedColumns", columns, scales))
    return out if bias is None else out + bias


def rounded(x: Tensor, scale: Tensor, signed: bool) -> Tensor:
    """Emit QuantizeLinear to uint8 and DequantizeLinear, of any shape; zero is 128 where there are signs.

    ONNX Runtime makes a QLinearConv of a convolution between two such pairs, and drops a ReLU before codes
    whose zero is 0.
    """
    zero = torch.full((), _MIDDLE if signed else 0, dtype=torch.uint8)
    out: Tensor = torch.onnx.ops.symbolic(
        "DequantizeLinear",
        [_quantized(x, scale, zero), scale, zero],
        dtype=torch.float32,
        shape=tuple(x.shape),
    )
    return out


def dequantized_rows(codes: Tensor, scales: Tensor) -> Tensor:
    """Emit what the constants int8 [N, K] and float32 [N] stand for, float32 [N, K]."""
    return _dequantized("DequantizedRows", codes, scales)


def _quantized(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    out: Tensor = torch.onnx.ops.symbolic(
        "QuantizeLinear", [x, scale, zero], dtype=zero.dtype, shape=tuple(x.shape)
    )
    return out


def _dequantized(word: str, codes: Tensor, scales: Tensor) -> Tensor:
    """Emit a place-holder that becomes a DequantizeLinear: optimizers would store the floats (emit.py)."""
    out: Tensor = torch.onnx.ops.symbolic(
        f"{LOAD_TIME}::{word}", [codes, scales], dtype=torch.float32, shape=tuple(codes.shape), version=1
    )
    return out
