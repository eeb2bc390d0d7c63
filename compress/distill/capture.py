"""Capture hidden states, attention scores and projections of a model during its forward pass.

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

from smelt.models.families.layout import Attention
from smelt.models.families.registry import Block, HiddenStateLocation, blocks_of, hidden_state_locations

_ATTENTION_NAME = "smelt_scores"  # of the attention whose scores are read
_CAPTURE_ATTRIBUTE = "_smelt_reads"  # attribute of an attention module that holds its capture callback
_MASKED_SCORE = -1e2  # a mask of this or less hides a key, as in TinyBERT's task_distill.py

StateKey = tuple[str, int]  # a stack and a number: of a state, or of a block from 1


@dataclass(frozen=True)
class AttentionScores:
    """Of one attention. scores: float [B, H, Q, K]. visible: bool [B or 1, 1, Q, K], visible keys."""

    scores: Tensor
    visible: Tensor


@dataclass
class CapturedTensors:
    """Tensors that the last forward pass computed, as far as they were requested.

    states: float [B, S, D], as transformers gives them. scores: of each block its attentions, in order.
    projections: of each block's own attention queries, keys and values, float [B, S, width of all heads].
    call_counts: how often each block was called, minus one. current_block: the last block that was called.
    """

    states: dict[StateKey, Tensor] = field(default_factory=dict)
    scores: dict[StateKey, list[AttentionScores]] = field(default_factory=dict)
    projections: dict[StateKey, dict[str, Tensor]] = field(default_factory=dict)
    call_counts: dict[int, int] = field(default_factory=dict)
    current_block: int | None = None

    def clear(self) -> None:
        """Clear all tensors before the next forward pass."""
        for store in (self.states, self.scores, self.projections, self.call_counts):
            store.clear()


@dataclass(frozen=True)
class CaptureRequest:
    """Which tensors of a model to capture: states and blocks by stack and number."""

    states: frozenset[StateKey] = frozenset()
    scores: frozenset[StateKey] = frozenset()
    projections: frozenset[StateKey] = frozenset()


@contextlib.contextmanager
def capture_tensors(model: Any, request: CaptureRequest, captured: CapturedTensors) -> Iterator[None]:
    """Capture the tensors of `request` in `captured` at each forward pass of `model` inside the context.

    A block that is used at several positions of its stack is captured once per call.
    """
    with contextlib.ExitStack() as undo:
        for block in blocks_of(model):
            _count_calls(block, captured, undo)
        _capture_states(model, request, captured, undo)
        for block in blocks_of(model):
            positions = block_positions(block)
            if not {(block.stack.name, n) for n in positions}.isdisjoint(request.projections):
                _capture_projections(model, block, request, captured, undo)
            if not {(block.stack.name, n) for n in positions}.isdisjoint(request.scores):
                _capture_scores(model, block, request, captured, undo)
        if request.scores:
            previous_attention = model.config._attn_implementation
            model.set_attn_implementation(_ATTENTION_NAME)
            undo.callback(model.set_attn_implementation, previous_attention)
        try:
            yield
        finally:
            captured.clear()


def block_positions(block: Block) -> list[int]:
    """Return the positions of a block in its stack, counted from 1, in call order."""
    return [index + 1 for index in block.call_indices]


def _count_calls(block: Block, read: CapturedTensors, undo: contextlib.ExitStack) -> None:
    """Count the calls of a block; the count identifies the position that is computed."""
    key = id(block.module)

    def begin(*_: Any) -> None:
        read.call_counts[key] = read.call_counts.get(key, -1) + 1
        read.current_block = key

    undo.callback(block.module.register_forward_pre_hook(begin).remove)


def _current_key(block: Block, read: CapturedTensors) -> StateKey:
    return block.stack.name, block_positions(block)[read.call_counts[id(block.module)]]


def _capture_states(
    model: Any, wanted: CaptureRequest, read: CapturedTensors, undo: contextlib.ExitStack
) -> None:
    last_index: dict[str, int] = {}
    for state in hidden_state_locations(model):
        last_index[state.stack] = state.index
    blocks = {block.module_path: block for block in blocks_of(model)}
    for state in {(s.stack, s.module_path, s.index == 0): s for s in hidden_state_locations(model)}.values():
        block, first = blocks[state.module_path], state.index == 0

        def keep(
            _: Any, inputs: Any, result: Any, state: HiddenStateLocation, block: Block, first: bool
        ) -> None:
            key = (block.stack.name, 0) if first else _current_key(block, read)
            if key in wanted.states and key not in read.states:
                read.states[key] = state.extract(inputs, result)

        hook = partial(keep, state=state, block=block, first=first)
        undo.callback(block.module.register_forward_hook(hook).remove)
    for stack in {block.stack.name: block.stack for block in blocks.values()}.values():
        if stack.stream.final_norm is None:
            continue

        def close(_: Any, inputs: Any, result: Any, state_key: StateKey) -> None:
            if state_key in wanted.states:
                read.states[state_key] = result

        hook = partial(close, state_key=(stack.name, last_index[stack.name]))
        undo.callback(model.get_submodule(stack.stream.final_norm).register_forward_hook(hook).remove)


def _capture_projections(
    model: Any, block: Block, wanted: CaptureRequest, read: CapturedTensors, undo: contextlib.ExitStack
) -> None:
    self_attention = next(attention for attention in block.attentions if not attention.cross)
    names = {"query": self_attention.query, "key": self_attention.key, "value": self_attention.value}
    for name in dict.fromkeys(names.values()):

        def keep(_: Any, inputs: Any, result: Tensor, name: str) -> None:
            if read.current_block != id(
                block.module
            ):  # blocks may share a linear layer, which computes for one of them at a time
                return
            key = _current_key(block, read)
            if key not in wanted.projections:
                return
            parts = _split_packed(model, self_attention, result) if self_attention.packed else None
            projections = read.projections.setdefault(key, {})
            for kind, layer_name in names.items():
                if layer_name == name:  # its second call in a block is of embeddings of distances (DeBERTa)
                    projections.setdefault(kind, result if parts is None else parts[kind])

        undo.callback(model.get_submodule(name).register_forward_hook(partial(keep, name=name)).remove)


def _split_packed(model: Any, attention: Attention, packed: Tensor) -> dict[str, Tensor]:
    """Split the output of a packed linear layer into queries, keys and values."""
    kinds = ("query", "key", "value")
    if attention.packed == "equal":
        return dict(zip(kinds, packed.chunk(3, dim=-1), strict=True))
    module = model.get_submodule(attention.name)
    if attention.packed == "per_head":
        by_head = packed.unflatten(-1, (-1, 3, getattr(module, attention.head_dim_attribute)))
        return dict(zip(kinds, (by_head[..., part, :].flatten(-2) for part in range(3)), strict=True))
    keys = getattr(module, attention.kv_heads_attribute or "") * getattr(module, attention.head_dim_attribute)
    queries = packed.shape[-1] - 2 * keys
    return dict(zip(kinds, packed.split([queries, keys, keys], dim=-1), strict=True))


def _capture_scores(
    model: Any, block: Block, wanted: CaptureRequest, read: CapturedTensors, undo: contextlib.ExitStack
) -> None:
    for attention in block.attentions:
        module = model.get_submodule(attention.name)

        def keep(scores: Tensor, seen: Tensor) -> None:
            key = _current_key(block, read)
            if key in wanted.scores:
                read.scores.setdefault(key, []).append(AttentionScores(scores, seen))

        setattr(module, _CAPTURE_ATTRIBUTE, keep)
        undo.callback(partial(delattr, module, _CAPTURE_ATTRIBUTE))


def capturing_attention(
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
    """Compute attention like transformers' eager functions, and capture the scores before the softmax.

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
    heads_per_kv = query.shape[1] // key.shape[1]
    if heads_per_kv > 1:
        key, value = key.repeat_interleave(heads_per_kv, dim=1), value.repeat_interleave(heads_per_kv, dim=1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if position_bias is not None:
        scores = scores + position_bias
    capture = getattr(module, _CAPTURE_ATTRIBUTE, None)
    if capture is not None:
        full_mask = torch.ones(1, 1, *scores.shape[2:], dtype=torch.bool, device=scores.device)
        capture(scores, full_mask if attention_mask is None else attention_mask > _MASKED_SCORE)
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


AttentionInterface.register(_ATTENTION_NAME, capturing_attention)
AttentionMaskInterface.register(_ATTENTION_NAME, eager_mask)
