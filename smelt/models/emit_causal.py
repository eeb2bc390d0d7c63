"""Fused attention of decoder-only models in ONNX Runtime (domain com.microsoft).

Source: ONNX Runtime's docs/ContribOperators.md, GroupQueryAttention.
Shapes: B = batch, S = input tokens, P = past length, T = P + S, H = query heads, K = key-value heads,
d = width of a head, M = positions in the rotary table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionHeads:
    """H, K, d, and the factor of the products of queries and keys."""

    query_heads: int
    kv_heads: int
    head_dim: int
    scale: float


@dataclass(frozen=True)
class SequencePositions:
    """Positions of the tokens, the same for all layers of a graph.

    last_position: int32 [B], T - 1. total_length: int32 scalar, T. bias: float32 [B, 1, S, T], 0 for tokens
    and a large negative number for padding on the left.
    """

    last_position: Tensor
    total_length: Tensor
    bias: Tensor


def group_query_attention(
    packed: tuple[Tensor, Tensor | None, Tensor | None],
    past: tuple[Tensor, Tensor],
    positions: SequencePositions,
    heads: AttentionHeads,
    rotary: tuple[Tensor, Tensor] | None,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Emit com.microsoft::GroupQueryAttention: causal attention over the past and the input tokens.

    The operator takes S > 1 with P > 0 only for B = 1. It gets no position ids, because with P = 0 it
    ignores them (tested with 1.31): each row then counts from its first position, including padding,
    which is equivalent, since rotary attention depends on distances only.

    Args:
        packed: queries float32 [B, S, H * d], keys and values [B, S, K * d]; or all in one, [B, S,
            (H + 2 K) * d], and None twice.
        past: previous keys (rotated) and values, float32 [B, K, P, d].
        positions: see `SequencePositions`.
        heads: see `AttentionHeads`.
        rotary: cosines and sines, float32 [M, d / 2]; None: positions are not rotated in.
        window: how many of the last tokens, including itself, a token attends to; None for all.

    Returns:
        The output [B, S, H * d], and keys and values [B, K, T, d].
    """
    batch, length = packed[0].shape[:2]
    total = positions.bias.shape[3]
    inputs = [*packed, *past, positions.last_position, positions.total_length]
    inputs += [*rotary, None] if rotary is not None else [None, None, None]
    present = (batch, heads.kv_heads, total, heads.head_dim)
    kind = packed[0].dtype
    out, keys, values = torch.onnx.ops.symbolic_multi_out(
        "com.microsoft::GroupQueryAttention",
        [*inputs, positions.bias],
        {
            "num_heads": heads.query_heads,
            "kv_num_heads": heads.kv_heads,
            "scale": heads.scale,
            "do_rotary": int(rotary is not None),
            **({} if window is None else {"local_window_size": window}),
        },
        dtypes=(kind, kind, kind),
        shapes=((batch, length, heads.query_heads * heads.head_dim), present, present),
        version=1,
    )
    return out, keys, values
