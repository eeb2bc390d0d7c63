"""The parts of a loaded model by its family: blocks, attentions and feed-forward parts, each once.

Nothing here imports torch: submodules are looked up by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from smelt.families.family import Attention, Config, Family, FeedForward, Stack
from smelt.families.registry import family_of

# The attribute of a block with its removed parts.
SKIPPED_PARTS_ATTRIBUTE = "smelt_skipped"


@dataclass(frozen=True)
class Block:
    """One block of a model.

    index: its position in the stack. module_path: its dotted name. window: its attention window (see
    `Family.window`), None for all. aliases: the names of later blocks that are the same module.
    """

    stack: Stack
    index: int
    module_path: str
    module: Any
    window: int | None = None
    aliases: tuple[str, ...] = ()

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """Its attentions, without removed ones, with their full names in the model."""
        gone = skipped_parts(self.module)
        all_of_them = enumerate(self.stack.attentions)
        return tuple(
            attention.with_prefix(self.module_path) for part, attention in all_of_them if part not in gone
        )

    @property
    def feed_forward(self) -> FeedForward | None:
        """Its feed-forward part, with its full names in the model; None if it was removed."""
        if len(self.stack.attentions) in skipped_parts(self.module):
            return None
        return self.stack.feed_forward.with_prefix(self.module_path)

    @property
    def parts(self) -> tuple[Attention | FeedForward, ...]:
        """Its attentions and feed-forward part, in order, without removed ones."""
        feed = self.feed_forward
        return self.attentions if feed is None else (*self.attentions, feed)


def skipped_parts(block: Any) -> frozenset[int]:
    """Return the removed parts of a block: attentions are numbered in order, then the feed-forward part."""
    found: frozenset[int] = getattr(block, SKIPPED_PARTS_ATTRIBUTE, frozenset())
    return found


def blocks_of(model: Any) -> list[Block]:
    """Return the blocks of `model`, stack by stack; a repeated block counts once.

    A model of an unsupported family has none.
    """
    family = family_of(model)
    if family is None:
        return []
    config = model.config.to_dict()
    return [block for stack in family.stacks(config) for block in _stack_blocks(model, family, stack, config)]


def is_token_embedding(family: Family, config: Config, name: str) -> bool:
    """Return whether a tensor has the name of the family's token embedding, outside of all blocks.

    Inside of them `shared` is the matrix shared by linear layers (runtime/layers/shared_linear.py).
    """
    inside = tuple(f"{stack.module_path}." for stack in family.stacks(config))
    return name.endswith(family.embedding_suffixes) and not name.startswith(inside)


def model_attentions(model: Any) -> list[Attention]:
    """Return the attentions of `model` in order, with their full names."""
    return [attention for block in blocks_of(model) for attention in block.attentions]


def output_modules(model: Any) -> tuple[str, ...]:
    """Return the modules between the last hidden states and the outputs of `model`; none without a head.

    See `Family.head_modules`. A model of an unsupported family has none.
    """
    family = family_of(model)
    there = {name for name, _ in model.named_modules()}
    return family.head_modules if family is not None and there.issuperset(family.head_modules) else ()


@dataclass(frozen=True)
class HiddenStateLocation:
    """Hidden states that a forward hook on a module can capture.

    stack: the name of the stack. index: 0 for the input of its first block, the embeddings; n for the output
    of its n-th block. module_path: the block's name. A repeated block computes several of them, one per
    call, under its first name.
    """

    stack: str
    index: int
    module_path: str

    def extract(self, given: tuple[Any, ...], result: Any) -> Any:
        """Return the states, float [B, S, D], from the hook's arguments: positional inputs and output."""
        value = result if self.index else given
        return value[0] if isinstance(value, tuple) else value


def hidden_state_locations(model: Any) -> list[HiddenStateLocation]:
    """Return the locations of the hidden states of `model`, stack by stack, in order.

    They are the `hidden_states` of transformers, except for the last, to which it applies the stack's
    final norm (`ResidualStream.final_norm`). A model of an unsupported family has none.
    """
    found: list[HiddenStateLocation] = []
    for block in blocks_of(model):
        if block.index == 0:
            found.append(HiddenStateLocation(block.stack.name, 0, block.module_path))
        numbers = [block.index, *(int(alias.rpartition(".")[2]) for alias in block.aliases)]
        found += [HiddenStateLocation(block.stack.name, number + 1, block.module_path) for number in numbers]
    order = {stack: place for place, stack in enumerate(dict.fromkeys(state.stack for state in found))}
    return sorted(found, key=lambda state: (order[state.stack], state.index))


def unquantized_parameters(model: Any) -> list[str]:
    """Return the parameters of `model` that no scheme quantizes, each by its first name, in order.

    They are all but the matrices of the blocks' linear layers, of the output layer and the token embeddings:
    norms, biases of layers, tables of positions and token types, relative position biases.
    """
    family = family_of(model)
    if family is None:
        return [name for name, _ in model.named_parameters()]
    blocks = blocks_of(model)
    products = [name for block in blocks for part in block.parts for name in part.linear_layers]
    words = {table for block in blocks for table in block.stack.stream.embeddings[:1]}
    tables = tuple(f"{name.removesuffix('weight')}" for name in words)  # and their replacements
    coded = tuple(f"{name}." for name in (*products, *output_modules(model)))
    return [
        name
        for name, parameter in model.named_parameters()
        if not (name in words or name.endswith(family.embedding_suffixes))
        and not (name.startswith(tables) and parameter.dim() == 2)
        and not (name.startswith(coded) and parameter.dim() == 2)
    ]


def _stack_blocks(model: Any, family: Family, stack: Stack, config: Config) -> Iterator[Block]:
    modules = list(model.get_submodule(stack.module_path))
    for number, module in enumerate(modules):
        if any(earlier is module for earlier in modules[:number]):
            continue
        later = [at for at in range(number + 1, len(modules)) if modules[at] is module]
        yield Block(
            stack,
            number,
            f"{stack.module_path}.{number}",
            module,
            family.window(config, number),
            tuple(f"{stack.module_path}.{at}" for at in later),
        )
