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
        taken = [options[at] for options, at in zip(choices, picks, strict=True)]
        yield sum(cost for cost, _ in taken), sum(worse for _, worse in taken), picks


@pytest.mark.parametrize("seed", range(4))
def test_it_is_what_trying_everything_finds(seed):
    choices = drawn(seed)
    found, all_of_them = pareto_choices(choices), list(everything(choices))
    least, most = min(c for c, *_ in all_of_them), max(c for c, *_ in all_of_them)
    for share in (0.0, 0.1, 0.33, 0.5, 0.8, 1.0):
        limit = least + share * (most - least)
        best = min((worse, cost) for cost, worse, _ in all_of_them if cost <= limit)
        chosen = best_within(found, limit)
        assert chosen.sensitivity == pytest.approx(best[0])
        taken = [options[at] for options, at in zip(choices, chosen.choices, strict=True)]
        assert (sum(c for c, _ in taken), sum(d for _, d in taken)) == (
            chosen.cost,
            pytest.approx(chosen.sensitivity),
        )
        assert chosen.cost <= limit
    assert best_within(found, least - 1) is None


def test_more_bits_that_do_more_damage_are_not_taken():
    found = pareto_choices([[(2, 0.5), (4, 0.7), (8, 0.1)]])
    assert [one.choices for one in found] == [(0,), (2,)]


def test_of_very_many_choices_the_budget_holds_and_the_damage_is_near_the_least(monkeypatch):
    choices = [[(c + 7 * at, d) for c, d in options] for at, options in enumerate(drawn(1, 9))]
    whole = pareto_choices(choices)
    monkeypatch.setattr(mixed_precision, "_MAX_STATES", 40)
    few = pareto_choices(choices)
    assert len(few) <= 41 < len(whole)
    least, most = whole[0].cost, whole[-1].cost
    for limit in (least, least + (most - least) / 4, least + (most - least) / 2):
        assert best_within(few, limit).cost <= limit
        assert best_within(few, limit).sensitivity < 1.5 * best_within(whole, limit).sensitivity
