"""T5's attention as the exported graph computes it: not scaled, with a bias per head and distance.

In torch the bias of a distance is found by counting logarithmic buckets. All distances beyond
`relative_attention_max_distance` share a bucket, so that a table over -max to max holds all there is: in
the graph only a subtraction, a Clip and a Gather remain of it.

Shapes: B = batch, S = queries, T = keys, P = past length, H = heads, d = width of a head.
Source: transformers' modeling_t5.py; Raffel et al. 2020, arXiv:1910.10683.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from smelt.export.attention import Scope, attention, step_attention


def tabulate_bias(module: Any) -> None:
    """Give a T5Attention that has a position bias its values by distance, float32 [H, 2 max + 1], once."""
    if not getattr(module, "has_relative_attention_bias", False) or hasattr(module, "bias_by_distance"):
        return
    farthest = module.relative_attention_max_distance
    distances = torch.arange(-farthest, farthest + 1)
    buckets = module._relative_position_bucket(
        distances,
        bidirectional=not module.is_decoder,
        num_buckets=module.relative_attention_num_buckets,
        max_distance=farthest,
    )
    values = module.relative_attention_bias.weight.detach()[buckets].t().contiguous()
    module.bias_by_distance = nn.Buffer(values, persistent=False)


def attend_relative(
    module: Any, scope: Scope, hidden_states: Tensor,
    *unused: Any, key_value_states: Tensor | None = None, position_bias: Tensor | None = None,
    **also_unused: Any,
) -> tuple[Tensor, Tensor | None, None]:  # fmt: skip
    """Stand in for T5Attention.forward; masks and caches come from `scope`."""
    heads, place = module.n_heads, module.layer_idx
    if key_value_states is not None:
        assert scope.cross is not None
        keys, values = scope.cross[place]
        out = attention(module.q(hidden_states), keys, values, scope.mask, heads, 1.0)
        return module.o(out), None, None
    query, key, value = module.pack(hidden_states)
    past = None if scope.past is None else scope.past[place]
    length = query.shape[1]
    total = length if past is None else past[0].shape[2] + length
    if position_bias is None:
        position_bias = _bias(module, length, total)
    if past is None:
        out = attention(query, key, value, scope.mask, heads, 1.0, position_bias)
    else:
        out, *present = step_attention(query, key, value, past, heads, 1.0, position_bias)
        scope.present[place] = (present[0], present[1])
    return module.o(out), position_bias, None


def _bias(module: Any, length: int, total: int) -> Tensor:
    """Return the bias [1, H, S, T] of the last `length` of `total` positions."""
    farthest = module.relative_attention_max_distance
    keys = torch.arange(total)
    distances = keys[None, :] - keys[total - length :, None]
    places = distances.clamp(-farthest, farthest) + farthest
    values: Tensor = module.bias_by_distance.index_select(1, places.flatten())
    return values.reshape(1, module.n_heads, length, total)
