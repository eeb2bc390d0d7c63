"""Which parts of a model have masks, of their units, the whole or the width, and what those are worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from smelt.compress.behind_codes import BEHIND_QUANTIZE, IN_TRAINING
from smelt.compress.depth.fit import check_kinds
from smelt.compress.depth.parts import Part, parts_of
from smelt.compress.prune.groups import AttentionGroup, FeedForwardGroup, columns_of, find_groups, rows_of
from smelt.compress.prune.learned.settings import LearnedMasksSettings
from smelt.core.errors import InputError
from smelt.core.text import article
from smelt.families.walk import blocks_of
from smelt.runtime.layers.low_rank import LowRankLinear
from smelt.runtime.layers.shared import SharedLinear

Unit: TypeAlias = AttentionGroup | FeedForwardGroup


@dataclass(frozen=True)
class Masked:
    """An attention or a feed-forward part that has masks, if only those of the hidden width.

    products: the dotted names of its products; units give the inputs of the last, whose outputs are added to
    the hidden states. units: those that have masks; None where they have none. places: where it stands in
    blocks (in several, where these share its products) if it has a mask as a whole; else none. count, cost:
    of its units, and the parameters that one of them owns; one of all where units are not told apart.
    """

    products: tuple[str, ...]
    units: Unit | None
    places: tuple[Part, ...]
    count: int
    cost: float

    @property
    def last(self) -> str:
        """The product that adds to the hidden states."""
        return self.products[-1]


def find_masked(model: Any, settings: LearnedMasksSettings) -> list[Masked]:
    """Return what of `model` gets masks: attentions first, then feed-forward parts, then parts without units.

    Where the hidden width has masks that is every part, since all become narrower.

    Raises:
        InputError: a family whose parts are not known, nothing that the settings name, or integer codes.
    """
    attentions, blocks = find_groups(model)
    groups: list[Unit] = [*(attentions if "heads" in settings.targets else [])]
    groups += blocks if "ffn" in settings.targets else []
    for one in check_kinds(settings.parts, model.config.to_dict(), "learned_masks.parts"):
        raise InputError(f"learned_masks: parts: {one.message}", code=one.code, setting=one.setting)
    wholes: dict[tuple[nn.Module, ...], list[Part]] = {}
    for part in parts_of(model) if settings.parts else ():
        if part.kind in settings.parts:
            wholes.setdefault(_modules(model, part.named.products), []).append(part)
    whole_model = _all_parts(model) if "width" in settings.targets else {}
    if not groups and not wholes and not whole_model:
        kind, word = article(model.config.model_type), [*settings.targets, *settings.parts][0]
        raise InputError(
            f"learned_masks: {kind} model has no {word} that can go.",
            code="nothing-to-remove",
            setting="learned_masks",
        )
    products = [g.parts.products for g in groups] + [p[0].named.products for p in wholes.values()]
    for names in [*products, *whole_model.values()]:
        _require_float(model, names)
    found = []
    for group in groups:
        places = wholes.pop(_modules(model, group.parts.products), [])
        count = group.count(model)
        found.append(Masked(group.parts.products, group, tuple(places), count, unit_cost(model, group)))
    for there in wholes.values():
        names = there[0].named.products
        found.append(Masked(names, None, tuple(there), 1, _whole_cost(model, names)))
    known = {_modules(model, masked.products) for masked in found}
    others = [names for modules, names in whole_model.items() if modules not in known]
    return found + [Masked(names, None, (), 1, _whole_cost(model, names)) for names in others]


def _all_parts(model: Any) -> dict[tuple[nn.Module, ...], tuple[str, ...]]:
    """Return the products of each attention and feed-forward part, once where several share them."""
    found: dict[tuple[nn.Module, ...], tuple[str, ...]] = {}
    for part in (part for block in blocks_of(model) for part in block.parts):
        found.setdefault(_modules(model, part.products), part.products)
    return found


def unit_cost(model: Any, group: Unit) -> float:
    """Return the parameters that one unit of `group` owns: rows with their biases, and columns."""
    count = group.count(model)
    rows = group.row_places(model, torch.arange(count))
    owned = sum(
        len(places) * (layer.in_features + (layer.bias is not None))
        for name, places in rows.items()
        for layer in [rows_of(model, name)]
    )
    return (owned + columns_of(model, group.parts.products[-1]).weight.numel()) / count


def _whole_cost(model: Any, products: Sequence[str]) -> float:
    """Return the parameters that all units of a part own together."""
    *first, last = products
    rows = [rows_of(model, name) for name in first]
    owned = sum(layer.out_features * (layer.in_features + (layer.bias is not None)) for layer in rows)
    return float(owned + columns_of(model, last).weight.numel())


def _modules(model: nn.Module, names: Sequence[str]) -> tuple[nn.Module, ...]:
    return tuple(model.get_submodule(name) for name in names)


def _require_float(model: Any, products: Sequence[str]) -> None:
    for name in products:
        module = model.get_submodule(name)
        if isinstance(module, SharedLinear):
            raise InputError(
                f"learned_masks: '{name}' has a matrix that layers share and a difference of its own: what"
                f" goes from"
                " one goes from all. Put the step before 'share-weights', or share without low_rank_delta.",
                code="shared-weights",
                setting="learned_masks",
            )
        for layer in (module.down, module.up) if isinstance(module, LowRankLinear) else (module,):
            if type(layer) is not nn.Linear:
                raise InputError(
                    f"learned_masks: '{name}' is a {type(layer).__name__}, whose weights are codes;"
                    f" {IN_TRAINING['learned_masks'].replace('WORD', 'finetune')}",
                    code=BEHIND_QUANTIZE,
                )
