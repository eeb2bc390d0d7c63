"""A loaded model seen through its family: its blocks, attentions and feed-forward parts, each once.

Nothing here imports torch: a model is asked for its submodules by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from smelt.families.family import Attention, Config, Family, FeedForward, Stack
from smelt.families.registry import family_of

# The attribute of a block that says which of its parts are gone.
SKIPPED = "smelt_skipped"


@dataclass(frozen=True)
class Block:
    """One block of a model.

    number: its place in the stack. place: its dotted name. window: how many tokens it sees (see
    `Family.window`), None for all. aliases: the names of the later blocks that are this very module.
    """

    stack: Stack
    number: int
    place: str
    module: Any
    window: int | None = None
    aliases: tuple[str, ...] = ()

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """Its attentions, but for those that were skipped, with the names that they have in the model."""
        gone = skipped_parts(self.module)
        all_of_them = enumerate(self.stack.attentions)
        return tuple(attention.under(self.place) for part, attention in all_of_them if part not in gone)

    @property
    def feed_forward(self) -> FeedForward | None:
        """Its feed-forward part, with the names that it has in the model; None where it was skipped."""
        if len(self.stack.attentions) in skipped_parts(self.module):
            return None
        return self.stack.feed_forward.under(self.place)

    @property
    def parts(self) -> tuple[Attention | FeedForward, ...]:
        """What it has of attentions and feed-forward part, in order."""
        feed = self.feed_forward
        return self.attentions if feed is None else (*self.attentions, feed)


def skipped_parts(block: Any) -> frozenset[int]:
    """Return which parts of a block are gone: attentions are counted in order, then the feed-forward part."""
    found: frozenset[int] = getattr(block, SKIPPED, frozenset())
    return found


def blocks_of(model: Any) -> list[Block]:
    """Return the blocks of `model`, stack by stack, one that stands in several places once.

    A model of an unknown family has none.
    """
    family = family_of(model)
    if family is None:
        return []
    config = model.config.to_dict()
    return [block for stack in family.stacks(config) for block in _blocks(model, family, stack, config)]


def is_word_table(family: Family, config: Config, name: str) -> bool:
    """Say whether a tensor is called as a word embedding of the family is, outside of all blocks.

    Inside of them `shared` is what products share beside their differences (runtime/layers/shared.py).
    """
    inside = tuple(f"{stack.place}." for stack in family.stacks(config))
    return name.endswith(family.embedding) and not name.startswith(inside)


def attentions_of(model: Any) -> list[Attention]:
    """Return the attentions of `model` in order, with the names that they have in it."""
    return [attention for block in blocks_of(model) for attention in block.attentions]


def head_of(model: Any) -> tuple[str, ...]:
    """Return the modules between the last hidden states of `model` and its outputs; none without a head.

    See `Family.head`. A model of an unknown family has none that are known.
    """
    family = family_of(model)
    there = {name for name, _ in model.named_modules()}
    return family.head if family is not None and there.issuperset(family.head) else ()


@dataclass(frozen=True)
class State:
    """Hidden states that can be read while a model computes, by a forward hook on a module.

    stack: the name of the stack. number: 0 for what its first block is given, the embeddings; n for what its
    n-th block gives. module: the block's name. A block that stands in several places computes several of
    them, one a call, under its first name.
    """

    stack: str
    number: int
    module: str

    def of(self, given: tuple[Any, ...], result: Any) -> Any:
        """Return the states, float [B, S, D], from what the hook is shown: positional inputs and output."""
        value = result if self.number else given
        return value[0] if isinstance(value, tuple) else value


def states_of(model: Any) -> list[State]:
    """Return where the hidden states of `model` can be read, stack by stack, in order.

    They are what transformers gives as `hidden_states`, but for the last, which it puts through the stack's
    closing norm (`Stream.closing`). A model of an unknown family has none.
    """
    found: list[State] = []
    for block in blocks_of(model):
        if block.number == 0:
            found.append(State(block.stack.name, 0, block.place))
        numbers = [block.number, *(int(alias.rpartition(".")[2]) for alias in block.aliases)]
        found += [State(block.stack.name, number + 1, block.place) for number in numbers]
    order = {stack: place for place, stack in enumerate(dict.fromkeys(state.stack for state in found))}
    return sorted(found, key=lambda state: (order[state.stack], state.number))


def stays_float(model: Any) -> list[str]:
    """Return the parameters of `model` that no scheme codes, each by its first name, in order.

    They are all but the matrices of the blocks' products and of the head, and the word embeddings: norms,
    biases of layers, tables of positions and token types, biases by distance.
    """
    family = family_of(model)
    if family is None:
        return [name for name, _ in model.named_parameters()]
    blocks = blocks_of(model)
    products = [name for block in blocks for part in block.parts for name in part.products]
    words = {table for block in blocks for table in block.stack.stream.tables[:1]}
    tables = tuple(f"{name.removesuffix('weight')}" for name in words)  # and what was put in their place
    coded = tuple(f"{name}." for name in (*products, *head_of(model)))
    return [
        name
        for name, parameter in model.named_parameters()
        if not (name in words or name.endswith(family.embedding))
        and not (name.startswith(tables) and parameter.dim() == 2)
        and not (name.startswith(coded) and parameter.dim() == 2)
    ]


def _blocks(model: Any, family: Family, stack: Stack, config: Config) -> Iterator[Block]:
    modules = list(model.get_submodule(stack.place))
    for number, module in enumerate(modules):
        if any(earlier is module for earlier in modules[:number]):
            continue
        later = [at for at in range(number + 1, len(modules)) if modules[at] is module]
        yield Block(
            stack,
            number,
            f"{stack.place}.{number}",
            module,
            family.window(config, number),
            tuple(f"{stack.place}.{at}" for at in later),
        )
