"""Number of kept units per group with the highest total importance within one budget.

The units of each group are removed in the order of importance, so keeping n of them has a value and a cost.
For a given price per cost, each group has its own best n. The price is found by bisection so that the total
is within the budget (Lagrange multipliers for a knapsack: Everett 1963, Operations Research 11(3); for units
by latency: HALP, Shen et al. 2021, arXiv:2110.10811). The rest of the budget is filled greedily by value per
cost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from smelt.compress.prune.budget.costs import UnitCosts
from smelt.core.errors import InputError


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
        name: _group_choices(found, costs.by_group[name], multiples[name]) for name, found in scores.items()
    }
    room = budget * costs.total - costs.fixed
    least = sum(float(c.costs[0]) for c in choices.values())
    if least > room:
        raise InputError(
            _budget_too_small_text(costs, least, budget, measure),
            code="budget-too-small",
            setting=f"budget.{measure}",
        )
    at = _choose_at_price(choices, room)
    _fill_budget(choices, at, room)
    return {name: choice.counts[at[name]] for name, choice in choices.items()}


def _group_choices(scores: Tensor, cost: Tensor, step: int) -> _GroupChoices:
    counts = [*range(step, len(scores), step), len(scores)]
    sums = scores.double().sort(descending=True).values.cumsum(0)
    places = torch.tensor(counts)
    return _GroupChoices(counts, sums[places - 1], cost[places])


def _choose_at_price(choices: Mapping[str, _GroupChoices], room: float) -> dict[str, int]:
    """Return the index of each group's choice at the lowest price at which all fit into `room`."""

    def spent(at: Mapping[str, int]) -> float:
        return sum(float(choice.costs[at[name]]) for name, choice in choices.items())

    low, high = 0.0, 1.0
    best = dict.fromkeys(choices, 0)
    while spent(found := {name: c.best_index(high) for name, c in choices.items()}) > room:
        low, high = high, 2 * high
    best = found
    for _ in range(200):
        price = (low + high) / 2
        found = {name: choice.best_index(price) for name, choice in choices.items()}
        if spent(found) > room:
            low = price
        else:
            high, best = price, found
    return best


def _fill_budget(choices: Mapping[str, _GroupChoices], at: dict[str, int], room: float) -> None:
    """Keep more units while they fit into `room`, best value per cost first; changes `at`."""
    left = room - sum(float(choice.costs[at[name]]) for name, choice in choices.items())
    while True:
        found: list[tuple[float, str, int, float]] = []
        for name, choice in choices.items():
            for place in range(at[name] + 1, len(choice.counts)):
                more = float(choice.costs[place] - choice.costs[at[name]])
                gain = float(choice.scores[place] - choice.scores[at[name]])
                if more > left:
                    break
                if gain > 0:
                    found.append((gain / more if more > 0 else math.inf, name, place, more))
        if not found:
            return
        _, name, place, more = max(found)
        at[name] = place
        left -= more


def _budget_too_small_text(costs: UnitCosts, least: float, share: float, word: str) -> str:
    needed = math.ceil(1000 * (costs.fixed + least) / costs.total) / 1000
    other = 100 * costs.fixed / costs.total
    return (
        f"prune: budget: {word}: {share:g} of the model's {costs.unit} cannot be reached: with one head and"
        f" one multiple of neurons in each layer, {needed:g} of them remain ({other:.0f} % are in parts"
        f" that are not pruned). Set at least {needed:g}, or remove more: targets, layers (drop-layers)"
        " or tokens (trim-vocabulary)."
    )
