"""Exported operators of modules and quantized linear layers: those that the target runs fastest.

A contextvar holds the export target; outside an export it is None and modules compute
in torch. `torch.onnx.ops.symbolic` puts a named ONNX operator into the exported graph; shapes may hold
symbolic sizes. Source: ONNX Runtime's docs/ContribOperators.md (domain com.microsoft).

Groupwise layers are exported as DequantizeLinear and MatMul for runtimes without MatMulNBits (ONNX operator
DequantizeLinear-21, blocked, with 4-bit types). A runtime may multiply the quantized weights directly:
OpenVINO does, and turns activations into int8 blocks if its option is set. TensorRT needs signed weights
without zero points, directly before the MatMul, and does not round activations.

int8 layers with a static activation range are exported by `integer_linear` for ONNX Runtime
(MatMulIntegerToFloat) and by `qdq_linear` for other runtimes (ONNX operators QuantizeLinear and
DequantizeLinear; NVIDIA's TensorRT documentation, "Working with Quantized Types", explicit quantization).

Shapes: B = batch, S = queries, T = keys, H = heads, d = width of a head, K = inputs, N = outputs,
g = group size, G = ceil(K / g).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from smelt.quantization.scheme import FUSED_OPSET, FUSED_TARGETS

GraphTarget = Literal["ort-cpu", "ort-cuda", "tensorrt", "openvino"]
# Domain of the placeholders for values that the runtime computes from constants when it loads a graph.
LOAD_TIME_DOMAIN = "smelt.load"
_NF4 = 1  # MatMulBnb4's number of its table
_export_target: ContextVar[GraphTarget | None] = ContextVar("smelt_export_target", default=None)
_has_fused_operators: ContextVar[bool] = ContextVar("smelt_has_fused_operators", default=False)


def export_target() -> GraphTarget | None:
    """Return the current export target, or None when torch itself computes."""
    return _export_target.get()


def emits_fused_operators() -> bool:
    """Return whether the export's target runs ONNX's own fused operators, and its opset has them."""
    return _has_fused_operators.get()


def appends_in_attention() -> bool:
    """Return whether fused attention takes the past and returns the cache: TensorRT's has one output."""
    return emits_fused_operators() and export_target() == "ort-cuda"


@contextmanager
def exporting_to(target: GraphTarget, opset: int = 0) -> Iterator[None]:
    """Make modules emit operators for `target` within the block; fused ones where `opset` has them."""
    token = _export_target.set(target)
    fused_token = _has_fused_operators.set(target in FUSED_TARGETS and opset >= FUSED_OPSET)
    try:
        yield
    finally:
        _has_fused_operators.reset(fused_token)
        _export_target.reset(token)


class WeightGrid(NamedTuple):
    """Constant int8 weights of a matrix, and their scales and zero points.

    codes: int8 [K, N], or [N, K] of rows. scales: float32 [N], or [] for all: kernels are faster then where
    rows are few. zeros: int8 [N], or [] for all; None where they are 0.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None


def dynamic_quantize_matmul(x: Tensor, weights: WeightGrid, bias: Tensor | None) -> Tensor:
    """Emit com.microsoft::DynamicQuantizeMatMul.

    It quantizes `x` as DynamicQuantizeLinear does, multiplies integers, scales back and adds the bias.

    Args:
        x: float32 [..., K].
        weights: of columns.
        bias: float32 [N] or None.

    Returns:
        float32 [..., N].
    """
    inputs: list[Tensor | None] = [x, *weights, bias]
    while inputs[-1] is None:
        inputs.pop()
    out: Tensor = torch.onnx.ops.symbolic(
        "com.microsoft::DynamicQuantizeMatMul",
        inputs,
        dtype=torch.float32,
        shape=(*x.shape[:-1], weights.codes.shape[1]),
        version=1,
    )
    return out


class NBitsLayout(NamedTuple):
    """Layout of the quantized weights of a MatMulNBits: K, N, bits of a weight, weights of a group."""

    inputs: int
    outputs: int
    bits: int
    group_size: int


def matmul_nbits(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    layout: NBitsLayout,
    accuracy_level: int,
) -> Tensor:
    """Emit com.microsoft::MatMulNBits.

    Args:
        x: float32 [..., K].
        codes: uint8 [N, G, g * bits / 8], the first code in the lowest bits.
        scales: float16 [N, G]; the graph stores them so, and converts them at loading. Or float32.
        zeros: uint8 [N, ceil(G * bits / 8)], or None for 2 ** (bits - 1) everywhere.
        bias: float32 [N] or None.
        layout: of the codes.
        accuracy_level: 0 multiplies float32 activations, 4 turns them into int8 blocks first.

    Returns:
        float32 [..., N].
    """
    wide_scales = widen_scales(scales) if scales.dtype == torch.float16 else scales
    # on CUDA only some of the operator's kernels add a bias
    separate_bias = bias if export_target() == "ort-cuda" else None
    inputs = [x, codes, wide_scales, zeros, None, bias if separate_bias is None else None]
    while inputs[-1] is None:
        inputs.pop()
    out: Tensor = torch.onnx.ops.symbolic(
        "com.microsoft::MatMulNBits",
        inputs,
        {
            "K": layout.inputs,
            "N": layout.outputs,
            "bits": layout.bits,
            "block_size": layout.group_size,
            "accuracy_level": accuracy_level,
        },
        dtype=torch.float32,
        shape=(*x.shape[:-1], layout.outputs),
        version=1,
    )
    return out if separate_bias is None else out + separate_bias


def matmul_bnb4(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, layout: NBitsLayout) -> Tensor:
    """Emit com.microsoft::MatMulBnb4 with NF4 codes; it multiplies float32 activations and has no bias.

    Args:
        x: float32 [..., K].
        codes: uint8 [N * K / 2], row by row, the first code in the highest bits.
        scales: float32 [N * K / g], the largest magnitude of each block.
        bias: float32 [N] or None.
        layout: of the codes; K is a multiple of g.

    Returns:
        float32 [..., N].
    """
    out: Tensor = torch.onnx.ops.symbolic(
        "com.microsoft::MatMulBnb4",
        [x, codes, scales],
        {"K": layout.inputs, "N": layout.outputs, "block_size": layout.group_size, "quant_type": _NF4},
        dtype=torch.float32,
        shape=(*x.shape[:-1], layout.outputs),
        version=1,
    )
    return out if bias is None else out + bias


def expand_by_table(name: str, codes: Tensor, times: int) -> Tensor:
    """Emit a placeholder that replaces each byte of a constant by a row of a table when the graph is loaded.

    Args:
        name: of the table, uint8 [256, times], among the scheme's `unpacking_tables`.
        codes: uint8 [..., n].
        times: how many bytes replace each byte.

    Returns:
        uint8 [..., times * n].
    """
    return _load_time_op(name, codes, (*codes.shape[:-1], times * codes.shape[-1]), torch.uint8)


def widen_scales(scales: Tensor) -> Tensor:
    """Emit the conversion of constant float16 scales to float32 when the graph is loaded."""
    return _load_time_op("FloatScales", scales, tuple(scales.shape), torch.float32)


def pack_at_load(codes: Tensor, bits: int) -> Tensor:
    """Emit the packing of codes into bytes: uint8 [..., n] -> uint8 [..., n * bits / 8], the first lowest.

    It is a matrix multiplication of constants with 1, 2^bits, ..., so that it is computed when the graph is
    loaded.
    """
    shifts = 2 ** torch.arange(0, 8, bits, dtype=torch.uint8).unsqueeze(1)
    parts = codes.unflatten(-1, (-1, len(shifts)))
    sums: Tensor = torch.onnx.ops.symbolic(
        "MatMulInteger", [parts, shifts], dtype=torch.int32, shape=(*parts.shape[:-1], 1), version=10
    )
    return sums.to(torch.uint8).squeeze(-1)


def bitwise_or(first: Tensor, second: Tensor) -> Tensor:
    """Emit the bitwise or of two uint8 tensors of one shape."""
    out: Tensor = torch.onnx.ops.symbolic(
        "BitwiseOr", [first, second], dtype=torch.uint8, shape=tuple(first.shape), version=18
    )
    return out


def transpose_at_load(columns: Tensor) -> Tensor:
    """Emit the transposition of a constant int8 [K, N] to [N, K] when the graph is loaded."""
    return _load_time_op("Transposed", columns, (columns.shape[1], columns.shape[0]), torch.int8)


def _load_time_op(name: str, value: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Emit a placeholder that export/simplify_graph.py replaces by standard operators.

    Constants that the graph's optimizers could compute would be stored in their larger form; an
    unknown operator is not changed.
    """
    out: Tensor = torch.onnx.ops.symbolic(
        f"{LOAD_TIME_DOMAIN}::{name}", [value], dtype=dtype, shape=shape, version=1
    )
    return out


def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    heads: int,
    scale: float,
    bias: Tensor | None = None,
) -> Tensor:
    """Emit com.microsoft::MultiHeadAttention without a cache.

    Args:
        query: float32 [B, S, H * d].
        key: float32 [B, T, H * d], or [B, H, T, d] as a cache holds it.
        value: as key.
        mask: int32 [B, T], 1 for tokens, or None.
        heads: H.
        scale: factor of the products of queries and keys.
        bias: float32 [1, H, S, T], added to the scaled products (T5's position bias), or None.

    Returns:
        float32 [B, S, H * d].
    """
    inputs: list[Tensor | None] = [query, key, value, None, mask, bias]
    while inputs[-1] is None:
        inputs.pop()
    out: Tensor = torch.onnx.ops.symbolic(
        "com.microsoft::MultiHeadAttention",
        inputs,
        {"num_heads": heads, "scale": scale},
        dtype=query.dtype,
        shape=tuple(query.shape),
        version=1,
    )
    return out


def cached_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past: tuple[Tensor, Tensor],
    heads: int,
    scale: float,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Emit com.microsoft::MultiHeadAttention that appends one step's key and value to a cache.

    Args:
        query: float32 [B, 1, H * d].
        key: as query.
        value: as query.
        past: float32 [B, H, P, d] twice, P >= 0: the keys and values of the previous steps.
        heads: H.
        scale: factor of the products of queries and keys.
        bias: float32 [1, H, 1, P + 1], added to the scaled products, or None.

    Returns:
        The output [B, 1, H * d], and the caches of keys and values [B, H, P + 1, d].
    """
    batch, _, length, width = past[0].shape
    present = (batch, heads, length + 1, width)
    out, keys, values = torch.onnx.ops.symbolic_multi_out(
        "com.microsoft::MultiHeadAttention",
        [query, key, value, None, None, bias, *past],
        {"num_heads": heads, "scale": scale},
        dtypes=(query.dtype, query.dtype, query.dtype),
        shapes=(tuple(query.shape), present, present),
        version=1,
    )
    return out, keys, values


class AttentionHeads(NamedTuple):
    """H query heads, K key-value heads of width d, and the factor of the products of queries and keys."""

    query_heads: int
    kv_heads: int
    head_dim: int
    scale: float


# the placeholders of the weights (export/simplify_graph.py): unsigned, with zero points; signed, by
# the axis that is divided into blocks
BLOCKWISE_OP = "DequantizedBlocks"
SIGNED_BLOCK_OPS = {"SignedColumns": 0, "SignedRows": 1}


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
    name: str, codes: Tensor, scales: Tensor, size: int, shape: tuple[int, int]
) -> Tensor:
    out: Tensor = torch.onnx.ops.symbolic(
        f"{LOAD_TIME_DOMAIN}::{name}",
        [codes, scales],
        {"block_size": size},
        dtype=torch.float32,
        shape=shape,
        version=1,
    )
    return out


# Placeholders of constants, by the axis that the scales belong to.
DEQUANTIZE_OPS = {"DequantizedRows": 0, "DequantizedColumns": 1}


class ActivationGrid(NamedTuple):
    """Constants that quantize activations: scale, float32 scalar, and zero point, uint8 or int8 scalar."""

    scale: Tensor
    zero_point: Tensor


def integer_linear(
    x: Tensor, activations: ActivationGrid, weights: WeightGrid, bias: Tensor | None
) -> Tensor:
    """Emit QuantizeLinear to uint8 and com.microsoft::MatMulIntegerToFloat.

    ONNX Runtime multiplies uint8 by int8 fast, int8 by int8 ten times slower.

    Args:
        x: float32 [..., K].
        activations: uint8.
        weights: of columns.
        bias: float32 [N] or None.

    Returns:
        float32 [..., N].
    """
    (scale, zero), (codes, scales, zeros) = activations, weights
    inputs = [_quantize(x, activations), codes, scale, scales, zero, zeros, bias]
    while inputs[-1] is None:
        inputs.pop()
    out: Tensor = torch.onnx.ops.symbolic(
        "com.microsoft::MatMulIntegerToFloat",
        inputs,
        dtype=torch.float32,
        shape=(*x.shape[:-1], codes.shape[1]),
        version=1,
    )
    return out


def qdq_linear(x: Tensor, activations: ActivationGrid, weights: WeightGrid, bias: Tensor | None) -> Tensor:
    """Emit MatMul between QuantizeLinear and DequantizeLinear, all int8.

    A bias is added after it and stays float: TensorRT does not quantize it.
    """
    columns = _dequantize_placeholder("DequantizedColumns", weights)
    out = torch.matmul(quantize_dequantize(x, activations), columns)
    return out if bias is None else out + bias


def quantize_dequantize(x: Tensor, activations: ActivationGrid) -> Tensor:
    """Emit QuantizeLinear and DequantizeLinear, of any shape.

    ONNX Runtime turns a convolution between two such pairs into a QLinearConv, and removes a ReLU before a
    quantization whose zero point is the lowest code.
    """
    out: Tensor = torch.onnx.ops.symbolic(
        "DequantizeLinear",
        [_quantize(x, activations), *activations],
        dtype=torch.float32,
        shape=tuple(x.shape),
    )
    return out


def dequantize_rows(weights: WeightGrid) -> Tensor:
    """Emit the dequantized values of constant rows [N, K], or of kernels [N, ...]: float32."""
    return _dequantize_placeholder("DequantizedRows", weights)


def _quantize(x: Tensor, activations: ActivationGrid) -> Tensor:
    out: Tensor = torch.onnx.ops.symbolic(
        "QuantizeLinear", [x, *activations], dtype=activations.zero_point.dtype, shape=tuple(x.shape)
    )
    return out


def _dequantize_placeholder(name: str, weights: WeightGrid) -> Tensor:
    """Emit a placeholder that becomes a DequantizeLinear: optimizers would store the floats."""
    codes, scales, zeros = weights
    out: Tensor = torch.onnx.ops.symbolic(
        f"{LOAD_TIME_DOMAIN}::{name}",
        [codes, scales] if zeros is None else [codes, scales, zeros],
        dtype=torch.float32,
        shape=tuple(codes.shape),
        version=1,
    )
    return out
