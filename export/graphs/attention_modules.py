"""A model's attention modules, and what stands in for their forward while a graph is traced.

Queries, keys and values of the same input come from one packed product; what follows is in attention.py.
transformers' AttentionInterface takes over only after the three products and their transposes, which is too
late for both. What the parts are called says the model's family. Head counts come from the modules: after
pruning they differ between layers.

A bias by distance (T5's) is found in torch by counting logarithmic buckets. All distances beyond a farthest
one share a bucket, so that a table over them holds all there is: in the graph only a subtraction, a Clip and
a Gather remain of it.

Shapes: B = batch, S = queries, T = keys, P = past length, H = heads, d = width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from smelt.core.errors import InputError
from smelt.export.graphs.attention import MASKED, Pack, Scope, attention, step_attention
from smelt.families.family import Attention, Family
from smelt.families.registry import family_of
from smelt.families.walk import blocks_of
from smelt.runtime.layers.emit_causal import Heads


@dataclass(frozen=True)
class AttentionModule:
    """An attention module of a model.

    parts: the names that its parts have in the model. window: see `Family.window`.
    """

    module: Any
    parts: Attention
    family: Family
    window: int | None = None

    def part(self, name: str) -> Any:
        """Return the product called `name` in the model; None where the module itself does not compute it."""
        inside = f"{self.parts.name}."
        return self.module.get_submodule(name.removeprefix(inside)) if name.startswith(inside) else None

    @property
    def heads(self) -> Heads:
        """The heads that it has now."""
        parts, width = self.parts, int(getattr(self.module, self.parts.width))
        scale = width**-0.5 if parts.scale == "width" else 1.0
        if parts.scale not in (None, "width"):
            scale = float(getattr(self.module, str(parts.scale)))
        if parts.heads is not None:
            queries = keys = int(getattr(self.module, parts.heads))
        else:
            queries, keys = (int(self.part(n).out_features) // width for n in (parts.query, parts.key))
        if parts.packed == "equal" and parts.heads is None:
            queries = keys = keys // 3
        elif parts.packed == "grouped":
            keys = int(getattr(self.module, str(parts.key_heads)))
            queries -= 2 * keys
        return Heads(queries, keys, width, scale)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values of [B, S, D], each [B, S, its heads * d]."""
        if not self.parts.packed:
            three: tuple[Tensor, ...] = self.module.pack(x)
        else:
            heads = self.heads
            sizes = [heads.queries * heads.width, heads.keys * heads.width, heads.keys * heads.width]
            three = torch.split(self.part(self.parts.query)(x), sizes, dim=-1)
        return three


def attention_modules(
    model: Any, stack: str | None = None, cross: bool | None = None
) -> list[AttentionModule]:
    """Return the attention modules of `model` in order.

    Args:
        model: a model of a family that smelt knows.
        stack: only those of this stack (`encoder_layers`, `decoder_layers`).
        cross: only those that look at the encoder, or only those that do not.

    Raises:
        InputError: another family.
    """
    family = family_of(model)
    if family is None:
        raise InputError(
            f"{type(model).__name__}: no attention module that the onnx stage knows how to export.",
            code="unsupported-family",
        )
    return [
        AttentionModule(model.get_submodule(parts.name), parts, family, block.window)
        for block in blocks_of(model)
        if stack in (None, block.stack.name)
        for parts in block.attentions
        if cross in (None, parts.cross)
    ]


def pack_projections(attentions: Sequence[AttentionModule]) -> None:
    """Give attention modules their packed products of queries, keys and values, and their biases, once.

    Those that share their products share the packed one.
    """
    packs: dict[tuple[nn.Module, ...], Pack] = {}
    for one in attentions:
        module, parts = one.module, one.parts
        if parts.relative and one.family.relative_bias and not hasattr(module, "bias_by_distance"):
            found = one.family.relative_bias().by_distance(module)
            if found is not None:
                module.bias_by_distance = nn.Buffer(found[0], persistent=False)
        if not hasattr(module, "pack") and not parts.packed:
            three = tuple(one.part(name) for name in (parts.query, parts.key, parts.value))
            if three not in packs:
                packs[three] = Pack(three)
            module.pack = packs[three]


@contextmanager
def graph_attention(modules: Sequence[AttentionModule], scope: Scope) -> Iterator[None]:
    """Let these attention modules compute as the graph should, within the block."""
    pack_projections(modules)
    for one in modules:
        one.module.forward = partial(_FORWARDS[one.parts.relative], one, scope)
    try:
        yield
    finally:
        for one in modules:
            del one.module.forward


def _attend(
    one: AttentionModule, scope: Scope, hidden_states: Tensor,
    *unused: Any, key_value_states: Tensor | None = None, **also_unused: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Stand in for the forward of an attention module; masks and caches come from `scope`."""
    if key_value_states is not None:
        return _crossed(one, scope, hidden_states), None
    query, key, value = one.split(hidden_states)
    if one.parts.rotary:
        cos, sin = also_unused["position_embeddings"]
        query, key = (_rotated(x, one.heads.width, cos, sin) for x in (query, key))
    bias = None if one.window is None else _outside(one.window, query)
    return _attended(one, scope, (query, key, value), bias), None


def _attend_with_bias(
    one: AttentionModule, scope: Scope, hidden_states: Tensor,
    attention_mask: Tensor | None = None, position_bias: Tensor | None = None, **unused: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Stand in for the forward of an attention module that is given its bias, float32 [B, H, S, T]."""
    return _attended(one, scope, one.split(hidden_states), position_bias), None


def _attend_by_distance(
    one: AttentionModule, scope: Scope, hidden_states: Tensor,
    *unused: Any, key_value_states: Tensor | None = None, position_bias: Tensor | None = None,
    **also_unused: Any,
) -> tuple[Tensor, Tensor | None, None]:  # fmt: skip
    """Stand in for the forward of an attention module that hands on its bias."""
    if key_value_states is not None:
        return _crossed(one, scope, hidden_states), None, None
    packed = one.split(hidden_states)
    if position_bias is None:
        length = hidden_states.shape[1]
        past = 0 if scope.past is None else scope.past[one.module.layer_idx][0].shape[2]
        position_bias = _bias(one.module.bias_by_distance, length, past + length)
    return _attended(one, scope, packed, position_bias), position_bias, None


def _crossed(one: AttentionModule, scope: Scope, hidden_states: Tensor) -> Tensor:
    assert scope.cross is not None
    key, value = scope.cross[one.module.layer_idx]
    query, heads = one.part(one.parts.query)(hidden_states), one.heads
    return _out(one, attention(query, key, value, scope.mask, heads.queries, heads.scale))


def _attended(one: AttentionModule, scope: Scope, packed: tuple[Tensor, ...], bias: Tensor | None) -> Tensor:
    query, key, value = packed
    heads = one.heads
    if scope.past is None:
        return _out(one, attention(query, key, value, scope.mask, heads.queries, heads.scale, bias))
    place = one.module.layer_idx
    found, *present = step_attention(query, key, value, scope.past[place], heads.queries, heads.scale, bias)
    scope.present[place] = (present[0], present[1])
    return _out(one, found)


def _out(one: AttentionModule, found: Tensor) -> Tensor:
    out = one.part(one.parts.out)
    result: Tensor = found if out is None else out(found)
    return result


_FORWARDS: dict[str | None, Callable[..., Any]] = {
    None: _attend,
    "handed_on": _attend_by_distance,
    "given": _attend_with_bias,
}


def _rotated(x: Tensor, width: int, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [B, S, H * d]; cosines and sines are [1, S, d], each twice (arXiv:2104.09864)."""
    heads = x.unflatten(2, (-1, width))
    first, second = heads.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    out: Tensor = (heads * cos[:, :, None] + turned * sin[:, :, None]).flatten(2)
    return out


def _outside(window: int, query: Tensor) -> Tensor:
    """Return a bias [1, 1, S, S] that hides what is further away than `window` tokens on either side."""
    places = torch.arange(query.shape[1])
    far = (places[:, None] - places[None, :]).abs() > window
    return (far.to(query.dtype) * MASKED)[None, None]


def _bias(by_distance: Tensor, length: int, total: int) -> Tensor:
    """Return the bias [1, H, S, T] of the last `length` of `total` positions."""
    heads, farthest = by_distance.shape[0], by_distance.shape[1] // 2
    keys = torch.arange(total)
    distances = keys[None, :] - keys[total - length :, None]
    places = distances.clamp(-farthest, farthest) + farthest
    values: Tensor = by_distance.index_select(1, places.flatten())
    return values.reshape(1, heads, length, total)
