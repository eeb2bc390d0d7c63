"""One bit width per matrix with the least total sensitivity for the total bits: a multiple-choice knapsack.

The states of all matrices so far are visited in the order of their bits, and only Pareto-optimal ones are
kept (Nemhauser & Ullmann 1969, Discrete Dynamic Programming and Capital Allocation): exact while there are
few states. The matrices of a transformer have few shapes, so many choices take the same bits. Above
`_MAX_STATES`, one state is kept per interval of bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_MAX_STATES = 4000


@dataclass(frozen=True)
class WidthChoice:
    """One choice per matrix. cost: total bits. sensitivity: the sum. choices: index by matrix."""

    cost: int
    sensitivity: float
    choices: tuple[int, ...]


def pareto_choices(choices: Sequence[Sequence[tuple[int, float]]]) -> list[WidthChoice]:
    """Return the Pareto-optimal choices in bits and sensitivity, the cheapest first.

    Args:
        choices: bits and sensitivity of each possible choice, by matrix.
    """
    states: list[tuple[int, float, Any]] = [(0, 0.0, None)]
    for options in choices:
        found = [
            (cost + more, damage + worse, (before, at))
            for cost, damage, before in states
            for at, (more, worse) in enumerate(options)
        ]
        states = _thin_states(_pareto_states(found))
    return [WidthChoice(cost, damage, _trace_choices(before)) for cost, damage, before in states]


def best_within(choices: Sequence[WidthChoice], cost: float) -> WidthChoice | None:
    """Return the choice with the least sensitivity within `cost` bits; None if all take more."""
    return next((one for one in reversed(choices) if one.cost <= cost), None)


def _pareto_states(states: list[tuple[int, float, Any]]) -> list[tuple[int, float, Any]]:
    kept, least = [], math.inf
    for state in sorted(states, key=lambda state: state[:2]):
        if state[1] < least:
            kept.append(state)
            least = state[1]
    return kept


def _thin_states(states: list[tuple[int, float, Any]]) -> list[tuple[int, float, Any]]:
    """Return the cheapest state and the last (least sensitive) one of each interval of bits."""
    if len(states) <= _MAX_STATES:
        return states
    first, step = states[0][0], (states[-1][0] - states[0][0]) / (_MAX_STATES - 1)
    last = {math.ceil((state[0] - first) / step): state for state in states}
    return [state for _, state in sorted(last.items())]


def _trace_choices(before: Any) -> tuple[int, ...]:
    found: list[int] = []
    while before is not None:
        before, at = before
        found.append(at)
    return tuple(reversed(found))
