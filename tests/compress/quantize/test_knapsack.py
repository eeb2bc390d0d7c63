"""The knapsack of widths against trying everything."""

import itertools
import random

import pytest

from smelt.compress.quantize import mixed_precision
from smelt.compress.quantize.mixed_precision import best_within, pareto_choices

pytestmark = pytest.mark.quick


def drawn(seed, units=6):
    draw = random.Random(seed)
    sizes = [draw.choice([64, 64, 128, 300]) for _ in range(units)]
    return [[(size * bits, draw.random() * 4.0**-bits) for bits in (2, 3, 4, 8)] for size in sizes]


def everything(choices):
    for picks in itertools.product(*(range(len(options)) for options in choices)):
        picked = [options[index] for options, index in zip(choices, picks, strict=True)]
        yield sum(cost for cost, _ in picked), sum(worse for _, worse in picked), picks


@pytest.mark.parametrize("seed", range(4))
def test_best_within_equals_brute_force(seed):
    choices = drawn(seed)
    front, all_picks = pareto_choices(choices), list(everything(choices))
    least, most = min(c for c, *_ in all_picks), max(c for c, *_ in all_picks)
    for share in (0.0, 0.1, 0.33, 0.5, 0.8, 1.0):
        limit = least + share * (most - least)
        best = min((worse, cost) for cost, worse, _ in all_picks if cost <= limit)
        chosen = best_within(front, limit)
        assert chosen.sensitivity == pytest.approx(best[0])
        picked = [options[index] for options, index in zip(choices, chosen.choices, strict=True)]
        assert (sum(c for c, _ in picked), sum(d for _, d in picked)) == (
            chosen.cost,
            pytest.approx(chosen.sensitivity),
        )
        assert chosen.cost <= limit
    assert best_within(front, least - 1) is None


def test_dominated_bit_widths_are_not_chosen():
    front = pareto_choices([[(2, 0.5), (4, 0.7), (8, 0.1)]])
    assert [choice.choices for choice in front] == [(0,), (2,)]


def test_limited_states_meet_budget_near_optimum(monkeypatch):
    choices = [[(c + 7 * index, d) for c, d in options] for index, options in enumerate(drawn(1, 9))]
    full_front = pareto_choices(choices)
    monkeypatch.setattr(mixed_precision, "_MAX_STATES", 40)
    limited_front = pareto_choices(choices)
    assert len(limited_front) <= 41 < len(full_front)
    least, most = full_front[0].cost, full_front[-1].cost
    for limit in (least, least + (most - least) / 4, least + (most - least) / 2):
        assert best_within(limited_front, limit).cost <= limit
        assert (
            best_within(limited_front, limit).sensitivity < 1.5 * best_within(full_front, limit).sensitivity
        )
