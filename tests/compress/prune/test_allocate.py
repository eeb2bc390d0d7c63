"""What stays within a budget, compared with scipy's integer programs, which find the best choice there is."""

import numpy as np
import pytest
import torch
from scipy.optimize import Bounds, LinearConstraint, milp

from smelt.compress.prune.budget import allocate_units
from smelt.compress.prune.costs import UnitCosts
from smelt.core.errors import InputError
from tests.support.expected_errors import raises_code

pytestmark = pytest.mark.quick


def costs_of(costs, fixed=0.0):
    of = {name: torch.as_tensor(cost, dtype=torch.float64) for name, cost in costs.items()}
    return UnitCosts("values", fixed + sum(float(cost[-1]) for cost in of.values()), fixed, of)


def value(scores, num_kept):
    return sum(float(scores[name].topk(count).values.sum()) for name, count in num_kept.items())


def best_there_is(scores, costs, share):
    """The highest value of one unit or more of each group within the budget, units of even cost."""
    worth = np.concatenate([solution.numpy() for solution in scores.values()])
    unit_costs = np.concatenate([[float(costs.by_group[n][-1]) / len(s)] * len(s) for n, s in scores.items()])
    rows, owners = [unit_costs], np.concatenate([[i] * len(s) for i, s in enumerate(scores.values())])
    rows += [(owners == i).astype(float) for i in range(len(scores))]
    low = [-np.inf] + [1.0] * len(scores)
    high = [share * costs.total - costs.fixed] + [np.inf] * len(scores)
    limits = LinearConstraint(np.array(rows), low, high)
    solution = milp(-worth, integrality=np.ones(len(worth)), bounds=Bounds(0, 1), constraints=limits)
    return -solution.fun


@pytest.mark.parametrize("share", [0.2, 0.45, 0.7])
def test_allocation_matches_integer_program_up_to_one_unit(share):
    draw = torch.Generator().manual_seed(3)
    scores = {n: torch.rand(9, generator=draw, dtype=torch.float64) for n in "abcdef"}
    unit_costs = {"a": 40.0, "b": 3.0, "c": 17.0, "d": 1.0, "e": 9.0, "f": 26.0}
    costs = costs_of({n: cost * torch.arange(10) for n, cost in unit_costs.items()}, fixed=20.0)
    kept_units = allocate_units(scores, costs, share, dict.fromkeys(scores, 1), "parameters")
    spent = costs.fixed + sum(float(costs.by_group[n][count]) for n, count in kept_units.items())
    assert spent <= share * costs.total
    best = best_there_is(scores, costs, share)
    assert best - 1.0 < value(scores, kept_units) <= best + 1e-9
    assert value(scores, kept_units) > 0.97 * best


def test_units_of_equal_cost_are_kept_by_importance():
    scores = {"a": torch.tensor([9.0, 8.0, 1.0, 7.0]), "b": torch.tensor([0.1, 0.3, 6.0, 0.2])}
    costs = costs_of({name: torch.arange(5) for name in scores})
    assert allocate_units(scores, costs, 0.5, {"a": 1, "b": 1}, "parameters") == {"a": 3, "b": 1}
    assert allocate_units(scores, costs, 0.76, {"a": 1, "b": 1}, "parameters") == {"a": 4, "b": 2}
    # steps of two: 9 8 | 7 1 and 6 0.3 | 0.2 0.1
    assert allocate_units(scores, costs, 0.76, {"a": 2, "b": 2}, "parameters") == {"a": 4, "b": 2}
    assert allocate_units(scores, costs, 0.5, {"a": 2, "b": 2}, "parameters") == {"a": 2, "b": 2}


def test_expensive_unit_needs_higher_importance():
    scores = {"dear": torch.tensor([5.0, 4.0, 3.0]), "cheap": torch.tensor([2.0, 1.9, 1.8])}
    costs = costs_of({"dear": 10.0 * torch.arange(4), "cheap": torch.arange(4)})
    assert allocate_units(scores, costs, 0.7, {"dear": 1, "cheap": 1}, "latency") == {"dear": 2, "cheap": 3}


def test_leftover_budget_is_filled_when_latency_is_stepwise():
    # a second unit of `a` costs nothing, a third very much; b's cost rises evenly
    scores = {"a": torch.tensor([1.0, 1.0, 1.0]), "b": torch.tensor([0.5, 0.5, 0.5])}
    costs = costs_of({"a": [0, 4, 4, 10], "b": [0, 1, 2, 3]})
    assert allocate_units(scores, costs, 8 / 13, {"a": 1, "b": 1}, "latency") == {"a": 2, "b": 3}
    # at no price are two the best number: one is cheap, and three are little dearer
    costs = costs_of({"a": [0, 4, 8, 10]})
    assert allocate_units({"a": torch.ones(3)}, costs, 0.9, {"a": 1}, "latency") == {"a": 2}


def test_budget_below_minimum_is_rejected_with_minimum():
    scores = {"a": torch.ones(4), "b": torch.ones(16)}
    costs = costs_of({"a": torch.arange(5), "b": torch.arange(17)}, fixed=20.0)
    with raises_code("budget-too-small", InputError) as caught:
        allocate_units(scores, costs, 0.6, {"a": 1, "b": 8}, "parameters")
    assert caught.value.setting == "budget.parameters"
    assert "0.725" in str(caught.value)
    assert allocate_units(scores, costs, 0.725, {"a": 1, "b": 8}, "parameters") == {"a": 1, "b": 8}
