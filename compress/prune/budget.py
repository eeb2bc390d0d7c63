"""Allocate a recipe's budget to the units of a model: the kept units per group with the highest importance.

The units of each group are removed in the order of importance, so keeping n of them has a value and a cost.
For a given price per cost, each group has its own best n. The price is found by bisection so that the total
is within the budget (Lagrange multipliers for a knapsack: Everett 1963, Operations Research 11(3); for units
by latency: HALP, Shen et al. 2021, arXiv:2110.10811). The rest of the budget is filled greedily by value per
cost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from smelt.calibration.samples import load_calibration_samples
from smelt.compress.prune.costs import (
    UnitCosts,
    UnitGroup,
    count_multiplications,
    flop_costs,
    parameter_costs,
)
from smelt.compress.prune.importances.registry import IMPORTANCES
from smelt.compress.prune.importances.scores import Groups, UnitScores
from smelt.compress.prune.latency_costs import TimedPart, latency_costs
from smelt.compress.prune.settings import Budget, PruneSettings
from smelt.compress.prune.units import count_units, find_groups
from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.models.checkpoint import count_stored_parameters
from smelt.stage import Context


@dataclass(frozen=True)
class _GroupChoices:
    """Choices of one group: the possible numbers of kept units, with the value and cost of each."""

    counts: list[int]
    scores: Tensor
    costs: Tensor

    def best_index(self, price: float) -> int:
        """Return the index of the best choice at a price; of equal ones the smallest."""
        return int((self.scores - price * self.costs).argmax())


def allocate_units(
    scores: Mapping[str, Tensor], costs: UnitCosts, budget: float, multiples: Mapping[str, int], measure: str
) -> dict[str, int]:
    """Return the number of kept units by group.

    Args:
        scores: by group, float64 [units], not negative, comparable between all groups.
        costs: the costs of the same groups.
        budget: the kept fraction of `costs.total`.
        multiples: by group, the kept units are a multiple of this; at least one multiple is kept.
        measure: the name of the budget in the recipe, for messages.

    Raises:
        InputError: one multiple in each group exceeds the budget.
    """
    choices = {
        name: _group_choices(group_scores, costs.by_group[name], multiples[name])
        for name, group_scores in scores.items()
    }
    available = budget * costs.total - costs.fixed
    minimum = sum(float(c.costs[0]) for c in choices.values())
    if minimum > available:
        raise InputError(
            _budget_too_small_text(costs, minimum, budget, measure),
            code="budget-too-small",
            setting=f"budget.{measure}",
        )
    indices = _choose_at_price(choices, available)
    _fill_budget(choices, indices, available)
    return {name: choice.counts[indices[name]] for name, choice in choices.items()}


def _group_choices(scores: Tensor, cost: Tensor, step: int) -> _GroupChoices:
    counts = [*range(step, len(scores), step), len(scores)]
    sums = scores.double().sort(descending=True).values.cumsum(0)
    count_tensor = torch.tensor(counts)
    return _GroupChoices(counts, sums[count_tensor - 1], cost[count_tensor])


def _choose_at_price(choices: Mapping[str, _GroupChoices], room: float) -> dict[str, int]:
    """Return the index of each group's choice at the lowest price at which all fit into `room`."""

    def spent(units: Mapping[str, int]) -> float:
        return sum(float(choice.costs[units[name]]) for name, choice in choices.items())

    low, high = 0.0, 1.0
    best_indices = dict.fromkeys(choices, 0)
    while spent(indices := {name: c.best_index(high) for name, c in choices.items()}) > room:
        low, high = high, 2 * high
    best_indices = indices
    for _ in range(200):
        price = (low + high) / 2
        indices = {name: choice.best_index(price) for name, choice in choices.items()}
        if spent(indices) > room:
            low = price
        else:
            high, best_indices = price, indices
    return best_indices


def _fill_budget(choices: Mapping[str, _GroupChoices], choice_indices: dict[str, int], room: float) -> None:
    """Keep more units while they fit into `room`, best value per cost first; changes `choice_indices`."""
    remaining = room - sum(float(choice.costs[choice_indices[name]]) for name, choice in choices.items())
    while True:
        options: list[tuple[float, str, int, float]] = []
        for name, choice in choices.items():
            for index in range(choice_indices[name] + 1, len(choice.counts)):
                extra_cost = float(choice.costs[index] - choice.costs[choice_indices[name]])
                gain = float(choice.scores[index] - choice.scores[choice_indices[name]])
                if extra_cost > remaining:
                    break
                if gain > 0:
                    options.append(
                        (gain / extra_cost if extra_cost > 0 else math.inf, name, index, extra_cost)
                    )
        if not options:
            return
        _, name, index, extra_cost = max(options)
        choice_indices[name] = index
        remaining -= extra_cost


def _budget_too_small_text(costs: UnitCosts, least: float, share: float, setting: str) -> str:
    minimum = math.ceil(1000 * (costs.fixed + least) / costs.total) / 1000
    percent = 100 * costs.fixed / costs.total
    return (
        f"prune: budget: {setting}: {share:g} of the model's {costs.unit} cannot be reached: with one "
        "head and"
        f" one multiple of neurons in each layer, {minimum:g} of them remain ({percent:.0f} % are in parts"
        f" that are not pruned). Set at least {minimum:g}, or remove more: targets, layers (drop-layers)"
        " or tokens (trim-vocabulary)."
    )


# Number of samples for the mean length.
_LENGTH_SAMPLES = 256


class BudgetAllocation:
    """The number of units of each group that are kept within a budget.

    costs: of units and of the rest. limit: the highest permitted cost. least: the cost with one multiple of
    units in each group.
    """

    def __init__(
        self,
        model: Any,
        groups: Groups,
        src: Artifact,
        settings: PruneSettings,
        ctx: Context,
        original: BudgetAllocation | None = None,
    ) -> None:
        """Determine the costs of units.

        Args:
            model: float, on the CPU, before its units are pruned.
            groups: groups that may lose units.
            src: the artifact with the tokenizer.
            settings: settings with a budget.
            ctx: data, threads, progress.
            original: that of the model of which the budget is a fraction; None: of `model`.
        """
        assert settings.budget is not None
        self._settings, self._budget, self._groups = settings, settings.budget, groups
        steps = {g.name: 1 for g in groups[0]} | {b.name: settings.multiple_of for b in groups[1]}
        both: list[UnitGroup] = [*groups[0], *groups[1]]
        self._steps = {g.name: min(steps[g.name], g.count(model)) for g in both}
        self._timings: dict[TimedPart, float] = {} if original is None else original._timings
        self.costs = _unit_costs(model, groups, src, self._budget, self._steps, ctx, self._timings)
        self.cost_before: float = self.costs.total if original is None else original.cost_before
        self.units_before: dict[str, int] = (
            self._count_units(model) if original is None else original.units_before
        )
        self.limit = self._budget.keep_ratio * self.cost_before
        self.least = self.costs.fixed + sum(float(self.costs.by_group[n][s]) for n, s in self._steps.items())
        self._kept: dict[str, int] = {}

    def allocate(self, scores: UnitScores) -> dict[str, int]:
        """Return the number of kept units by group name.

        Raises:
            InputError: the least cost exceeds the budget.
        """
        comparable = _comparable_scores(self._groups, scores, self._settings, self.costs)
        share = self.limit / self.costs.total
        self._kept = allocate_units(comparable, self.costs, share, self._steps, self._budget.measure)
        return self._kept

    def _count_units(self, model: Any) -> dict[str, int]:
        return count_units(model, with_width="width" in self._settings.targets)

    def details(self, model: Any) -> dict[str, Any]:
        """Return the requested and reached values for the pruned `model`, and its units before and after.

        Parameters and multiplications are counted in the model; latency is the sum of the timings.
        """
        costs, measure = self.costs, self._budget.measure
        reached = costs.fixed + sum(float(cost[self._kept[name]]) for name, cost in costs.by_group.items())
        if measure == "parameters":
            reached = float(count_stored_parameters(model))
        elif measure == "flops":
            reached = float(count_multiplications(model, costs.details["sequence_length"]))
        before = self.cost_before
        values = {"before": _round_value(before), "reached": _round_value(reached), "unit": costs.unit}
        ratios = {"asked": self._budget.keep_ratio, "left": round(reached / before, 4)}
        units = {name: [self.units_before[name], after] for name, after in self._count_units(model).items()}
        return {"measure": measure, **ratios, **values, "units": units, **costs.details}


def _unit_costs(
    model: Any,
    groups: Groups,
    src: Artifact,
    budget: Budget,
    steps: dict[str, int],
    ctx: Context,
    timings: dict[TimedPart, float],
) -> UnitCosts:
    both: list[UnitGroup] = [*groups[0], *groups[1]]
    if budget.measure == "parameters":
        return parameter_costs(model, both)
    length = budget.sequence_length or _mean_length(model, src, ctx)
    if budget.measure == "flops":
        return flop_costs(model, both, length)
    attentions, blocks = find_groups(model)
    all_groups: list[UnitGroup] = [*attentions, *blocks]
    steps = {group.name: group.count(model) for group in all_groups} | steps
    costs = latency_costs(model, all_groups, length, budget.measure_on or "ort-cpu", steps, ctx, timings)
    by_group = {group.name: costs.by_group[group.name] for group in both}
    fixed = costs.total - sum(float(cost[-1]) for cost in by_group.values())
    return replace(costs, fixed=fixed, by_group=by_group)


def _mean_length(model: Any, src: Artifact, ctx: Context) -> int | None:
    """Return the mean number of tokens per sample, for translation the mean of both sides.

    None for images, audio, running text, or without data.
    """
    split = ctx.data.get("calibration") or ctx.data.get("train")
    if ctx.traits.samples in ("images", "captioned-images", "audio", "running-text") or not split:
        return None
    samples = load_calibration_samples(model, src, _LENGTH_SAMPLES, ctx, "prune", padded=True)
    texts = sum(len(batch["attention_mask"]) for batch in samples.batches)
    return max(1, round(samples.tokens / (texts * (2 if model.config.is_encoder_decoder else 1))))


def _comparable_scores(
    groups: Groups, scores: UnitScores, settings: PruneSettings, costs: UnitCosts
) -> Mapping[str, Tensor]:
    """Return scores of heads and neurons on one scale: the change of the loss without the unit.

    Scores of importances that compare no kinds are only compared within one, as in `scope: global`.
    """
    if not IMPORTANCES[settings.importance].compares_kinds:
        scores = scores.normalized()
    by_group = {group.name: scores.heads[group.name] for group in groups[0]}
    by_group |= {block.name: scores.neurons[block.name] for block in groups[1]}
    if not IMPORTANCES[settings.importance].is_per_cost:
        return by_group
    return {name: score * float(costs.by_group[name][-1]) / len(score) for name, score in by_group.items()}


def _round_value(value: float) -> float | int:
    return int(value) if value == int(value) else round(value, 3)
