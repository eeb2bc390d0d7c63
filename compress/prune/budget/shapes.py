"""Shapes of a group's linear layers for a number of kept units, and how often they are used.

Shapes: K = inputs, N = outputs of a linear layer, r = rank of a factorized layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from smelt.compress.prune.unit_groups import (
    AttentionGroup,
    FeedForwardGroup,
    linear_with_inputs,
    linear_with_outputs,
)
from smelt.families.model_blocks import Block, blocks_of
from smelt.runtime.layers.low_rank_linear import LowRankLinear

UnitGroup = AttentionGroup | FeedForwardGroup


@dataclass(frozen=True)
class LinearShape:
    """A linear layer [K] -> [N], through `rank` if it is factorized; bias: whether it has one."""

    inputs: int
    outputs: int
    rank: int | None = None
    bias: bool = False

    @property
    def num_weights(self) -> int:
        """Number of matrix values, equal to the multiplications for one token."""
        if self.rank is None:
            return self.inputs * self.outputs
        return self.rank * (self.inputs + self.outputs)

    @property
    def num_parameters(self) -> int:
        """Number of stored values."""
        return self.num_weights + (self.outputs if self.bias else 0)


@dataclass(frozen=True)
class GroupShapes:
    """A group with `units` units. input_layers: layers that read hidden states, by name; last: the output."""

    units: int
    input_layers: tuple[tuple[str, LinearShape], ...]
    output_layer: LinearShape

    @property
    def linear_layers(self) -> tuple[LinearShape, ...]:
        """All linear layers, the output layer last."""
        return (*(product for _, product in self.input_layers), self.output_layer)

    @property
    def inner_width(self) -> int:
        """The inner width per token: of all heads together, or the neurons."""
        return self.output_layer.inputs


def group_shapes(model: Any, group: UnitGroup, units: int) -> GroupShapes:
    """Return the shapes of `group` of `model` with `units` kept units."""
    there = group.count(model)
    first = []
    for name in group.structure.linear_layers[:-1]:
        whole = linear_shape(model, name)
        outputs = whole.outputs * units // there
        first.append((name, LinearShape(whole.inputs, outputs, whole.rank, whole.bias)))
    last = linear_shape(model, group.structure.linear_layers[-1])
    inputs = last.inputs * units // there
    return GroupShapes(units, tuple(first), LinearShape(inputs, last.outputs, last.rank, last.bias))


def linear_shape(model: Any, name: str) -> LinearShape:
    """Return the present shape of the linear layer `name`."""
    module = model.get_submodule(name)
    rows, columns = linear_with_outputs(model, name), linear_with_inputs(model, name)
    rank = module.rank if isinstance(module, LowRankLinear) else None
    return LinearShape(columns.in_features, rows.out_features, rank, rows.bias is not None)


def blocks_using_groups(model: Any, groups: Sequence[UnitGroup]) -> dict[str, list[tuple[Block, int]]]:
    """Return the blocks that use each group, by group name, each with its number of uses."""
    owners = {model.get_submodule(group.structure.linear_layers[-1]): group.name for group in groups}
    found: dict[str, Counter[Block]] = {group.name: Counter() for group in groups}
    for block in blocks_of(model):
        for part in block.parts:
            name = owners.get(model.get_submodule(part.linear_layers[-1]))
            if name is not None:
                found[name][block] += 1 + len(block.aliases)
    return {name: list(uses.items()) for name, uses in found.items()}
