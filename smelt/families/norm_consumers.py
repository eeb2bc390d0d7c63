"""The linear layers that use the output of a norm, for moving scales from the norm into them.

Used by methods that fold a scale into a norm and its inverse into its consumers (SmoothQuant, AWQ), or that
need the scale of a linear layer's inputs. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from smelt.families.family import Attention, Stack
from smelt.families.model_blocks import output_modules, skipped_parts
from smelt.families.registry import family_of


@dataclass(frozen=True)
class NormConsumers:
    """A norm and its consumers.

    norm: its dotted name. consumers: the linear layers that use its output, directly or times a number. only:
    nothing else uses it, neither the next sum of a post-norm block nor a caller. is_foldable: dividing the
    output of the norm by a number for each channel, and multiplying the columns of the consumers by it, does
    not change the outputs of the model: there are consumers and no other uses, and their weights are not
    shared (a token embedding that is the output layer, a layer that blocks share).
    """

    norm: str
    consumers: tuple[str, ...]
    is_exclusive: bool
    is_foldable: bool


def norm_consumers(model: Any) -> list[NormConsumers]:
    """Return every norm of `model` once, in order of computation.

    A model of an unsupported family has none. Norms of a head's queries and keys have no consumers: their
    outputs are used by the scores.
    """
    family = family_of(model)
    if family is None:
        return []
    found = _NormCollector(model)
    stacks = family.stacks(model.config.to_dict())
    crossed = [
        product
        for stack in stacks
        for block in _block_paths(model, stack)
        for part, attention in enumerate(stack.attentions)
        if attention.cross and part not in skipped_parts(model.get_submodule(block))
        for product in _join_paths(block, (attention.key, attention.value))
    ]
    head = list(output_modules(model))
    for number, stack in enumerate(stacks):
        last = number == len(stacks) - 1
        _collect_stack(found, stack, head[:1] if last else crossed)
    for norm, reader in pairwise(head):
        if has_norm_at(found.model, norm):
            found.add(norm, [reader], only=True)
    return found.results()


def _collect_stack(found: _NormCollector, stack: Stack, end: list[str]) -> None:
    """Follow the hidden states of one stack; `end` uses its output, empty if that is unknown."""
    stream, source = stack.stream, stack.stream.embedding_norm
    if source:
        found.add(source, [], only=False)
    for block in _block_paths(found.model, stack):
        reads = [*map(_state_layers, stack.attentions), stack.feed_forward.input_layers]
        gone = skipped_parts(found.model.get_submodule(block))
        for part, (name, products) in enumerate(zip(stream.part_norms, reads, strict=True)):
            norm, readers = f"{block}.{name}", [] if part in gone else _join_paths(block, products)
            if stream.pre_norm and has_norm_at(found.model, norm):
                found.add(norm, readers, only=True)
            elif source:  # the part uses the hidden states directly, and so does the sum after it
                found.add(source, readers, only=False)
            if part < len(stack.attentions) and part not in gone:
                found.add_qk_norms(block, stack.attentions[part])
            source = None if stream.pre_norm else norm  # of a sum, in pre-norm models
    if stream.final_norm or source:
        found.add(stream.final_norm or str(source), end, only=bool(end))


def has_norm_at(model: Any, name: str) -> bool:
    """Return whether `model` has a norm at `name`; a removed norm has no weight."""
    module = model.get_submodule(name)
    return getattr(module, "weight", None) is not None and module.weight.dim() == 1


class _NormCollector:
    """Collects norms, each module once."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.met: dict[Any, tuple[str, dict[str, None], bool]] = {}

    def add(self, norm: str, readers: list[str], only: bool) -> None:
        module = self.model.get_submodule(norm)
        name, before, alone = self.met.get(module, (norm, {}, True))
        self.met[module] = (name, before | dict.fromkeys(readers), alone and only)

    def add_qk_norms(self, block: str, attention: Attention) -> None:
        for norm in attention.qk_norms or ():
            self.add(f"{block}.{norm}", [], only=False)

    def results(self) -> list[NormConsumers]:
        owners: dict[int, set[Any]] = {}
        for module in self.model.modules():
            for parameter in module.parameters(recurse=False):
                owners.setdefault(id(parameter), set()).add(module)
        by_norm = {norm: self._submodules(list(readers)) for norm, (_, readers, _) in self.met.items()}
        result = []
        for norm, (name, readers, only) in self.met.items():
            others = {leaf for other, leaves in by_norm.items() if other is not norm for leaf in leaves}
            inside = by_norm[norm]
            apart = all(
                owners[id(p)] <= inside - others for leaf in inside for p in leaf.parameters(recurse=False)
            )
            result.append(NormConsumers(name, tuple(readers), only, only and bool(readers) and apart))
        return result

    def _submodules(self, names: list[str]) -> set[Any]:
        return {leaf for name in names for leaf in self.model.get_submodule(name).modules()}


def _state_layers(attention: Attention) -> tuple[str, ...]:
    """Return the linear layers of an attention that use the states of their own stack."""
    if attention.cross:
        return (attention.query,)
    return tuple(dict.fromkeys((attention.query, attention.key, attention.value)))


def _block_paths(model: Any, stack: Stack) -> Iterator[str]:
    return (f"{stack.module_path}.{number}" for number in range(len(model.get_submodule(stack.module_path))))


def _join_paths(block: str, names: tuple[str, ...]) -> list[str]:
    return [f"{block}.{name}" for name in names]
