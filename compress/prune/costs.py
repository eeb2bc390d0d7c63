"""Cost of a model in parameters or flops, and of each group for every number of units.

Shapes: K = inputs, N = outputs of a linear layer, r = rank of a factorized layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from smelt.compress.prune.settings import check_length
from smelt.compress.prune.units import (
    AttentionGroup,
    FeedForwardGroup,
    linear_with_inputs,
    linear_with_outputs,
)
from smelt.core.errors import InputError
from smelt.models.checkpoint import count_stored_parameters
from smelt.models.families.registry import Block, blocks_of, family_of, reads_images
from smelt.models.layers import LowRankLinear
from smelt.models.operations import count_operations
from smelt.models.text_rules import position_limit

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
        return (*(layer for _, layer in self.input_layers), self.output_layer)

    @property
    def inner_width(self) -> int:
        """The inner width per token: of all heads together, or the neurons."""
        return self.output_layer.inputs


def group_shapes(model: Any, group: UnitGroup, units: int) -> GroupShapes:
    """Return the shapes of `group` of `model` with `units` kept units."""
    total = group.count(model)
    input_shapes = []
    for name in group.structure.linear_layers[:-1]:
        shape = linear_shape(model, name)
        outputs = shape.outputs * units // total
        input_shapes.append((name, LinearShape(shape.inputs, outputs, shape.rank, shape.bias)))
    output_shape = linear_shape(model, group.structure.linear_layers[-1])
    inputs = output_shape.inputs * units // total
    return GroupShapes(
        units,
        tuple(input_shapes),
        LinearShape(inputs, output_shape.outputs, output_shape.rank, output_shape.bias),
    )


def linear_shape(model: Any, name: str) -> LinearShape:
    """Return the present shape of the linear layer `name`."""
    module = model.get_submodule(name)
    rows, columns = linear_with_outputs(model, name), linear_with_inputs(model, name)
    rank = module.rank if isinstance(module, LowRankLinear) else None
    return LinearShape(columns.in_features, rows.out_features, rank, rows.bias is not None)


def blocks_using_groups(model: Any, groups: Sequence[UnitGroup]) -> dict[str, list[tuple[Block, int]]]:
    """Return the blocks that use each group, by group name, each with its number of uses."""
    owners = {model.get_submodule(group.structure.linear_layers[-1]): group.name for group in groups}
    uses_by_group: dict[str, Counter[Block]] = {group.name: Counter() for group in groups}
    for block in blocks_of(model):
        for part in block.parts:
            name = owners.get(model.get_submodule(part.linear_layers[-1]))
            if name is not None:
                uses_by_group[name][block] += len(block.call_indices)
    return {name: list(uses.items()) for name, uses in uses_by_group.items()}


# Sequence length if none is set, limited by the model's positions.
DEFAULT_SEQUENCE_LENGTH = 128


@dataclass(frozen=True)
class UnitCosts:
    """Costs of a model: `total` is the present cost, `fixed` the part that pruning cannot change.

    by_group: by group name, the cost with 0, 1, ... all of its units, float64 [units + 1], non-decreasing.
    details: how the costs were determined, for the report.
    """

    unit: str
    total: float
    fixed: float
    by_group: Mapping[str, Tensor]
    details: Mapping[str, Any] = field(default_factory=dict)


def parameter_costs(model: Any, groups: Sequence[UnitGroup]) -> UnitCosts:
    """Return costs in stored parameters.

    A relative position bias that all blocks of a stack share counts as one row for each head of every block,
    as it is stored after heads are removed.
    """
    table = _bias_values_per_head(model, groups)
    by_group, unit_parameters = {}, _count_bias_values(model) if table else 0
    for group in groups:
        group_parameters = _units_total(model, group, "num_parameters")
        unit_parameters += group_parameters
        group_parameters += group.count(model) * sum(table.get(name, 0) for name in _modules(group))
        by_group[group.name] = _linear_costs(group_parameters, group.count(model))
    total = count_stored_parameters(model)
    return UnitCosts("parameters", total, total - unit_parameters, by_group)


def flop_costs(model: Any, groups: Sequence[UnitGroup], sequence_length: int | None) -> UnitCosts:
    """Return costs in multiplications of one forward pass over `sequence_length` input (and output) tokens.

    Args:
        model: float, on the CPU.
        groups: the groups of its units.
        sequence_length: tokens; None: see `resolve_sequence_length`.
    """
    tokens = resolve_sequence_length(model, sequence_length)
    uses = blocks_using_groups(model, groups)
    by_group = {}
    for group in groups:
        group_macs = _units_total(model, group, "num_weights")
        if isinstance(group, AttentionGroup):  # attention scores and the weighted sum of values
            group_macs += 2 * group_shapes(model, group, group.count(model)).inner_width * tokens
        times = sum(num_uses for _, num_uses in uses[group.name])
        by_group[group.name] = _linear_costs(group_macs * tokens * times, group.count(model))
    total = float(count_multiplications(model, tokens))
    fixed = total - sum(float(cost[-1]) for cost in by_group.values())
    return UnitCosts("multiplications", total, fixed, by_group, {"sequence_length": tokens})


def count_multiplications(model: Any, tokens: int) -> int:
    """Return the multiply-adds of `count_operations` for `tokens` tokens, or for one image.

    An encoder-decoder gets `tokens` source and `tokens` target tokens.
    """
    is_image_model = reads_images(model.config.to_dict())
    return count_operations(model, _image_size(model) if is_image_model else (tokens, tokens))


def resolve_sequence_length(model: Any, sequence_length: int | None) -> int:
    """Return the sequence length for the costs, in tokens.

    None for 128, limited by the model's positions; for the states of an image, if the model takes images.

    Raises:
        InputError: it exceeds the model's positions, or the model takes images.
    """
    config = model.config.to_dict()
    for error in check_length(sequence_length, config):
        raise InputError(f"prune: {error.message}", code=error.code, setting=error.setting)
    if sequence_length is not None:
        return sequence_length
    if reads_images(config):
        image = torch.zeros(1, model.config.num_channels, *_image_size(model))
        with torch.no_grad():
            return int(model.base_model(image).last_hidden_state.shape[1])
    return min(DEFAULT_SEQUENCE_LENGTH, position_limit(config) or DEFAULT_SEQUENCE_LENGTH)


def _image_size(model: Any) -> tuple[int, int]:
    """Return the height and width of the model's images."""
    size = model.config.image_size
    return (size, size) if isinstance(size, int) else tuple(size)


def _units_total(model: Any, group: UnitGroup, attribute: str) -> int:
    """Return the decrease of the attribute `attribute`, summed over a group's layers, without any units."""
    all_layers, empty_layers = (
        group_shapes(model, group, units).linear_layers for units in (group.count(model), 0)
    )
    difference: int = sum(getattr(p, attribute) for p in all_layers) - sum(
        getattr(p, attribute) for p in empty_layers
    )
    return difference


def _linear_costs(cost: float, units: int) -> Tensor:
    """Return the cost of 0, 1, ... of `units` units that cost `cost` together, float64 [units + 1]."""
    return torch.arange(units + 1, dtype=torch.float64) * (cost / units)


def _modules(group: UnitGroup) -> tuple[str, ...]:
    return group.modules if isinstance(group, AttentionGroup) else ()


def _bias_values_per_head(model: Any, groups: Sequence[UnitGroup]) -> dict[str, int]:
    """Return the relative position bias parameters per head, by attention that loses heads."""
    family = family_of(model)
    bias = family.relative_bias() if family is not None and family.relative_bias is not None else None
    names = [
        n for g in groups if isinstance(g, AttentionGroup) and g.structure.relative_bias for n in g.modules
    ]
    return {name: bias.parameters_per_head(model.get_submodule(name), name) for name in names} if bias else {}


def _count_bias_values(model: Any) -> int:
    """Return the parameters of the relative position biases that `make_all_independent` would copy."""
    family = family_of(model)
    assert family is not None
    assert family.relative_bias is not None
    return family.relative_bias().count_bias_parameters(model)
