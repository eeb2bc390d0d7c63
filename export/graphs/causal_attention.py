"""Attention and norms of decoder-only models as the exported graph computes them.

Inside an export the forward of attention modules is replaced. For ONNX Runtime on the CPU what follows
the packed product of queries, keys and values is one GroupQueryAttention, which also rotates positions
in and appends to the cache; elsewhere, and for heads that the operator does not take, standard operators.
Head counts come from the modules: after pruning they differ between layers.

Shapes: B = batch, S = tokens fed, P = past length, T = P + S, H = query heads, K = key-value heads,
d = width of a head, M = positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from smelt.core.messages import Message, warning
from smelt.export.graphs.attention import MASKED, split_heads
from smelt.export.graphs.attention_modules import AttentionModule, pack_projections
from smelt.export.graphs.norms import graph_norms
from smelt.runtime.layers import emit
from smelt.runtime.layers.emit_causal import Heads, Places, group_query_attention
from smelt.runtime.layers.fused_heads import fits_group_query_attention

Cache = tuple[Tensor, Tensor]


@dataclass
class CausalScope:
    """What the modules of one graph share while it is traced.

    positions: int64 [B, S]. past: per layer [B, K, P, d] twice. places: for the fused operator. bias:
    float32 [B, 1, S, T], for standard operators, with what lies in the future masked too. behind: int64
    [S, T], how far behind a query a key lies. present: the caches that are left, per layer.
    """

    positions: Tensor
    past: list[Cache]
    places: Places
    bias: Tensor
    behind: Tensor
    present: dict[int, Cache] = field(default_factory=dict)


def unfused(attentions: Sequence[AttentionModule], target: str) -> Message | None:
    """Return a warning of heads that the fused attention of `target` does not take, or None."""
    if target != "ort-cpu":
        return None
    widths = {
        one.heads.width
        for one in attentions
        if not fits_group_query_attention(one.heads.width, one.parts.rotary)
    }
    if not widths:
        return None
    return warning(
        "attention-not-fused",
        f"Head sizes {' and '.join(map(str, sorted(widths)))} are not supported by ONNX Runtime's"
        " GroupQueryAttention (multiples of 8, or of 16 with rotary embeddings): attention is exported as"
        " standard operators, which are slower.",
    )


def scope_of(mask: Tensor, positions: Tensor, past: list[Cache]) -> CausalScope:
    """Return the scope for int64 mask [B, T] and positions [B, S]."""
    batch, length = positions.shape
    total = mask.shape[1]
    kind = past[0][0].dtype
    hidden = ((1 - mask) * int(MASKED)).to(kind)[:, None, None, :]
    last = torch.ones_like(mask).sum(dim=1).to(torch.int32) - 1
    places = Places(last, last.amax(dim=0) + 1, hidden.expand(batch, 1, length, total))
    keys = torch.arange(total, device=mask.device)
    queries = torch.arange(length, device=mask.device) + past[0][0].shape[2]
    future = (keys[None, :] > queries[:, None]).to(kind) * MASKED
    bias = _bounded(hidden + future)
    return CausalScope(positions, past, places, bias, queries[:, None] - keys[None, :])


def _bounded(bias: Tensor) -> Tensor:
    """Keep what is masked for several reasons far from what fp16 cannot hold."""
    return torch.maximum(bias, bias.new_full((), 2 * MASKED))


class Tables(nn.Module):
    """Cosines and sines of all positions, float32 [M, d / 2] twice: exact, also where positions are fp16."""

    def __init__(self, rotary: Any, limit: int) -> None:
        super().__init__()
        places = torch.arange(limit)[None]
        cos, sin = rotary(torch.zeros(1, dtype=torch.float32), position_ids=places)
        half = cos.shape[-1] // 2
        self.cos = nn.Buffer(cos[0, :, :half].contiguous())
        self.sin = nn.Buffer(sin[0, :, :half].contiguous())


def prepare_attention(model: Any, attentions: Sequence[AttentionModule]) -> None:
    """Give each attention its packed product, and the body its table of positions, before the tracing."""
    body = model.base_model
    if any(one.parts.rotary for one in attentions) and not hasattr(body, "tables"):
        body.tables = Tables(body.rotary_emb, int(model.config.max_position_embeddings))
    pack_projections(attentions)


@contextmanager
def causal_forwards(model: Any, attentions: Sequence[AttentionModule], scope: CausalScope) -> Iterator[None]:
    """Let attention, norms and activations of `model` compute as the graph should, within the block."""
    body = model.base_model
    changed: list[tuple[nn.Module, Callable[..., Any]]] = []
    rotary = (body.tables.cos, body.tables.sin) if hasattr(body, "tables") else None
    for one in attentions:
        changed.append((one.module, partial(_attend, one, scope, rotary)))
    if rotary is not None:
        changed.append((body.rotary_emb, lambda *unused, **also_unused: (scope.positions, scope.positions)))
    for module, forward in changed:
        module.forward = forward
    try:
        with graph_norms(model, attentions[0].family.rms_norm):
            yield
    finally:
        for module, _ in changed:
            del module.forward


def _attend(
    one: AttentionModule, scope: CausalScope, rotary: Cache | None, hidden_states: Tensor,
    *unused: Any, **more: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Stand in for the forward of an attention module; masks and caches come from `scope`."""
    heads, place = one.heads, one.module.layer_idx
    past = scope.past[place]
    if emit.export_target() == "ort-cpu" and fits_group_query_attention(heads.width, rotary is not None):
        packed = _product(one, hidden_states)
        out, *present = group_query_attention(packed, past, scope.places, heads, rotary, one.window)
    else:
        query, key, value = _normed(one, one.split(hidden_states))
        out, *present = _standard(
            query, key, value, past, _bias(one, scope), heads=heads, rotary=rotary, positions=scope.positions
        )
    scope.present[place] = (present[0], present[1])
    return one.part(one.parts.out)(out), None


def _product(one: AttentionModule, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return queries, keys and values as one tensor where one product makes them, else as three."""
    if one.parts.norms is None:
        if one.parts.packed:
            return one.part(one.parts.query)(x), None, None
        if one.module.pack.is_whole:
            return one.module.pack.whole(x), None, None
    query, key, value = _normed(one, one.split(x))
    return query, key, value


def _normed(one: AttentionModule, three: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Norm queries and keys head by head, in families that do."""
    if one.parts.norms is None:
        return three
    width = one.heads.width
    normed = [
        one.part(name)(x.unflatten(2, (-1, width))).flatten(2)
        for name, x in zip(one.parts.norms, three[:2], strict=True)
    ]
    return (*normed, three[2])


def _bias(one: AttentionModule, scope: CausalScope) -> Tensor:
    """Return what is added to the scores, with what lies before the window masked too."""
    if one.window is None:
        return scope.bias
    return _bounded(scope.bias + (scope.behind >= one.window).to(scope.bias.dtype) * MASKED)


def _standard(
    query: Tensor, key: Tensor, value: Tensor, past: Cache, bias: Tensor,
    *, heads: Heads, rotary: Cache | None, positions: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v = split_heads(query, heads.queries), split_heads(key, heads.keys), split_heads(value, heads.keys)
    if rotary is not None:
        cos, sin = (table[positions][:, None] for table in rotary)
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
    keys, values = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
    q = q * heads.scale
    if heads.queries == heads.keys:
        out = torch.softmax(q @ keys.transpose(2, 3) + bias, dim=-1) @ values
    else:
        # [B, K, H / K, S, d]: each key is met by all queries that share it, without being repeated
        q = q.unflatten(1, (heads.keys, heads.queries // heads.keys))
        scores = q @ keys.transpose(2, 3)[:, :, None] + bias[:, :, None]
        out = (torch.softmax(scores, dim=-1) @ values[:, :, None]).flatten(1, 2)
    return out.transpose(1, 2).flatten(2), keys, values


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [B, H, S, d] by the angles whose cosines and sines are [B, 1, S, d / 2] (arXiv:2104.09864)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
