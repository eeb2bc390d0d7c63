"""ONNX's own operators for attention, positions, norms and caches (opset 23 and 24), in a traced graph.

ONNX Runtime on CUDA and TensorRT have kernels for them. Source: https://onnx.ai/onnx/operators. TensorRT
supports attention with one output only, and caches that are written in place from its version 10.15 on
(NVIDIA's TensorRT documentation, "Fused Attention" and "KV Cache").

Shapes: B = batch, S = queries, T = keys, L = keys of this call, P = past length, C = length of a fixed cache,
H = query heads, K = key-value heads, d = width of a head, M = positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smelt.quantization.emit import AttentionHeads
from smelt.quantization.scheme import FUSED_OPSET
from smelt.runtimes.fixed_caches import CACHE_OPSET


def standard_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    past: tuple[Tensor, Tensor] | None,
    heads: AttentionHeads,
) -> tuple[Tensor, ...]:
    """Emit ONNX's Attention-23, which appends keys and values to the past if there is one.

    On CUDA, ONNX Runtime requires the queries' axis of the bias in full.

    Args:
        query: float32 [B, S, H * d], or [B, H, S, d].
        key: float32 [B, L, K * d], or [B, K, L, d]; as many axes as the query.
        value: as key.
        bias: float32 [B or 1, H or 1, S, T], added to the scaled products, or None.
        past: float32 [B, K, P, d] twice, or None; T = P + L.
        heads: their numbers.

    Returns:
        The output in the shape of the query, and with a past keys and values [B, K, T, d].
    """
    inputs: list[Tensor | None] = [query, key, value, bias, *(past or ())]
    while inputs[-1] is None:
        inputs.pop()
    shapes = [tuple(query.shape)]
    if past is not None:
        batch, kv_heads, length, width = past[0].shape
        shapes += [(batch, kv_heads, length + key.shape[1 if key.dim() == 3 else 2], width)] * 2
    numbers = {"q_num_heads": heads.query_heads, "kv_num_heads": heads.kv_heads}
    outputs = torch.onnx.ops.symbolic_multi_out(
        "Attention",
        inputs,
        {"scale": heads.scale, **(numbers if query.dim() == 3 else {})},
        dtypes=[query.dtype] * len(shapes),
        shapes=shapes,
        version=FUSED_OPSET,
    )
    return tuple(outputs)


def mask_bias(mask: Tensor, masked: float, dtype: torch.dtype) -> Tensor:
    """Emit a Gather that turns int64 0 and 1 [B, T] into `masked` and 0, float32 [B, T]."""
    out: Tensor = torch.onnx.ops.symbolic(
        "Gather",
        [torch.tensor([masked, 0.0], dtype=dtype), mask],
        {"axis": 0},
        dtype=dtype,
        shape=tuple(mask.shape),
        version=13,
    )
    return out


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, heads: int) -> Tensor:
    """Emit ONNX's RotaryEmbedding-23, halves rotated with each other.

    Args:
        x: float32 [B, S, H * d].
        cos: float32 [M, r / 2], of all positions; the first r of d channels are rotated.
        sin: as cos.
        positions: int64 [B, S].
        heads: H.
    """
    rotated = 2 * cos.shape[1]
    out: Tensor = torch.onnx.ops.symbolic(
        "RotaryEmbedding",
        [x, cos, sin, positions],
        {"num_heads": heads, **({} if rotated == x.shape[2] // heads else {"rotary_embedding_dim": rotated})},
        dtype=x.dtype,
        shape=tuple(x.shape),
        version=FUSED_OPSET,
    )
    return out


def tensor_scatter(cache: Tensor, new: Tensor, write_indices: Tensor) -> Tensor:
    """Emit ONNX's TensorScatter-24: keys or values of new tokens in a cache, whose memory a runtime reuses.

    Args:
        cache: float32 [B, K, C, d].
        new: float32 [B, K, S, d].
        write_indices: int64 [B], the position of each row's first new token.
    """
    out: Tensor = torch.onnx.ops.symbolic(
        "TensorScatter",
        [cache, new, write_indices],
        {"axis": 2},
        dtype=cache.dtype,
        shape=tuple(cache.shape),
        version=CACHE_OPSET,
    )
    return out


def rms_normalization(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Emit ONNX's RMSNormalization-23 over the last axis; it computes in float32 in every dtype."""
    out: Tensor = torch.onnx.ops.symbolic(
        "RMSNormalization",
        [x, weight],
        {"axis": -1, "epsilon": epsilon},
        dtype=x.dtype,
        shape=tuple(x.shape),
        version=FUSED_OPSET,
    )
    return out
