"""Which products read the same states, and which product's outputs they are where nothing else reads them.

A scale for each channel can go from the columns of what reads into the rows of what makes, so that nothing is
multiplied while the model runs: AWQ asks here. Norms are in norms.py. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from smelt.families.family import Attention, FeedForward
from smelt.families.walk import Block, blocks_of

# functions f with f(x / s) = f(x) / s for every s above 0
_SCALED_THROUGH = ("relu",)


@dataclass(frozen=True)
class Feed:
    """Products that read one input, and whose outputs that is.

    readers: dotted names. maker: the product that gives what they read; None where it is something else.
    start: the first of the maker's rows that do; they go to its end unless `stop` says otherwise. repeats:
    how often each head of it is read (queries that share a value); width: of a head.
    """

    readers: tuple[str, ...]
    maker: str | None = None
    start: int = 0
    stop: int | None = None
    repeats: int = 1
    width: int = 1


def product_feeds(model: Any) -> list[Feed]:
    """Return the inputs of all products of the blocks of `model`, each product in one of them, in order.

    What the encoder gives is one input, which the cross-attentions of all blocks read.
    """
    config, blocks = model.config.to_dict(), blocks_of(model)
    crossed = [n for b in blocks for a in b.attentions if a.cross for n in (a.key, a.value)]
    found = [feed for block in blocks for feed in _of_block(model, block, config)]
    return ([Feed(tuple(dict.fromkeys(crossed)))] if crossed else []) + found


def _of_block(model: Any, block: Block, config: dict[str, Any]) -> Iterator[Feed]:
    for attention in block.attentions:
        own = (attention.query, attention.key, attention.value)[: 1 if attention.cross else 3]
        yield Feed(tuple(dict.fromkeys(own)))
        yield _of_values(model, attention)
    if block.feed_forward is not None:  # the part may be gone
        yield Feed(block.feed_forward.inputs)
        yield _of_neurons(model, block.feed_forward, config)


def _of_values(model: Any, attention: Attention) -> Feed:
    """Return what the last product of an attention reads: values, mixed over tokens and not over channels."""
    wide = int(model.get_submodule(attention.out).in_features)
    rows = int(model.get_submodule(attention.value).out_features)
    values = (rows - wide) // 2 if attention.packed else rows  # the packed ones: queries, keys, values
    if values <= 0 or wide % values:
        return Feed((attention.out,))
    repeats = wide // values
    width = int(getattr(model.get_submodule(attention.name), attention.width)) if repeats > 1 else values
    return Feed((attention.out,), attention.value, rows - values, None, repeats, width)


def _of_neurons(model: Any, part: FeedForward, config: dict[str, Any]) -> Feed:
    """Return what the last product of a feed-forward part reads: what a gate is multiplied with, or ReLU."""
    if part.gate is None:
        through = config.get(part.activation) in _SCALED_THROUGH
        return Feed((part.down,), part.up if through else None)
    plain, first = (part.gate, part.gate_first) if part.activated == "up" else (part.up, not part.gate_first)
    if part.gate != part.up:
        return Feed((part.down,), plain)
    half = int(model.get_submodule(part.up).out_features) // 2
    return Feed((part.down,), part.up, *((0, half) if first else (half, None)))
