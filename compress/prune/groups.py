"""Which tensors share a head or a neuron, as the model's family says (smelt.families)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from smelt.compress.behind_codes import BEHIND_QUANTIZE
from smelt.core.errors import InputError
from smelt.core.text import article
from smelt.families.family import Attention, FeedForward
from smelt.families.registry import FAMILIES, family_of
from smelt.families.walk import blocks_of
from smelt.runtime.layers.low_rank import LowRankLinear
from smelt.runtime.layers.shared import SharedLinear


@dataclass(frozen=True)
class AttentionGroup:
    """One attention: its heads own rows of query, key, value and columns of out.

    also: the modules of later attentions that compute with the same products.
    """

    parts: Attention
    also: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The module that computes it."""
        return self.parts.name

    @property
    def modules(self) -> tuple[str, ...]:
        """All modules whose heads these are."""
        return (self.name, *self.also)

    def count(self, model: nn.Module) -> int:
        """Return the number of units that can go: heads, or keys with all the queries that share them."""
        module: Any = model.get_submodule(self.name)
        if self.parts.heads is None:
            rows = rows_of(model, self.parts.key).out_features // (3 if self.parts.packed else 1)
            return rows // int(getattr(module, self.parts.width))
        return int(getattr(module, self.parts.heads))

    def head_dim(self, model: nn.Module) -> int:
        """Return the columns of `out` that one unit owns."""
        return columns_of(model, self.parts.out).in_features // self.count(model)

    def value_rows(self, model: nn.Module) -> Tensor:
        """Return the weight of the value product, float [units * width, inputs]."""
        weight = whole_weight(model, self.parts.value)
        return weight.chunk(3)[2] if self.parts.packed else weight

    def row_places(self, model: nn.Module, stay: Tensor) -> dict[str, Tensor]:
        """Return by product which rows the units `stay` (int64, rising) own; GPT-2 has one product of all."""
        count, found = self.count(model), {}
        parts = 3 if self.parts.packed else 1
        for name in self.parts.products[:-1]:
            width = rows_of(model, name).out_features // (count * parts)
            places = (stay.unsqueeze(1) * width + torch.arange(width)).flatten()
            found[name] = torch.cat([places + part * count * width for part in range(parts)])
        return found


@dataclass(frozen=True)
class FeedForwardGroup:
    """One feed-forward block: a neuron owns a row of each of its inputs and a column of `down`."""

    parts: FeedForward

    @property
    def name(self) -> str:
        """The module that computes it."""
        return self.parts.name

    def count(self, model: nn.Module) -> int:
        """Return the number of neurons."""
        return columns_of(model, self.parts.down).in_features

    def row_places(self, model: nn.Module, stay: Tensor) -> dict[str, Tensor]:
        """Return by product the rows of the neurons `stay` (int64, rising); two where the gate is in it."""
        count = self.count(model)
        parts = 2 if self.parts.gate == self.parts.up else 1
        return {n: torch.cat([stay + part * count for part in range(parts)]) for n in self.parts.inputs}


def find_groups(model: Any) -> tuple[list[AttentionGroup], list[FeedForwardGroup]]:
    """Return the attentions and feed-forward blocks of a model that can be pruned, in order.

    A block that stands in several places of a stack is there once, and so are products that several blocks
    share; attentions whose heads cannot go are not there.

    Raises:
        InputError: another family.
    """
    if family_of(model) is None:
        raise InputError(
            f"prune: the layers of {article(model.config.model_type)} model are not known."
            f" Known: {', '.join(FAMILIES)}.",
            code="unsupported-family",
        )
    blocks = blocks_of(model)
    attentions: dict[tuple[nn.Module, ...], list[Attention]] = {}
    feeds: dict[tuple[nn.Module, ...], FeedForward] = {}
    for block in blocks:
        for parts in block.attentions:
            if not parts.fixed_heads:
                attentions.setdefault(_modules(model, parts.products), []).append(parts)
        if (feed := block.feed_forward) is not None:
            feeds.setdefault(_modules(model, feed.products), feed)
    groups = [AttentionGroup(first, tuple(a.name for a in also)) for first, *also in attentions.values()]
    return groups, [FeedForwardGroup(parts) for parts in feeds.values()]


def _modules(model: nn.Module, names: tuple[str, ...]) -> tuple[nn.Module, ...]:
    return tuple(model.get_submodule(name) for name in names)


def rows_of(model: nn.Module, name: str) -> nn.Linear:
    """Return the Linear whose rows are the outputs of `name`: itself, or the `up` half of a pair."""
    return _half(model.get_submodule(name), "up", name)


def columns_of(model: nn.Module, name: str) -> nn.Linear:
    """Return the Linear whose columns are the inputs of `name`: itself, or the `down` half of a pair."""
    return _half(model.get_submodule(name), "down", name)


def whole_weight(model: nn.Module, name: str) -> Tensor:
    """Return the matrix that `name` multiplies by, float [outputs, inputs]; of a pair the product."""
    module = model.get_submodule(name)
    if isinstance(module, LowRankLinear):
        return module.up.weight.detach() @ module.down.weight.detach()
    return rows_of(model, name).weight.detach()


def path_of(model: nn.Module, name: str, half: str) -> str:
    """Return the dotted name of the Linear to cut: `name`, or `name.half` of a pair."""
    return f"{name}.{half}" if isinstance(model.get_submodule(name), LowRankLinear) else name


def _half(module: nn.Module, half: str, name: str) -> nn.Linear:
    found = getattr(module, half) if isinstance(module, LowRankLinear) else module
    if isinstance(found, SharedLinear):
        raise InputError(
            f"prune: {name} has a matrix that layers share and a difference of its own: what goes from one"
            " goes from all. Prune before 'share-weights', or share without low_rank_delta.",
            code="shared-weights",
        )
    if not isinstance(found, nn.Linear):
        raise InputError(
            f"prune: {name} is {article(type(found).__name__)}, which cannot be cut. Prune before"
            " quantizing.",
            code=BEHIND_QUANTIZE,
        )
    return found
