"""Groups of tensors that share heads or neurons, as the model's family defines them (smelt.families)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from smelt.compress.quantized_input import AFTER_QUANTIZE
from smelt.core.errors import InputError
from smelt.core.text import with_article
from smelt.families.family import Attention, FeedForward
from smelt.families.model_blocks import blocks_of
from smelt.families.registry import FAMILIES, family_of
from smelt.runtime.layers.low_rank_linear import LowRankLinear
from smelt.runtime.layers.shared_linear import SharedLinear


@dataclass(frozen=True)
class AttentionGroup:
    """One attention: its heads own rows of query, key, value and columns of out.

    aliases: the modules of later attentions that share the same linear layers.
    """

    structure: Attention
    aliases: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The dotted name of its module."""
        return self.structure.name

    @property
    def modules(self) -> tuple[str, ...]:
        """All modules that have these heads."""
        return (self.name, *self.aliases)

    def count(self, model: nn.Module) -> int:
        """Return the number of units: heads, or key heads with all the queries that share them."""
        module: Any = model.get_submodule(self.name)
        if self.structure.heads_attribute is None:
            rows = linear_with_outputs(model, self.structure.key).out_features // (
                3 if self.structure.packed else 1
            )
            return rows // int(getattr(module, self.structure.head_dim_attribute))
        return int(getattr(module, self.structure.heads_attribute))

    def head_dim(self, model: nn.Module) -> int:
        """Return the columns of `out` that one unit owns."""
        return linear_with_inputs(model, self.structure.out).in_features // self.count(model)

    def value_weight(self, model: nn.Module) -> Tensor:
        """Return the weight of the value projection, float [units * width, inputs]."""
        weight = whole_weight(model, self.structure.value)
        return weight.chunk(3)[2] if self.structure.packed else weight

    def row_indices(self, model: nn.Module, stay: Tensor) -> dict[str, Tensor]:
        """Return the rows of the units `stay` (int64, ascending) by linear layer; GPT-2 has a packed one."""
        count, found = self.count(model), {}
        parts = 3 if self.structure.packed else 1
        for name in self.structure.linear_layers[:-1]:
            width = linear_with_outputs(model, name).out_features // (count * parts)
            places = (stay.unsqueeze(1) * width + torch.arange(width)).flatten()
            found[name] = torch.cat([places + part * count * width for part in range(parts)])
        return found


@dataclass(frozen=True)
class FeedForwardGroup:
    """One feed-forward block: a neuron owns a row of each of its inputs and a column of `down`."""

    structure: FeedForward

    @property
    def name(self) -> str:
        """The dotted name of its module."""
        return self.structure.name

    def count(self, model: nn.Module) -> int:
        """Return the number of neurons."""
        return linear_with_inputs(model, self.structure.down).in_features

    def row_indices(self, model: nn.Module, stay: Tensor) -> dict[str, Tensor]:
        """Return the rows of the neurons `stay` (int64, ascending) by linear layer; two if packed."""
        count = self.count(model)
        parts = 2 if self.structure.gate == self.structure.up else 1
        return {
            n: torch.cat([stay + part * count for part in range(parts)]) for n in self.structure.input_layers
        }


def find_groups(model: Any) -> tuple[list[AttentionGroup], list[FeedForwardGroup]]:
    """Return the attentions and feed-forward blocks of a model that can be pruned, in order.

    A block that is used several times in a stack, and linear layers that several blocks share, appear once.
    Attentions whose heads cannot be removed are left out.

    Raises:
        InputError: the model's family is unknown.
    """
    if family_of(model) is None:
        raise InputError(
            f"prune: {with_article(model.config.model_type)} model is not supported. Supported:"
            f" {', '.join(FAMILIES)}.",
            code="unsupported-family",
        )
    blocks = blocks_of(model)
    attentions: dict[tuple[nn.Module, ...], list[Attention]] = {}
    feeds: dict[tuple[nn.Module, ...], FeedForward] = {}
    for block in blocks:
        for parts in block.attentions:
            if not parts.fixed_heads_reason:
                attentions.setdefault(_modules(model, parts.linear_layers), []).append(parts)
        if (feed := block.feed_forward) is not None:
            feeds.setdefault(_modules(model, feed.linear_layers), feed)
    groups = [AttentionGroup(first, tuple(a.name for a in also)) for first, *also in attentions.values()]
    return groups, [FeedForwardGroup(parts) for parts in feeds.values()]


def _modules(model: nn.Module, names: tuple[str, ...]) -> tuple[nn.Module, ...]:
    return tuple(model.get_submodule(name) for name in names)


def linear_with_outputs(model: nn.Module, name: str) -> nn.Linear:
    """Return the Linear whose rows are the outputs of `name`: itself, or `up` of a factorized layer."""
    return _find_half(model.get_submodule(name), "up", name)


def linear_with_inputs(model: nn.Module, name: str) -> nn.Linear:
    """Return the Linear whose columns are the inputs of `name`: itself, or `down` of a factorized layer."""
    return _find_half(model.get_submodule(name), "down", name)


def whole_weight(model: nn.Module, name: str) -> Tensor:
    """Return the matrix of `name`, float [outputs, inputs]; of a factorized layer the product."""
    module = model.get_submodule(name)
    if isinstance(module, LowRankLinear):
        return module.up.weight.detach() @ module.down.weight.detach()
    return linear_with_outputs(model, name).weight.detach()


def half_path(model: nn.Module, name: str, half: str) -> str:
    """Return the dotted name of the Linear to cut: `name`, or `name.half` of a factorized layer."""
    return f"{name}.{half}" if isinstance(model.get_submodule(name), LowRankLinear) else name


def _find_half(module: nn.Module, half: str, name: str) -> nn.Linear:
    found = getattr(module, half) if isinstance(module, LowRankLinear) else module
    if isinstance(found, SharedLinear):
        raise InputError(
            f"prune: {name} shares its matrix with other layers and has its own low-rank delta, so its units"
            " cannot be removed. Prune before 'share-weights', or share without low_rank_delta.",
            code="shared-weights",
        )
    if not isinstance(found, nn.Linear):
        raise InputError(
            f"prune: {name} is {with_article(type(found).__name__)}, which cannot be pruned. Prune before"
            " quantizing.",
            code=AFTER_QUANTIZE,
        )
    return found
