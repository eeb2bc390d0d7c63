"""What the products of a group look like when so many of its units are left, and how often they compute.

Shapes: K = inputs, N = outputs of a product, r = rank of a pair.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from smelt.compress.prune.groups import AttentionGroup, FeedForwardGroup, columns_of, rows_of
from smelt.families.walk import Block, blocks_of
from smelt.runtime.layers.low_rank import LowRankLinear

Group = AttentionGroup | FeedForwardGroup


@dataclass(frozen=True)
class Product:
    """A product [K] -> [N], through `rank` where it is a pair; bias: whether it has one."""

    inputs: int
    outputs: int
    rank: int | None = None
    bias: bool = False

    @property
    def weights(self) -> int:
        """Values of its matrices, which are its multiplications for one token."""
        if self.rank is None:
            return self.inputs * self.outputs
        return self.rank * (self.inputs + self.outputs)

    @property
    def values(self) -> int:
        """Values that are stored of it."""
        return self.weights + (self.outputs if self.bias else 0)


@dataclass(frozen=True)
class Sizes:
    """A group with `units` units. first: what reads the hidden states, by name; last: what gives them."""

    units: int
    first: tuple[tuple[str, Product], ...]
    last: Product

    @property
    def products(self) -> tuple[Product, ...]:
        """All products, the last one last."""
        return (*(product for _, product in self.first), self.last)

    @property
    def between(self) -> int:
        """How many values a token has between them: of all heads together, or the neurons."""
        return self.last.inputs


def sizes_of(model: Any, group: Group, units: int) -> Sizes:
    """Return the sizes of `group` of `model`, were it left with `units` of its units."""
    there = group.count(model)
    first = []
    for name in group.parts.products[:-1]:
        whole = product_of(model, name)
        outputs = whole.outputs * units // there
        first.append((name, Product(whole.inputs, outputs, whole.rank, whole.bias)))
    last = product_of(model, group.parts.products[-1])
    inputs = last.inputs * units // there
    return Sizes(units, tuple(first), Product(inputs, last.outputs, last.rank, last.bias))


def product_of(model: Any, name: str) -> Product:
    """Return the product called `name` as it is."""
    module = model.get_submodule(name)
    rows, columns = rows_of(model, name), columns_of(model, name)
    rank = module.rank if isinstance(module, LowRankLinear) else None
    return Product(columns.in_features, rows.out_features, rank, rows.bias is not None)


def uses_of(model: Any, groups: Sequence[Group]) -> dict[str, list[tuple[Block, int]]]:
    """Return by the name of a group the blocks that compute it, each with how many places it stands in."""
    owners = {model.get_submodule(group.parts.products[-1]): group.name for group in groups}
    found: dict[str, Counter[Block]] = {group.name: Counter() for group in groups}
    for block in blocks_of(model):
        for part in block.parts:
            name = owners.get(model.get_submodule(part.products[-1]))
            if name is not None:
                found[name][block] += 1 + len(block.aliases)
    return {name: list(uses.items()) for name, uses in found.items()}
