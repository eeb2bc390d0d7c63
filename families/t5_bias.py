"""T5's position bias: one table for all blocks of a stack, or a table of each attention's own.

In a T5 stack the first block owns `relative_attention_bias` [buckets, heads]; it computes a bias for
every head and hands it on, so that all layers must have the same heads. Pruning that may take other heads
in each layer first gives every attention what it needs for itself: self-attention a copy of the table,
cross-attention (whose bias is zero) only its independence. Source: transformers' modeling_t5.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_MARK = "smelt_own_bias"


def own(attention: Any, heads: int, name: str) -> None:
    """Let a T5Attention with `heads` heads compute its own bias; the table's values are left open.

    Args:
        attention: the module, changed in place; works on the meta device.
        heads: how many heads it has.
        name: of the module. Self-attention has a table, cross-attention adds zeros.

    Raises:
        TypeError: it is no T5Attention.
    """
    if not hasattr(attention, "relative_attention_num_buckets"):
        raise TypeError("it is not a T5Attention")
    _own(attention, heads, name.endswith("SelfAttention"))


def _own(attention: Any, heads: int, table: bool) -> None:
    attention.n_heads = heads
    attention.has_relative_attention_bias = table
    if table:
        weight = attention.q.weight if isinstance(attention.q, nn.Linear) else next(attention.parameters())
        attention.relative_attention_bias = nn.Embedding(
            attention.relative_attention_num_buckets, heads, device=weight.device, dtype=torch.float32
        )
    if not _has_own(attention):
        setattr(attention, _MARK, True)
        attention.register_forward_pre_hook(_without_the_shared_one, with_kwargs=True)


def _has_own(attention: Any) -> bool:
    return bool(getattr(attention, _MARK, False))


def own_all(model: Any, edits: list[dict[str, Any]]) -> None:
    """Give every attention of a T5 `model` its own bias, once; append the edits that say so."""
    for side in ("encoder", "decoder"):
        blocks = model.get_submodule(side).block
        owner = next(m for m in blocks.modules() if getattr(m, "has_relative_attention_bias", False))
        shared = owner.relative_attention_bias.weight.detach()
        for name, attention in blocks.named_modules(prefix=f"{side}.block"):
            if not hasattr(attention, "has_relative_attention_bias") or _has_own(attention):
                continue
            table = name.endswith("SelfAttention")
            _own(attention, attention.n_heads, table)
            if table:
                attention.relative_attention_bias.weight = nn.Parameter(shared.clone())
            edits.append(_edit(name, attention.n_heads))


def prune(model: Any, edits: list[dict[str, Any]], name: str, stay: Tensor) -> None:
    """Keep the heads `stay` (int64, rising) of the bias that the attention `name` owns."""
    attention = model.get_submodule(name)
    old = attention.relative_attention_bias.weight.detach() if attention.has_relative_attention_bias else None
    _own(attention, len(stay), old is not None)
    if old is not None:
        attention.relative_attention_bias.weight = nn.Parameter(old.index_select(1, stay).clone())
    edits.append(_edit(name, len(stay)))


def values_of_a_head(attention: Any, name: str) -> int:
    """Return how many values a head of the attention called `name` has once it owns its bias."""
    return int(attention.relative_attention_num_buckets) if name.endswith("SelfAttention") else 0


def values_now(model: Any) -> int:
    """Return how many values the tables of a T5 `model` have now, each once."""
    tables = {p for n, p in model.named_parameters() if n.endswith("relative_attention_bias.weight")}
    return sum(table.numel() for table in tables)


def hand_on(old: Any, new: Any) -> None:
    """Hand the table of the block `old` to the block `new`, which becomes the first of its stack."""
    source, target = old.layer[0].SelfAttention, new.layer[0].SelfAttention
    if source is not target and not _has_own(target):
        target.relative_attention_bias = source.relative_attention_bias
        target.has_relative_attention_bias = True


def by_distance(attention: Any) -> tuple[Tensor, int] | None:
    """Return the bias of each distance, float32 [H, 2 f + 1], and f; None where it has no table.

    All distances beyond f, `relative_attention_max_distance`, share a bucket.
    """
    if not attention.has_relative_attention_bias:
        return None
    farthest = int(attention.relative_attention_max_distance)
    buckets = attention._relative_position_bucket(
        torch.arange(-farthest, farthest + 1),
        bidirectional=not attention.is_decoder,
        num_buckets=attention.relative_attention_num_buckets,
        max_distance=farthest,
    )
    return attention.relative_attention_bias.weight.detach()[buckets].t().contiguous(), farthest


def _edit(name: str, heads: int) -> dict[str, Any]:
    return {"op": "own_bias", "module": name, "heads": heads}


def _without_the_shared_one(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {**kwargs, "position_bias": None}
