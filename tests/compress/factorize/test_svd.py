"""Pairs against Eckart and Young, in any metric."""

import pytest
import torch
from torch import nn

from smelt.compress.factorize.svd import ErrorMetric, decompose, low_rank_layer

pytestmark = pytest.mark.quick


@pytest.fixture
def layer():
    torch.manual_seed(2)
    return nn.Linear(40, 24).requires_grad_(False)


def product(pair):
    return (pair.up.weight.double() @ pair.down.weight.double()).detach()


def test_svd_error_equals_dropped_singular_values(layer):
    pair, error = low_rank_layer(layer, 6, ErrorMetric())
    sigma = torch.linalg.svdvals(layer.weight.double())
    lost = (layer.weight.double() - product(pair)).norm()
    assert pair.rank == 6
    torch.testing.assert_close(lost, sigma[6:].square().sum().sqrt(), rtol=1e-5, atol=0)
    assert error == pytest.approx(float(lost / layer.weight.double().norm()), rel=1e-5)


def test_rank_one_layer_is_exact_and_keeps_bias(layer):
    layer.weight.copy_(torch.outer(torch.arange(24.0), torch.arange(40.0)))  # rank 1: nothing is lost
    pair, error = low_rank_layer(layer, 1, ErrorMetric())
    x = torch.randn(3, 5, 40)
    assert error < 1e-6
    torch.testing.assert_close(pair(x), layer(x), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("kind", "rows", "width"), [("matrix", 24, 40), ("diagonal", 24, 40), ("matrix", 40, 24)]
)
def test_pair_is_optimal_in_metric(kind, rows, width):
    torch.manual_seed(3)
    layer = nn.Linear(width, rows).requires_grad_(False)
    into = torch.rand(width, dtype=torch.float64) + 0.1
    metric = {
        "matrix": ErrorMetric(transform=(m := torch.randn(width, width).double()), inverse=m.inverse()),
        "diagonal": ErrorMetric(transform=into, inverse=1 / into),
    }[kind]

    def off(matrix):
        scale = into.diag() if kind == "diagonal" else metric.transform
        return ((layer.weight.double() - matrix) @ scale).norm()

    pair, error = low_rank_layer(layer, 6, metric)
    sigma = decompose(layer.weight, metric).singular_values
    torch.testing.assert_close(off(product(pair)), sigma[6:].square().sum().sqrt(), rtol=1e-4, atol=0)
    assert error == pytest.approx(float(off(product(pair)) / off(torch.zeros(rows, width))), rel=1e-4)
    plain, _ = low_rank_layer(layer, 6, ErrorMetric())
    assert off(product(pair)) < 0.99 * off(product(plain))
    # the optimum: no small change of a factor helps
    for _ in range(5):
        up = pair.up.weight.double() + 1e-3 * torch.randn(rows, 6).double()
        assert off(up @ pair.down.weight.double()) > off(product(pair))


def test_bias_compensates_mean_of_dropped_part(layer):
    mean = torch.randn(40, dtype=torch.float64)
    pair, _ = low_rank_layer(layer, 6, ErrorMetric(input_mean=mean))
    torch.testing.assert_close(pair(mean.float()), layer(mean.float()), rtol=1e-4, atol=1e-5)


def test_layer_without_bias_gets_no_bias():
    layer = nn.Linear(40, 24, bias=False)
    assert low_rank_layer(layer, 3, ErrorMetric())[0].up.bias is None
