"""What a model costs, and what each group of its units would cost with fewer of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from smelt.compress.float_model import stored_parameters
from smelt.compress.prune.budget.sizes import Group, sizes_of, uses_of
from smelt.compress.prune.groups import AttentionGroup
from smelt.core.errors import InputError
from smelt.families.registry import family_of
from smelt.runtime.text.limits import position_limit

# Tokens of a text, where nothing is said and the model has places for so many.
LENGTH = 128


@dataclass(frozen=True)
class Costs:
    """In one unit: `whole`, what the model costs now; `fixed`, what of it no choice of units changes.

    of: by the name of a group, what it costs with 0, 1, ... all of its units, float64 [units + 1], never
    falling. measured: what the report should say of how it was found.
    """

    unit: str
    whole: float
    fixed: float
    of: Mapping[str, Tensor]
    measured: Mapping[str, Any] = field(default_factory=dict)


def parameter_costs(model: Any, groups: Sequence[Group]) -> Costs:
    """Return costs in values that are stored.

    A bias by distance that all blocks of a stack share counts as what it becomes once heads go: a row for
    each head of every block.
    """
    table = _table_rows(model, groups)
    of, now = {}, _tables_now(model) if table else 0
    for group in groups:
        each = _span(model, group, "values")
        now += each
        each += group.count(model) * sum(table.get(name, 0) for name in _modules(group))
        of[group.name] = _even(each, group.count(model))
    whole = stored_parameters(model)
    return Costs("parameters", whole, whole - now, of)


def operation_costs(model: Any, groups: Sequence[Group], length: int | None) -> Costs:
    """Return costs in multiplications of one pass over `length` tokens (and as many of output).

    Args:
        model: float, on the CPU.
        groups: of it.
        length: tokens; None for 128, or as many as the model has places for.
    """
    tokens = text_length(model, length)
    uses = uses_of(model, groups)
    of = {}
    for group in groups:
        each = _span(model, group, "weights")
        if isinstance(group, AttentionGroup):  # scores, and the sum of values that they weigh
            each += 2 * sizes_of(model, group, group.count(model)).between * tokens
        times = sum(places for _, places in uses[group.name])
        of[group.name] = _even(each * tokens * times, group.count(model))
    whole_model = float(count_operations(model, tokens))
    fixed = whole_model - sum(float(cost[-1]) for cost in of.values())
    return Costs("multiplications", whole_model, fixed, of, {"sequence_length": tokens})


@torch.no_grad()
def count_operations(model: Any, tokens: int) -> int:
    """Return the multiplications of matrices in one pass over `tokens` tokens, as torch counts them.

    A translator reads as many and is fed as many (`torch.utils.flop_counter`, whose operations are a
    multiplication and an addition each). Masked scores count as those that are not.
    """
    ids = torch.ones(1, tokens, dtype=torch.long)
    more: dict[str, Any] = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    if model.can_generate():
        more["use_cache"] = False
    counter: Any = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter:  # torch counts no fused attention of a CPU
        model(ids, **more)
    return int(counter.get_total_flops()) // 2


def text_length(model: Any, wanted: int | None) -> int:
    """Return how many tokens a text has.

    Raises:
        InputError: the model has no places for so many.
    """
    places = position_limit(model.config.to_dict())
    if wanted is None:
        return min(LENGTH, places or LENGTH)
    if places is not None and wanted > places:
        raise InputError(
            f"prune: budget: sequence_length: {wanted} tokens, and the model has places for {places}.",
            code="longer-than-model",
            setting="budget.sequence_length",
        )
    return wanted


def _span(model: Any, group: Group, word: str) -> int:
    """Return by how much `word`, summed over the products of a group, falls when all of its units go."""
    whole, none = (sizes_of(model, group, units).products for units in (group.count(model), 0))
    gone: int = sum(getattr(p, word) for p in whole) - sum(getattr(p, word) for p in none)
    return gone


def _even(cost: float, units: int) -> Tensor:
    """Return the cost of 0, 1, ... of `units` units that cost `cost` together, float64 [units + 1]."""
    return torch.arange(units + 1, dtype=torch.float64) * (cost / units)


def _modules(group: Group) -> tuple[str, ...]:
    return group.modules if isinstance(group, AttentionGroup) else ()


def _table_rows(model: Any, groups: Sequence[Group]) -> dict[str, int]:
    """Return by attention that loses heads how many values of a bias by distance each of its heads has."""
    family = family_of(model)
    bias = family.relative_bias() if family is not None and family.relative_bias is not None else None
    names = [n for g in groups if isinstance(g, AttentionGroup) and g.parts.relative for n in g.modules]
    return {name: bias.values_of_a_head(model.get_submodule(name), name) for name in names} if bias else {}


def _tables_now(model: Any) -> int:
    """Return how many values the biases by distance have that `own_all` turns into one for each block."""
    family = family_of(model)
    assert family is not None
    assert family.relative_bias is not None
    return family.relative_bias().values_now(model)
