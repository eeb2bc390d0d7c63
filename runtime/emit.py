"""What a module becomes when it is exported: the operators that the target runs fastest.

A contextvar says which target is being exported to; outside an export it is None and modules compute
in torch. `torch.onnx.ops.symbolic` puts a named ONNX operator into the exported graph; shapes may hold
symbolic sizes. Sources: ONNX Runtime's docs/ContribOperators.md (domain com.microsoft).

Shapes: B = batch, S = queries, T = keys, H = heads, d = width of a head, K = inputs, N = outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import torch
from torch import Tensor

Target = Literal["ort-cpu", "ort-cuda", "tensorrt"]
_target: ContextVar[Target | None] = ContextVar("smelt_export_target", default=None)


def export_target() -> Target | None:
    """Return the target that is being exported to, or None when torch itself computes."""
    return _target.get()


@contextmanager
def exporting_to(target: Target) -> Iterator[None]:
    """Make modules emit operators for `target` within the block."""
    token = _target.set(target)
    try:
        yield
    finally:
        _target.reset(token)


def dynamic_quantize_matmul(x: Tensor, columns: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Emit com.microsoft::DynamicQuantizeMatMul.

    It quantizes `x` as DynamicQuantizeLinear does, multiplies integers, scales back and adds the bias.

    Args:
        x: float32 [..., K].
        columns: int8 [K, N], a constant; its zero point is 0.
        scales: float32 [N].
        bias: float32 [N] or None.

    Returns:
        float32 [..., N].
    """
    inputs: list[Tensor | None] = [x, columns, scales, None, bias]
    out: Tensor = torch.onnx.ops.symbolic(
        "com.microsoft::DynamicQuantizeMatMul",
        inputs if bias is not None else inputs[:3],
        dtype=torch.float32,
        shape=(*x.shape[:-1], columns.shape[1]),
        version=1,
    )
    return out


def multi_head_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, heads: int, scale: float
) -> Tensor:
    """Emit com.microsoft::MultiHeadAttention without a cache.

    Args:
        query: float32 [B, S, H * d].
        key: float32 [B, T, H * d], or [B, H, T, d] as a cache holds it.
        value: as key.
        mask: int32 [B, T], 1 where a token is, or None.
        heads: H.
        scale: what the products of queries and keys are multiplied with.

    Returns:
        float32 [B, S, H * d].
    """
    out: Tensor = torch.onnx.ops.symbolic(
        "com.microsoft::MultiHeadAttention",
        [query, key, value] if mask is None else [query, key, value, None, mask],
        {"num_heads": heads, "scale": scale},
        dtype=query.dtype,
        shape=tuple(query.shape),
        version=1,
    )
    return out


def cached_attention(
    query: Tensor, key: Tensor, value: Tensor, past: tuple[Tensor, Tensor], heads: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Emit com.microsoft::MultiHeadAttention that appends one step's key and value to a cache.

    Args:
        query: float32 [B, 1, H * d].
        key: as query.
        value: as query.
        past: float32 [B, H, P, d] twice, P >= 0: the keys and values of the steps before.
        heads: H.
        scale: what the products of queries and keys are multiplied with.

    Returns:
        The output [B, 1, H * d], and the caches of keys and values [B, H, P + 1, d].
    """
    batch, _, length, width = past[0].shape
    present = (batch, heads, length + 1, width)
    out, keys, values = torch.onnx.ops.symbolic_multi_out(
        "com.microsoft::MultiHeadAttention",
        [query, key, value, None, None, None, *past],
        {"num_heads": heads, "scale": scale},
        dtypes=(query.dtype, query.dtype, query.dtype),
        shapes=(tuple(query.shape), present, present),
        version=1,
    )
    return out, keys, values
