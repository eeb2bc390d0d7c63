"""Exported int8 linear layers with a static activation range.

Sources: ONNX operators QuantizeLinear and DequantizeLinear; ONNX Runtime's docs/ContribOperators.md,
MatMulIntegerToFloat; NVIDIA's TensorRT documentation, "Working with Quantized Types" (explicit quantization).

Shapes: K = inputs, N = outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smelt.runtime.layers.emit import LOAD_TIME_DOMAIN

# Placeholders of constants, by the axis that the scales belong to.
DEQUANTIZE_OPS = {"DequantizedRows": 0, "DequantizedColumns": 1}
_ZERO_POINT = 128


def integer_linear(x: Tensor, scale: Tensor, columns: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Emit QuantizeLinear to uint8 and com.microsoft::MatMulIntegerToFloat.

    Activations are int8 plus 128: ONNX Runtime multiplies uint8 by int8 fast, int8 by int8 ten times
    slower.

    Args:
        x: float32 [..., K].
        scale: of its quantized values, float32 scalar, a constant.
        columns: int8 [K, N], a constant; its zero point is 0.
        scales: float32 [N], or [] for all: its kernels are faster then where rows are few.
        bias: float32 [N] or None.

    Returns:
        float32 [..., N].
    """
    zero = torch.full((), _ZERO_POINT, dtype=torch.uint8)
    codes = _quantize(x, scale, zero)
    inputs = [codes, columns, scale, scales, zero, None, bias]
    out: Tensor = torch.onnx.ops.symbolic(
        "com.microsoft::MatMulIntegerToFloat",
        inputs if bias is not None else inputs[:5],
        dtype=torch.float32,
        shape=(*x.shape[:-1], columns.shape[1]),
        version=1,
    )
    return out


def qdq_linear(x: Tensor, scale: Tensor, columns: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Emit MatMul between QuantizeLinear and DequantizeLinear, all int8 with zero point 0; see above.

    A bias is added after it and stays float: TensorRT does not quantize it.
    """
    zero = torch.full((), 0, dtype=torch.int8)
    codes = _quantize(x, scale, zero)
    left: Tensor = torch.onnx.ops.symbolic(
        "DequantizeLinear", [codes, scale, zero], dtype=torch.float32, shape=tuple(x.shape)
    )
    out = torch.matmul(left, _dequantize_placeholder("DequantizedColumns", columns, scales))
    return out if bias is None else out + bias


def quantize_dequantize(x: Tensor, scale: Tensor, signed: bool) -> Tensor:
    """Emit QuantizeLinear to uint8 and DequantizeLinear, of any shape; the zero point is 128 if signed.

    ONNX Runtime turns a convolution between two such pairs into a QLinearConv, and removes a ReLU before a
    quantization whose zero point is 0.
    """
    zero = torch.full((), _ZERO_POINT if signed else 0, dtype=torch.uint8)
    out: Tensor = torch.onnx.ops.symbolic(
        "DequantizeLinear",
        [_quantize(x, scale, zero), scale, zero],
        dtype=torch.float32,
        shape=tuple(x.shape),
    )
    return out


def dequantize_rows(codes: Tensor, scales: Tensor) -> Tensor:
    """Emit the dequantized values of the constants int8 [N, K] and float32 [N], float32 [N, K]."""
    return _dequantize_placeholder("DequantizedRows", codes, scales)


def _quantize(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    out: Tensor = torch.onnx.ops.symbolic(
        "QuantizeLinear", [x, scale, zero], dtype=zero.dtype, shape=tuple(x.shape)
    )
    return out


def _dequantize_placeholder(word: str, codes: Tensor, scales: Tensor) -> Tensor:
    """Emit a placeholder that becomes a DequantizeLinear: optimizers would store the floats (emit.py)."""
    out: Tensor = torch.onnx.ops.symbolic(
        f"{LOAD_TIME_DOMAIN}::{word}",
        [codes, scales],
        dtype=torch.float32,
        shape=tuple(codes.shape),
        version=1,
    )
    return out
