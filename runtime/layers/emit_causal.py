"""Fused attention of decoder-only models in ONNX Runtime (domain com.microsoft).

Source: ONNX Runtime's docs/ContribOperators.md, GroupQueryAttention.
Shapes: B = batch, S = tokens fed, P = past length, T = P + S, H = query heads, K = key-value heads,
d = width of a head, M = positions in the rotary table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Heads:
    """H, K, d, and what the products of queries and keys are multiplied with."""

    queries: int
    keys: int
    width: int
    scale: float


@dataclass(frozen=True)
class Places:
    """Where the tokens stand, the same for all layers of a graph.

    last: int32 [B], T - 1. total: int32 scalar, T. bias: float32 [B, 1, S, T], 0 where a token is and a
    large negative number where padding on the left is.
    """

    last: Tensor
    total: Tensor
    bias: Tensor


def group_query_attention(
    packed: tuple[Tensor, Tensor | None, Tensor | None],
    past: tuple[Tensor, Tensor],
    places: Places,
    heads: Heads,
    rotary: tuple[Tensor, Tensor] | None,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Emit com.microsoft::GroupQueryAttention: causal attention over the past and the tokens fed.

    The operator takes S > 1 with P > 0 only for B = 1. It is given no position ids, for with P = 0 it
    takes no notice of them (1.31, tried): each row then counts from its first place, padding included,
    which comes to the same, since rotary attention depends on distances alone.

    Args:
        packed: queries float32 [B, S, H * d], keys and values [B, S, K * d]; or all in one, [B, S,
            (H + 2 K) * d], and None twice.
        past: keys (rotated) and values of before, float32 [B, K, P, d].
        places: see `Places`.
        heads: see `Heads`.
        rotary: cosines and sines, float32 [M, d / 2]; None: positions are not rotated in.
        window: how many of the last tokens, itself included, a token sees; None for all.

    Returns:
        The output [B, S, H * d], and keys and values [B, K, T, d].
    """
    batch, length = packed[0].shape[:2]
    total = places.bias.shape[3]
    inputs = [*packed, *past, places.last, places.total]
    inputs += [*rotary, None] if rotary is not None else [None, None, None]
    present = (batch, heads.keys, total, heads.width)
    kind = packed[0].dtype
    out, keys, values = torch.onnx.ops.symbolic_multi_out(
        "com.microsoft::GroupQueryAttention",
        [*inputs, places.bias],
        {
            "num_heads": heads.queries,
            "kv_num_heads": heads.keys,
            "scale": heads.scale,
            "do_rotary": int(rotary is not None),
            **({} if window is None else {"local_window_size": window}),
        },
        dtypes=(kind, kind, kind),
        shapes=((batch, length, heads.queries * heads.width), present, present),
        version=1,
    )
    return out, keys, values
