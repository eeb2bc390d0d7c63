"""T5's position bias: one table for all blocks of a stack, or a table for each attention.

In a T5 stack the first block has `relative_attention_bias` [buckets, heads]; it computes a bias for
every head and passes it on, so all layers must have the same heads. Pruning of different heads in each layer
first makes every attention independent: self-attention gets a copy of the table, cross-attention (whose bias
is zero) needs none. Source: transformers' modeling_t5.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_OWN_BIAS_ATTRIBUTE = "smelt_own_bias"


def make_independent(attention: Any, heads: int, name: str) -> None:
    """Make a T5Attention with `heads` heads compute its own bias; its table is not initialized.

    Args:
        attention: the module, changed in place; works on the meta device.
        heads: its number of heads.
        name: of the module. Self-attention has a table, cross-attention adds zeros.

    Raises:
        TypeError: it is not a T5Attention.
    """
    if not hasattr(attention, "relative_attention_num_buckets"):
        raise TypeError("it is not a T5Attention")
    _make_independent(attention, heads, name.endswith("SelfAttention"))


def _make_independent(attention: Any, heads: int, table: bool) -> None:
    attention.n_heads = heads
    attention.has_relative_attention_bias = table
    if table:
        weight = attention.q.weight if isinstance(attention.q, nn.Linear) else next(attention.parameters())
        attention.relative_attention_bias = nn.Embedding(
            attention.relative_attention_num_buckets, heads, device=weight.device, dtype=torch.float32
        )
    if not _is_independent(attention):
        setattr(attention, _OWN_BIAS_ATTRIBUTE, True)
        attention.register_forward_pre_hook(_drop_shared_bias, with_kwargs=True)


def _is_independent(attention: Any) -> bool:
    return bool(getattr(attention, _OWN_BIAS_ATTRIBUTE, False))


def make_all_independent(model: Any, edits: list[dict[str, Any]]) -> None:
    """Give every attention of a T5 `model` its own bias, once; append the edits."""
    for stack_name in ("encoder", "decoder"):
        blocks = model.get_submodule(stack_name).block
        bias_attention = next(m for m in blocks.modules() if getattr(m, "has_relative_attention_bias", False))
        shared = bias_attention.relative_attention_bias.weight.detach()
        for name, attention in blocks.named_modules(prefix=f"{stack_name}.block"):
            if not hasattr(attention, "has_relative_attention_bias") or _is_independent(attention):
                continue
            table = name.endswith("SelfAttention")
            _make_independent(attention, attention.n_heads, table)
            if table:
                attention.relative_attention_bias.weight = nn.Parameter(shared.clone())
            edits.append(_own_bias_edit(name, attention.n_heads))


def prune_bias_heads(model: Any, edits: list[dict[str, Any]], name: str, kept_heads: Tensor) -> None:
    """Keep the heads `kept_heads` (int64, rising) of the own bias of the attention `name`."""
    attention = model.get_submodule(name)
    old = attention.relative_attention_bias.weight.detach() if attention.has_relative_attention_bias else None
    _make_independent(attention, len(kept_heads), old is not None)
    if old is not None:
        attention.relative_attention_bias.weight = nn.Parameter(
            old.index_select(1, kept_heads.to(old.device)).clone()
        )
    edits.append(_own_bias_edit(name, len(kept_heads)))


def parameters_per_head(attention: Any, name: str) -> int:
    """Return the number of bias values per head of the attention `name` with its own bias."""
    return int(attention.relative_attention_num_buckets) if name.endswith("SelfAttention") else 0


def count_bias_parameters(model: Any) -> int:
    """Return the number of values in the tables of a T5 `model`, each once."""
    tables = {p for n, p in model.named_parameters() if n.endswith("relative_attention_bias.weight")}
    return sum(table.numel() for table in tables)


def move_table(old: Any, new: Any) -> None:
    """Move the table of the block `old` to `new`, which becomes the first of its stack."""
    source, target = old.layer[0].SelfAttention, new.layer[0].SelfAttention
    if source is not target and not _is_independent(target):
        target.relative_attention_bias = source.relative_attention_bias
        target.has_relative_attention_bias = True


def bias_by_distance(attention: Any) -> tuple[Tensor, int] | None:
    """Return the bias of each distance, float32 [H, 2 f + 1], and f; None if it has no table.

    All distances beyond f, `relative_attention_max_distance`, share a bucket.
    """
    if not attention.has_relative_attention_bias:
        return None
    max_distance = int(attention.relative_attention_max_distance)
    buckets = attention._relative_position_bucket(
        torch.arange(-max_distance, max_distance + 1),
        bidirectional=not attention.is_decoder,
        num_buckets=attention.relative_attention_num_buckets,
        max_distance=max_distance,
    )
    return attention.relative_attention_bias.weight.detach()[buckets].t().contiguous(), max_distance


def _own_bias_edit(name: str, heads: int) -> dict[str, Any]:
    return {"op": "own_bias", "module": name, "heads": heads}


def _drop_shared_bias(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {**kwargs, "position_bias": None}
