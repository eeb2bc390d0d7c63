"""Ranks by rule and from one budget, against trying all of them."""

import itertools

import pytest
import torch

from smelt.compress.factorize.ranks import LayerSpectrum, allocate_ranks, rank_of_energy, smaller_below_rank
from smelt.core.errors import InputError
from tests.support.expected_errors import raises_code


def test_energy_rank_is_smallest_that_reaches_energy():
    sigma = torch.tensor([4.0, 3.0, 2.0, 1.0], dtype=torch.float64)  # squares 16, 9, 4, 1 of 30
    for energy, rank in ((0.5, 1), (0.54, 2), (0.83, 2), (0.84, 3), (0.96, 3), (0.97, 4), (1.0, 4)):
        assert rank_of_energy(sigma, energy) == rank


def test_smaller_below_rank_is_break_even_rank():
    assert smaller_below_rank(24, 40) == 15  # 24 * 40 / 64: rank 15 has as many weights


def layers_of(*sizes):
    torch.manual_seed(1)
    layers = {}
    for index, (rows, columns, decay) in enumerate(sizes):
        sigma = torch.logspace(0, -decay, min(rows, columns), dtype=torch.float64)
        layers[f"layer{index}"] = LayerSpectrum(sigma, rows, columns, smaller_below_rank(rows, columns))
    return layers


def cost(layer, rank):
    return rank * (layer.rows + layer.columns) if rank < layer.rank_limit else layer.rows * layer.columns


def error(layer, rank):
    if rank >= layer.rank_limit:
        return 0.0
    squares = layer.singular_values.square()
    return float(layer.weight * squares[rank:].sum() / squares.sum())


@pytest.mark.parametrize("parameters", [0.3, 0.5, 0.8])
def test_allocated_ranks_meet_budget_with_least_error(parameters):
    layers = layers_of((6, 8, 0.5), (8, 8, 2), (12, 6, 1))
    ranks = allocate_ranks(layers, parameters)
    spent = sum(cost(layer, ranks[name]) for name, layer in layers.items())
    assert spent <= parameters * sum(layer.rows * layer.columns for layer in layers.values())
    total_error = sum(error(layer, ranks[name]) for name, layer in layers.items())
    choices = [range(1, min(layer.rows, layer.columns) + 1) for layer in layers.values()]
    for others in itertools.product(*choices):
        pairs = list(zip(layers.values(), others, strict=True))
        if sum(cost(layer, rank) for layer, rank in pairs) <= spent:
            assert sum(error(layer, rank) for layer, rank in pairs) >= total_error - 1e-12


def test_layer_with_higher_weight_gets_larger_rank():
    layers = layers_of((16, 16, 1), (16, 16, 1))
    even = allocate_ranks(layers, 0.5)
    assert even["layer0"] == even["layer1"]
    torch.manual_seed(1)
    layers["layer1"] = LayerSpectrum(layers["layer1"].singular_values, 16, 16, 8, weight=20.0)
    uneven = allocate_ranks(layers, 0.5)
    assert uneven["layer1"] > uneven["layer0"]


def test_budget_below_rank_one_is_rejected_with_minimum():
    layers = layers_of((16, 16, 1), (16, 16, 1))
    with raises_code("budget-too-small", InputError) as caught:
        allocate_ranks(layers, 0.1)
    assert caught.value.setting == "parameter_budget"
    assert "0.125" in str(caught.value)
    assert allocate_ranks(layers, 0.125) == {"layer0": 1, "layer1": 1}


def test_layers_at_rank_limit_are_not_factorized():
    layers = {
        "one": LayerSpectrum(torch.ones(1).double(), 1, 32, smaller_below_rank(1, 32)),
        **layers_of((16, 16, 1)),
    }
    layers["slow"] = LayerSpectrum(layers["layer0"].singular_values, 16, 16, 3.5)
    ranks = allocate_ranks(layers, 0.7)
    assert ranks["one"] == 1
    assert ranks["layer0"] < 8
    assert ranks["slow"] < 3.5 or ranks["slow"] == 16
