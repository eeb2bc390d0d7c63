"""Which products read what a norm gives, so that scales can go from the one into the others.

Methods that fold a scale into a norm and its inverse into what reads it (SmoothQuant, AWQ), or that ask what
the inputs of a product were divided by, ask here. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from smelt.families.family import Attention, Stack
from smelt.families.registry import family_of
from smelt.families.walk import head_of, skipped_parts


@dataclass(frozen=True)
class NormFeed:
    """A norm and what reads it.

    norm: its dotted name. readers: the products that read what it gives, as it is or times a number. only:
    nothing else does; not the next sum of a post-norm block, not a caller. foldable: dividing what it gives
    by a number for each channel, and multiplying the columns of the readers by it, changes no output of the
    model: there are readers and nothing else, and their weights are those of no other layer (a word
    embedding that is the output layer, a layer that blocks share).
    """

    norm: str
    readers: tuple[str, ...]
    only: bool
    foldable: bool


def norm_feeds(model: Any) -> list[NormFeed]:
    """Return every norm of `model` once, in the order in which they compute.

    A model of an unknown family has none. Norms of a head's queries and keys have no readers: scores are made
    of what they give.
    """
    family = family_of(model)
    if family is None:
        return []
    found = _Found(model)
    stacks = family.stacks(model.config.to_dict())
    crossed = [
        product
        for stack in stacks
        for block in _places(model, stack)
        for part, attention in enumerate(stack.attentions)
        if attention.cross and part not in skipped_parts(model.get_submodule(block))
        for product in _below(block, (attention.key, attention.value))
    ]
    head = list(head_of(model))
    for number, stack in enumerate(stacks):
        last = number == len(stacks) - 1
        _walk(found, stack, head[:1] if last else crossed)
    for norm, reader in pairwise(head):
        if is_norm(found.model, norm):
            found.add(norm, [reader], only=True)
    return found.feeds()


def _walk(found: _Found, stack: Stack, end: list[str]) -> None:
    """Follow the hidden states of one stack; `end` reads what it gives, nobody known where that is empty."""
    stream, source = stack.stream, stack.stream.opening
    if source:
        found.add(source, [], only=False)
    for block in _places(found.model, stack):
        reads = [*map(_reads, stack.attentions), stack.feed_forward.inputs]
        gone = skipped_parts(found.model.get_submodule(block))
        for part, (name, products) in enumerate(zip(stream.norms, reads, strict=True)):
            norm, readers = f"{block}.{name}", [] if part in gone else _below(block, products)
            if stream.norms_first and is_norm(found.model, norm):
                found.add(norm, readers, only=True)
            elif source:  # the part reads the hidden states as they are, and so does the sum after it
                found.add(source, readers, only=False)
            if part < len(stack.attentions) and part not in gone:
                found.of_heads(block, stack.attentions[part])
            source = None if stream.norms_first else norm  # of a sum, where norms come first
    if stream.closing or source:
        found.add(stream.closing or str(source), end, only=bool(end))


def is_norm(model: Any, name: str) -> bool:
    """Say whether a norm stands at the place `name` of `model`; a place that is left out has no weight."""
    module = model.get_submodule(name)
    return getattr(module, "weight", None) is not None and module.weight.dim() == 1


class _Found:
    """The norms that were met, each module once."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.met: dict[Any, tuple[str, dict[str, None], bool]] = {}

    def add(self, norm: str, readers: list[str], only: bool) -> None:
        module = self.model.get_submodule(norm)
        name, before, alone = self.met.get(module, (norm, {}, True))
        self.met[module] = (name, before | dict.fromkeys(readers), alone and only)

    def of_heads(self, block: str, attention: Attention) -> None:
        for norm in attention.norms or ():
            self.add(f"{block}.{norm}", [], only=False)

    def feeds(self) -> list[NormFeed]:
        owners: dict[int, set[Any]] = {}
        for module in self.model.modules():
            for parameter in module.parameters(recurse=False):
                owners.setdefault(id(parameter), set()).add(module)
        by_norm = {norm: self._leaves(list(readers)) for norm, (_, readers, _) in self.met.items()}
        result = []
        for norm, (name, readers, only) in self.met.items():
            others = {leaf for other, leaves in by_norm.items() if other is not norm for leaf in leaves}
            inside = by_norm[norm]
            apart = all(
                owners[id(p)] <= inside - others for leaf in inside for p in leaf.parameters(recurse=False)
            )
            result.append(NormFeed(name, tuple(readers), only, only and bool(readers) and apart))
        return result

    def _leaves(self, names: list[str]) -> set[Any]:
        return {leaf for name in names for leaf in self.model.get_submodule(name).modules()}


def _reads(attention: Attention) -> tuple[str, ...]:
    """Return the products of an attention that read the states of their own stack."""
    if attention.cross:
        return (attention.query,)
    return tuple(dict.fromkeys((attention.query, attention.key, attention.value)))


def _places(model: Any, stack: Stack) -> Iterator[str]:
    return (f"{stack.place}.{number}" for number in range(len(model.get_submodule(stack.place))))


def _below(block: str, names: tuple[str, ...]) -> list[str]:
    return [f"{block}.{name}" for name in names]
