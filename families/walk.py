"""A loaded model seen through its family: its blocks, attentions and feed-forward parts, each once.

Nothing here imports torch: a model is asked for its submodules by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from smelt.families.family import Attention, FeedForward, Stack
from smelt.families.registry import family_of


@dataclass(frozen=True)
class Block:
    """One block of a model.

    number: its place in the stack. place: its dotted name. aliases: the names of the later blocks that are
    this very module.
    """

    stack: Stack
    number: int
    place: str
    module: Any
    aliases: tuple[str, ...] = ()

    def window(self, model: Any) -> int | None:
        """Return how many tokens it sees (see `Family.window`), None for all."""
        family = family_of(model)
        return None if family is None else family.window(model.config.to_dict(), self.number)

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """Its attentions, with the names that they have in the model."""
        return tuple(attention.under(self.place) for attention in self.stack.attentions)

    @property
    def feed_forward(self) -> FeedForward:
        """Its feed-forward part, with the names that it has in the model."""
        return self.stack.feed_forward.under(self.place)


def blocks_of(model: Any) -> list[Block]:
    """Return the blocks of `model`, stack by stack, one that stands in several places once.

    A model of an unknown family has none.
    """
    family = family_of(model)
    return (
        []
        if family is None
        else [b for s in family.stacks(model.config.to_dict()) for b in _blocks(model, s)]
    )


def attentions_of(model: Any) -> list[Attention]:
    """Return the attentions of `model` in order, with the names that they have in it."""
    return [attention for block in blocks_of(model) for attention in block.attentions]


def _blocks(model: Any, stack: Stack) -> Iterator[Block]:
    modules = list(model.get_submodule(stack.place))
    for number, module in enumerate(modules):
        if any(earlier is module for earlier in modules[:number]):
            continue
        later = [at for at in range(number + 1, len(modules)) if modules[at] is module]
        yield Block(
            stack, number, f"{stack.place}.{number}", module, tuple(f"{stack.place}.{at}" for at in later)
        )
