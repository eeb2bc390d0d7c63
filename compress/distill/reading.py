"""What a model computes on its way, read while it computes: hidden states, attention scores, products.

Shapes: B = batch, S = tokens, H = heads, Q = queries, K = keys, D = width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from smelt.families.family import Attention
from smelt.families.walk import Block, State, blocks_of, states_of

_NAME = "smelt_scores"  # of the attention whose scores are read
_READS = "_smelt_reads"  # the attribute of a module that is told of its scores
_HIDDEN = -1e2  # a mask of this or less hides a key, as in TinyBERT's task_distill.py

Place = tuple[str, int]  # a stack and a number: of a state, or of a block from 1


@dataclass(frozen=True)
class Scores:
    """Of one attention. scores: float [B, H, Q, K]. seen: bool [B or 1, 1, Q, K], which keys a query sees."""

    scores: Tensor
    seen: Tensor


@dataclass
class Read:
    """What the last forward computed, as far as it was asked for.

    states: float [B, S, D], as transformers gives them. scores: of each block its attentions, in order.
    products: of each block's own attention queries, keys and values, float [B, S, width of all heads].
    calls: how often each block was called, less one. now: the block that computes, or did last.
    """

    states: dict[Place, Tensor] = field(default_factory=dict)
    scores: dict[Place, list[Scores]] = field(default_factory=dict)
    products: dict[Place, dict[str, Tensor]] = field(default_factory=dict)
    calls: dict[int, int] = field(default_factory=dict)
    now: int | None = None

    def clear(self) -> None:
        """Forget it, before the next forward."""
        for kept in (self.states, self.scores, self.products, self.calls):
            kept.clear()


@dataclass(frozen=True)
class Wanted:
    """What is read of a model: states and blocks by stack and number."""

    states: frozenset[Place] = frozenset()
    scores: frozenset[Place] = frozenset()
    products: frozenset[Place] = frozenset()


@contextlib.contextmanager
def reading(model: Any, wanted: Wanted, read: Read) -> Iterator[None]:
    """Let `model` leave what is `wanted` in `read` whenever it computes, meanwhile.

    A block that stands in several places computes several of them, one a call.
    """
    with contextlib.ExitStack() as undo:
        for block in blocks_of(model):
            _count(block, read, undo)
        _read_states(model, wanted, read, undo)
        for block in blocks_of(model):
            numbers = places_of(block)
            if not {(block.stack.name, n) for n in numbers}.isdisjoint(wanted.products):
                _read_products(model, block, wanted, read, undo)
            if not {(block.stack.name, n) for n in numbers}.isdisjoint(wanted.scores):
                _read_scores(model, block, wanted, read, undo)
        if wanted.scores:
            before = model.config._attn_implementation
            model.set_attn_implementation(_NAME)
            undo.callback(model.set_attn_implementation, before)
        try:
            yield
        finally:
            read.clear()


def places_of(block: Block) -> list[int]:
    """Return where a block stands in its stack, counted from 1, in the order in which it is called."""
    return [block.number + 1, *(int(alias.rpartition(".")[2]) + 1 for alias in block.aliases)]


def _count(block: Block, read: Read, undo: contextlib.ExitStack) -> None:
    """Count the calls of a block, which say for which of its places it computes."""
    key = id(block.module)

    def begin(*_: Any) -> None:
        read.calls[key] = read.calls.get(key, -1) + 1
        read.now = key

    undo.callback(block.module.register_forward_pre_hook(begin).remove)


def _place(block: Block, read: Read) -> Place:
    return block.stack.name, places_of(block)[read.calls[id(block.module)]]


def _read_states(model: Any, wanted: Wanted, read: Read, undo: contextlib.ExitStack) -> None:
    last: dict[str, int] = {}
    for state in states_of(model):
        last[state.stack] = state.number
    blocks = {block.place: block for block in blocks_of(model)}
    for state in {(s.stack, s.module, s.number == 0): s for s in states_of(model)}.values():
        block, first = blocks[state.module], state.number == 0

        def keep(_: Any, given: Any, result: Any, state: State, block: Block, first: bool) -> None:
            place = (block.stack.name, 0) if first else _place(block, read)
            if place in wanted.states and place not in read.states:
                read.states[place] = state.of(given, result)

        hook = partial(keep, state=state, block=block, first=first)
        undo.callback(block.module.register_forward_hook(hook).remove)
    for stack in {block.stack.name: block.stack for block in blocks.values()}.values():
        if stack.stream.closing is None:
            continue

        def close(_: Any, given: Any, result: Any, place: Place) -> None:
            if place in wanted.states:
                read.states[place] = result

        hook = partial(close, place=(stack.name, last[stack.name]))
        undo.callback(model.get_submodule(stack.stream.closing).register_forward_hook(hook).remove)


def _read_products(model: Any, block: Block, wanted: Wanted, read: Read, undo: contextlib.ExitStack) -> None:
    own = next(attention for attention in block.attentions if not attention.cross)
    names = {"query": own.query, "key": own.key, "value": own.value}
    for name in dict.fromkeys(names.values()):

        def keep(_: Any, given: Any, result: Tensor, name: str) -> None:
            if read.now != id(block.module):  # blocks may share a product, which computes for one of them
                return
            place = _place(block, read)
            if place not in wanted.products:
                return
            parts = _parts(model, own, result) if own.packed else None
            found = read.products.setdefault(place, {})
            for word, product in names.items():
                if product == name:
                    found[word] = result if parts is None else parts[word]

        undo.callback(model.get_submodule(name).register_forward_hook(partial(keep, name=name)).remove)


def _parts(model: Any, own: Attention, packed: Tensor) -> dict[str, Tensor]:
    """Cut what one product gives into queries, keys and values."""
    words = ("query", "key", "value")
    if own.packed == "equal":
        return dict(zip(words, packed.chunk(3, dim=-1), strict=True))
    module = model.get_submodule(own.name)
    keys = getattr(module, own.key_heads or "") * getattr(module, own.width)
    queries = packed.shape[-1] - 2 * keys
    return dict(zip(words, packed.split([queries, keys, keys], dim=-1), strict=True))


def _read_scores(model: Any, block: Block, wanted: Wanted, read: Read, undo: contextlib.ExitStack) -> None:
    for attention in block.attentions:
        module = model.get_submodule(attention.name)

        def keep(scores: Tensor, seen: Tensor) -> None:
            place = _place(block, read)
            if place in wanted.scores:
                read.scores.setdefault(place, []).append(Scores(scores, seen))

        setattr(module, _READS, keep)
        undo.callback(partial(delattr, module, _READS))


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Compute attention as transformers' eager functions do, and tell of the scores before their softmax.

    Args:
        module: the attention.
        query: float [B, H, Q, width of a head].
        key: float [B, heads that may be shared, K, width of a head].
        value: as `key`.
        attention_mask: float [B, 1, Q, K], added; None where everything is seen.
        scaling: of the scores.
        dropout: of the weights.
        position_bias: float [1, H, Q, K], added (T5).

    Returns:
        float [B, Q, H, width of a head], and the weights [B, H, Q, K].
    """
    shared = query.shape[1] // key.shape[1]
    if shared > 1:
        key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if position_bias is not None:
        scores = scores + position_bias
    reads = getattr(module, _READS, None)
    if reads is not None:
        everything = torch.ones(1, 1, *scores.shape[2:], dtype=torch.bool, device=scores.device)
        reads(scores, everything if attention_mask is None else attention_mask > _HIDDEN)
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


AttentionInterface.register(_NAME, attend)
AttentionMaskInterface.register(_NAME, eager_mask)
