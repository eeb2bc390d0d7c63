"""Parts of a model with masks (for units, whole parts or hidden width), and their parameter counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from smelt.compress.drop_layers.check_config import check_part_kinds
from smelt.compress.drop_layers.layer_parts import LayerPart, layer_parts
from smelt.compress.prune.learned.settings import LearnedMasksSettings
from smelt.compress.prune.unit_groups import (
    AttentionGroup,
    FeedForwardGroup,
    find_groups,
    linear_with_inputs,
    linear_with_outputs,
)
from smelt.compress.quantized_input import AFTER_QUANTIZE, TRAINING_BEFORE_QUANTIZE
from smelt.core.errors import InputError
from smelt.core.text import with_article
from smelt.families.model_blocks import blocks_of
from smelt.runtime.layers.low_rank_linear import LowRankLinear
from smelt.runtime.layers.shared_linear import SharedLinear

UnitGroup: TypeAlias = AttentionGroup | FeedForwardGroup


@dataclass(frozen=True)
class MaskedPart:
    """An attention or a feed-forward part with masks, or only with those of the hidden width.

    linear_layers: the dotted names of its layers; the units are the inputs of the last one, whose outputs are
    added to the hidden states. units: the units with masks; None without. positions: its positions in blocks
    (several if blocks share its layers) if the whole part has a mask; else empty. count, cost: the number of
    units, and the parameters of each; without unit masks, 1 and the parameters of all.
    """

    linear_layers: tuple[str, ...]
    units: UnitGroup | None
    positions: tuple[LayerPart, ...]
    count: int
    unit_parameters: float

    @property
    def output_layer(self) -> str:
        """The linear layer whose output is added to the hidden states."""
        return self.linear_layers[-1]


def find_masked_parts(model: Any, settings: LearnedMasksSettings) -> list[MaskedPart]:
    """Return the parts of `model` with masks: attentions, feed-forward parts, then parts without unit masks.

    With masks of the hidden width that is every part, since all become narrower.

    Raises:
        InputError: the model's family is unknown, it has no part that the settings name, or it is quantized.
    """
    attentions, blocks = find_groups(model)
    groups: list[UnitGroup] = [*(attentions if "heads" in settings.targets else [])]
    groups += blocks if "ffn" in settings.targets else []
    for one in check_part_kinds(settings.parts, model.config.to_dict(), "learned_masks.parts"):
        raise InputError(f"learned_masks: parts: {one.message}", code=one.code, setting=one.setting)
    wholes: dict[tuple[nn.Module, ...], list[LayerPart]] = {}
    for part in layer_parts(model) if settings.parts else ():
        if part.kind in settings.parts:
            wholes.setdefault(_modules(model, part.structure.linear_layers), []).append(part)
    whole_model = _layers_of_all_parts(model) if "width" in settings.targets else {}
    if not groups and not wholes and not whole_model:
        kind, word = with_article(model.config.model_type), [*settings.targets, *settings.parts][0]
        raise InputError(
            f"learned_masks: {kind} model has no {word} that can be removed.",
            code="nothing-to-remove",
            setting="learned_masks",
        )
    products = [g.structure.linear_layers for g in groups] + [
        p[0].structure.linear_layers for p in wholes.values()
    ]
    for names in [*products, *whole_model.values()]:
        _require_float(model, names)
    found = []
    for group in groups:
        places = wholes.pop(_modules(model, group.structure.linear_layers), [])
        count = group.count(model)
        found.append(
            MaskedPart(
                group.structure.linear_layers,
                group,
                tuple(places),
                count,
                count_unit_parameters(model, group),
            )
        )
    for there in wholes.values():
        names = there[0].structure.linear_layers
        found.append(MaskedPart(names, None, tuple(there), 1, _count_part_parameters(model, names)))
    known = {_modules(model, masked.linear_layers) for masked in found}
    others = [names for modules, names in whole_model.items() if modules not in known]
    return found + [MaskedPart(names, None, (), 1, _count_part_parameters(model, names)) for names in others]


def _layers_of_all_parts(model: Any) -> dict[tuple[nn.Module, ...], tuple[str, ...]]:
    """Return the linear layers of each attention and feed-forward part; shared layers appear once."""
    found: dict[tuple[nn.Module, ...], tuple[str, ...]] = {}
    for part in (part for block in blocks_of(model) for part in block.parts):
        found.setdefault(_modules(model, part.linear_layers), part.linear_layers)
    return found


def count_unit_parameters(model: Any, group: UnitGroup) -> float:
    """Return the number of parameters of one unit of `group`: rows with biases, and columns."""
    count = group.count(model)
    rows = group.row_indices(model, torch.arange(count))
    owned = sum(
        len(places) * (layer.in_features + (layer.bias is not None))
        for name, places in rows.items()
        for layer in [linear_with_outputs(model, name)]
    )
    return (owned + linear_with_inputs(model, group.structure.linear_layers[-1]).weight.numel()) / count


def _count_part_parameters(model: Any, products: Sequence[str]) -> float:
    """Return the number of parameters of all units of a part."""
    *first, last = products
    rows = [linear_with_outputs(model, name) for name in first]
    owned = sum(layer.out_features * (layer.in_features + (layer.bias is not None)) for layer in rows)
    return float(owned + linear_with_inputs(model, last).weight.numel())


def _modules(model: nn.Module, names: Sequence[str]) -> tuple[nn.Module, ...]:
    return tuple(model.get_submodule(name) for name in names)


def _require_float(model: Any, products: Sequence[str]) -> None:
    for name in products:
        module = model.get_submodule(name)
        if isinstance(module, SharedLinear):
            raise InputError(
                f"learned_masks: '{name}' shares its matrix with other layers and has its own low-rank delta,"
                " so its units cannot be removed. Put the step before 'share-weights', or share without"
                " low_rank_delta.",
                code="shared-weights",
                setting="learned_masks",
            )
        for layer in (module.down, module.up) if isinstance(module, LowRankLinear) else (module,):
            if type(layer) is not nn.Linear:
                raise InputError(
                    f"learned_masks: '{name}' is a {type(layer).__name__}, whose weights are quantized;"
                    f" {TRAINING_BEFORE_QUANTIZE['learned_masks'].replace('WORD', 'finetune')}",
                    code=AFTER_QUANTIZE,
                )
