"""How many units of each group stay, so that what stays matters most within one budget.

Each group's units go in the order of their importance, so that keeping n of them keeps a value and costs a
cost. For a price of the cost each group's best n is its own; the price is found by bisection, so that all
together stay within the budget (Lagrange multipliers for a knapsack: Everett 1963, Operations Research
11(3); of units by their latency: HALP, Shen et al. 2021, arXiv:2110.10811). What the budget then has left is
filled with what brings most for its cost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from smelt.compress.prune.budget.costs import Costs
from smelt.core.errors import InputError


@dataclass(frozen=True)
class _Choices:
    """Of one group: how many units may stay, what each number of them is worth, and what it costs."""

    counts: list[int]
    values: Tensor
    costs: Tensor

    def best(self, price: float) -> int:
        """Return the place of what is worth most at a price; of equal ones the smallest."""
        return int((self.values - price * self.costs).argmax())


def kept_within(
    scores: Mapping[str, Tensor], costs: Costs, share: float, steps: Mapping[str, int], word: str
) -> dict[str, int]:
    """Return by group how many units stay.

    Args:
        scores: by group, float64 [units], not negative; they can be compared between all groups.
        costs: of the same groups.
        share: of `costs.whole` that may be left.
        steps: by group, in multiples of how many units stay; one such multiple does in any case.
        word: what the budget is called in the recipe, for messages.

    Raises:
        InputError: a multiple in each group is more than the budget.
    """
    choices = {name: _choices(found, costs.of[name], steps[name]) for name, found in scores.items()}
    room = share * costs.whole - costs.fixed
    least = sum(float(c.costs[0]) for c in choices.values())
    if least > room:
        raise InputError(
            _too_small(costs, least, share, word), code="budget-too-small", setting=f"budget.{word}"
        )
    at = _by_price(choices, room)
    _fill(choices, at, room)
    return {name: choice.counts[at[name]] for name, choice in choices.items()}


def _choices(scores: Tensor, cost: Tensor, step: int) -> _Choices:
    counts = [*range(step, len(scores), step), len(scores)]
    sums = scores.double().sort(descending=True).values.cumsum(0)
    places = torch.tensor(counts)
    return _Choices(counts, sums[places - 1], cost[places])


def _by_price(choices: Mapping[str, _Choices], room: float) -> dict[str, int]:
    """Return the place of each group's choice at the lowest price at which all fit into `room`."""

    def spent(at: Mapping[str, int]) -> float:
        return sum(float(choice.costs[at[name]]) for name, choice in choices.items())

    low, high = 0.0, 1.0
    best = dict.fromkeys(choices, 0)
    while spent(found := {name: c.best(high) for name, c in choices.items()}) > room:
        low, high = high, 2 * high
    best = found
    for _ in range(200):
        price = (low + high) / 2
        found = {name: choice.best(price) for name, choice in choices.items()}
        if spent(found) > room:
            low = price
        else:
            high, best = price, found
    return best


def _fill(choices: Mapping[str, _Choices], at: dict[str, int], room: float) -> None:
    """Let more stay where that fits, what brings most for its cost first; changes `at`."""
    left = room - sum(float(choice.costs[at[name]]) for name, choice in choices.items())
    while True:
        found: list[tuple[float, str, int, float]] = []
        for name, choice in choices.items():
            for place in range(at[name] + 1, len(choice.counts)):
                more = float(choice.costs[place] - choice.costs[at[name]])
                gain = float(choice.values[place] - choice.values[at[name]])
                if more > left:
                    break
                if gain > 0:
                    found.append((gain / more if more > 0 else math.inf, name, place, more))
        if not found:
            return
        _, name, place, more = max(found)
        at[name] = place
        left -= more


def _too_small(costs: Costs, least: float, share: float, word: str) -> str:
    needed = math.ceil(1000 * (costs.fixed + least) / costs.whole) / 1000
    other = 100 * costs.fixed / costs.whole
    return (
        f"prune: budget: {word}: {share:g} of the model's {costs.unit} cannot be reached: with one head and"
        f" one multiple of neurons in each layer {needed:g} of them are left ({other:.0f} % are in parts that"
        f" it does not cut). Say at least {needed:g}, or remove more: targets, layers (drop-layers)"
        " or tokens (trim-vocabulary)."
    )
