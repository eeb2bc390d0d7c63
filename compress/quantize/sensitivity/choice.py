"""One width for each matrix, so that all damage is least for the bits that all take: a knapsack of choices.

The states of all matrices so far are gone through in the order of their bits, and only those are kept that do
less damage than every cheaper one (Nemhauser & Ullmann 1969, Discrete Dynamic Programming and Capital
Allocation): exact, as long as there are few enough states. Matrices of a transformer have few shapes, so that
many choices take the same bits. Of more states than `_MOST` one is kept of each stretch of bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_MOST = 4000


@dataclass(frozen=True)
class Chosen:
    """One choice for each matrix. cost: bits of all. damage: the sum. picks: which choice, by matrix."""

    cost: int
    damage: float
    picks: tuple[int, ...]


def frontier(choices: Sequence[Sequence[tuple[int, float]]]) -> list[Chosen]:
    """Return what no other choice beats in bits and damage both, the cheapest first.

    Args:
        choices: of each matrix bits and damage of what can be chosen.
    """
    states: list[tuple[int, float, Any]] = [(0, 0.0, None)]
    for options in choices:
        found = [
            (cost + more, damage + worse, (before, at))
            for cost, damage, before in states
            for at, (more, worse) in enumerate(options)
        ]
        states = _thinned(_unbeaten(found))
    return [Chosen(cost, damage, _picks(before)) for cost, damage, before in states]


def within(found: Sequence[Chosen], cost: float) -> Chosen | None:
    """Return the least damage that takes at most `cost` bits; None where everything takes more."""
    return next((one for one in reversed(found) if one.cost <= cost), None)


def _unbeaten(states: list[tuple[int, float, Any]]) -> list[tuple[int, float, Any]]:
    kept, least = [], math.inf
    for state in sorted(states, key=lambda state: state[:2]):
        if state[1] < least:
            kept.append(state)
            least = state[1]
    return kept


def _thinned(states: list[tuple[int, float, Any]]) -> list[tuple[int, float, Any]]:
    """Return `states`, or of each stretch of bits the last, which does the least damage; and the cheapest."""
    if len(states) <= _MOST:
        return states
    first, step = states[0][0], (states[-1][0] - states[0][0]) / (_MOST - 1)
    last = {math.ceil((state[0] - first) / step): state for state in states}
    return [state for _, state in sorted(last.items())]


def _picks(before: Any) -> tuple[int, ...]:
    found: list[int] = []
    while before is not None:
        before, at = before
        found.append(at)
    return tuple(reversed(found))
