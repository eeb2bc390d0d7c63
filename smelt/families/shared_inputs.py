"""The linear layers that share an input, and the linear layer that computes it, if nothing else uses it.

A scale for each channel can be moved from the columns of the consumers into the rows of the producer, without
cost at run time; AWQ uses this. Norms are in norm_consumers.py. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from smelt.families.family import Attention, FeedForward
from smelt.families.model_blocks import Block, blocks_of

# functions f with f(x / s) = f(x) / s for every s above 0
_SCALE_INVARIANT = ("relu",)


@dataclass(frozen=True)
class SharedInput:
    """Linear layers with one input, and the producer of that input.

    consumers: dotted names. producer: the linear layer that computes the input; None if it is something else.
    start: the first row of the producer that belongs to it; the rows end at `stop`, or the last. repeats:
    how often each head of it is used (queries that share a value); width: of a head.
    """

    consumers: tuple[str, ...]
    producer: str | None = None
    start: int = 0
    stop: int | None = None
    repeats: int = 1
    head_dim: int = 1


def shared_inputs(model: Any) -> list[SharedInput]:
    """Return the inputs of all linear layers in the blocks of `model`, each layer in one of them, in order.

    The encoder's output is one input, of the cross-attentions of all blocks.
    """
    config, blocks = model.config.to_dict(), blocks_of(model)
    crossed = [n for b in blocks for a in b.attentions if a.cross for n in (a.key, a.value)]
    found = [feed for block in blocks for feed in _block_inputs(model, block, config)]
    return ([SharedInput(tuple(dict.fromkeys(crossed)))] if crossed else []) + found


def _block_inputs(model: Any, block: Block, config: dict[str, Any]) -> Iterator[SharedInput]:
    for attention in block.attentions:
        own = (attention.query, attention.key, attention.value)[: 1 if attention.cross else 3]
        yield SharedInput(tuple(dict.fromkeys(own)))
        yield _attention_output_input(model, attention)
    if block.feed_forward is not None:  # the part may be removed
        yield SharedInput(block.feed_forward.input_layers)
        yield _feed_forward_output_input(model, block.feed_forward, config)


def _attention_output_input(model: Any, attention: Attention) -> SharedInput:
    """Return the input of an attention's output layer: values, mixed over tokens but not over channels."""
    wide = int(model.get_submodule(attention.out).in_features)
    rows = int(model.get_submodule(attention.value).out_features)
    values = (rows - wide) // 2 if attention.packed else rows  # the packed ones: queries, keys, values
    if values <= 0 or wide % values:
        return SharedInput((attention.out,))
    repeats = wide // values
    width = (
        int(getattr(model.get_submodule(attention.name), attention.head_dim_attribute))
        if repeats > 1
        else values
    )
    return SharedInput((attention.out,), attention.value, rows - values, None, repeats, width)


def _feed_forward_output_input(model: Any, part: FeedForward, config: dict[str, Any]) -> SharedInput:
    """Return the input of the last linear layer of a feed-forward part, if gated or after ReLU."""
    if part.gate is None:
        through = config.get(part.activation_key) in _SCALE_INVARIANT
        return SharedInput((part.down,), part.up if through else None)
    plain, first = (
        (part.gate, part.gate_first) if part.activated_layer == "up" else (part.up, not part.gate_first)
    )
    if part.gate != part.up:
        return SharedInput((part.down,), plain)
    half = int(model.get_submodule(part.up).out_features) // 2
    return SharedInput((part.down,), part.up, *((0, half) if first else (half, None)))
