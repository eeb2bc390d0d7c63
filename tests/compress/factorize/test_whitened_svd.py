"""Whitened SVD: the error that it names is that of the layer's outputs, and no pair has less."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from smelt.calibration.statistics import InputStatistics
from smelt.compress.factorize import svd as module
from smelt.compress.factorize.settings import FactorizeSettings
from smelt.compress.factorize.svd import (
    ErrorMetric,
    LayerMetrics,
    decompose,
    low_rank_layer,
    whitened_svd_metric,
)


@pytest.fixture
def inputs():
    """Inputs with a mean, and with channels that go together, float64 [tokens, K]."""
    torch.manual_seed(0)
    return torch.randn(500, 32).double() @ torch.randn(32, 32).double() + 3


def metric_of(x, *, bias):
    return whitened_svd_metric(x.T @ x, x.sum(dim=0), len(x), bias=bias)


def mean_square(layer, pair, x):
    with torch.no_grad():
        return float((layer.double()(x) - pair.double()(x)).square().sum(dim=1).mean())


@pytest.mark.parametrize("bias", [False, True])
def test_dropped_singular_values_equal_output_error(inputs, monkeypatch, bias):
    monkeypatch.setattr(module, "_RIDGE_RATIO", 1e-9)
    layer = nn.Linear(32, 24, bias=bias)
    metric = metric_of(inputs, bias=bias)
    sigma = decompose(layer.weight, metric).singular_values
    pair, _ = low_rank_layer(layer, 5, metric)
    assert mean_square(layer, pair, inputs) == pytest.approx(float(sigma[5:].square().sum()), rel=1e-3)


def test_bias_correction_lowers_error(inputs):
    layer = nn.Linear(32, 24)
    corrected, _ = low_rank_layer(layer, 5, metric_of(inputs, bias=True))
    uncorrected, _ = low_rank_layer(layer, 5, metric_of(inputs, bias=False))
    plain, _ = low_rank_layer(layer, 5, ErrorMetric())
    errors = [mean_square(layer, pair, inputs) for pair in (corrected, uncorrected, plain)]
    assert errors == sorted(errors)
    assert errors[0] < 0.9 * errors[1] < 0.8 * errors[2]


def test_unused_input_directions_are_finite_and_not_dropped_first():
    x = torch.randn(200, 32).double()
    x[:, 16:] = 0
    layer = nn.Linear(32, 24, bias=False)
    pair, _ = low_rank_layer(layer, 20, metric_of(x, bias=False))
    assert bool(pair.down.weight.isfinite().all())
    errors = (layer.weight - pair.up.weight @ pair.down.weight).detach().norm(dim=0)
    norms = layer.weight.detach().norm(dim=0)
    assert (errors[:16] / norms[:16]).max() < 0.1
    assert errors[16:].norm() < 0.9 * norms[16:].norm()


def test_zero_inputs_give_plain_svd():
    layer = nn.Linear(32, 24, bias=False)
    zeros = torch.zeros(10, 32).double()
    pair, _ = low_rank_layer(layer, 4, metric_of(zeros, bias=False))
    plain, _ = low_rank_layer(layer, 4, ErrorMetric())
    torch.testing.assert_close(pair.up.weight @ pair.down.weight, plain.up.weight @ plain.down.weight)


def test_judged_error_has_bias_of_calibration_samples(inputs, monkeypatch):
    """The error on held-back samples with another mean is that of the factorized layer on them."""
    monkeypatch.setattr(module, "_RIDGE_RATIO", 1e-9)
    layer, others = nn.Linear(32, 24), inputs[:100] + 1
    calibrated, judged = (
        InputStatistics(len(x), x.sum(0), x.square().sum(0), x.abs().sum(0), x.T @ x)
        for x in (inputs, others)
    )
    metrics = LayerMetrics(
        FactorizeSettings(method="whitened-svd"), None, inputs={"a": replace(calibrated, held_back=judged)}
    )
    pair, error = low_rank_layer(
        layer, 5, metrics.metric_of("a", layer), judged=metrics.judged_metric_of("a", layer)
    )
    with torch.no_grad():
        off = (layer.double()(others) - pair.double()(others)).square().sum()
        full = ((others - inputs.mean(0)) @ layer.weight.double().T).square().sum()
    assert error == pytest.approx(float((off / full).sqrt()), rel=1e-2)
