"""Compensation: least squares as numpy solves it, and models that stay nearer to what they were."""

import numpy as np
import pytest
import torch
from torch import nn

from smelt.calibration.statistics import empty_statistics
from smelt.compress.prune import reconstruct
from smelt.compress.prune.reconstruct import refit_layer
from smelt.compress.prune.stage import Prune, PruneSettings
from smelt.compress.share_weights import ShareWeights, ShareWeightsSettings
from smelt.core.messages import message_codes
from smelt.models.checkpoint import load_model
from smelt.models.edits import mark_masked
from smelt.models.layers import LowRankLinear
from tests.support import harness
from tests.support.models import every_family

KEPT = torch.tensor([0, 2, 5])


def inputs():
    """Inputs that depend on each other and have means, float32 [50, 6]."""
    draw = torch.Generator().manual_seed(0)
    return torch.randn(50, 6, generator=draw) @ torch.randn(6, 6, generator=draw) + 1.5


def fitted(x, y, bias):
    """What numpy's least squares makes of y from the kept inputs: weights [N, k], biases [N]."""
    columns = np.concatenate([x[:, KEPT], np.ones((len(x), 1))], axis=1) if bias else x[:, KEPT]
    solution = np.linalg.lstsq(columns, y, rcond=None)[0]
    return (solution[:-1].T, solution[-1]) if bias else (solution.T, None)


@pytest.mark.parametrize("kind", ["bias", "plain", "pair"])
def test_refit_equals_least_squares(kind, monkeypatch):
    monkeypatch.setattr(reconstruct, "RECONSTRUCTION_DAMPING", 0.0)
    torch.manual_seed(0)
    x = inputs()
    layer = LowRankLinear(6, 4, 2) if kind == "pair" else nn.Linear(6, 4, bias=kind == "bias")
    half = layer.down if kind == "pair" else layer
    with torch.no_grad():
        y = layer(x).double().numpy()
    statistics = empty_statistics(6, second=True)
    statistics.update(x)
    full_weight = half.weight.detach().clone()
    half.weight = nn.Parameter(full_weight[:, KEPT].clone())  # as cut
    half.in_features = 3
    with torch.no_grad():
        cut = y - layer(x[:, KEPT]).double().numpy()
    error_ratio = refit_layer(nn.ModuleDict({"layer": layer}), "layer", full_weight, KEPT, statistics)
    weight, bias = fitted(x.double().numpy(), y, kind != "plain")
    product = layer.up.weight @ half.weight if kind == "pair" else half.weight
    np.testing.assert_allclose(product.detach(), weight, rtol=1e-3, atol=1e-4)
    owner = layer.up if kind == "pair" else layer
    if bias is not None:
        np.testing.assert_allclose(owner.bias.detach(), bias, rtol=1e-3, atol=1e-3)
    with torch.no_grad():
        error = y - layer(x[:, KEPT]).double().numpy()
    if kind == "plain":  # where there is no bias, and no other half to weigh the errors
        assert error_ratio == pytest.approx((error**2).sum() / (cut**2).sum(), rel=1e-3)
    assert (error**2).sum() < 0.7 * (cut**2).sum()


@pytest.mark.parametrize("bias", [True, False])
def test_reported_error_is_that_on_samples_held_back(bias, monkeypatch):
    monkeypatch.setattr(reconstruct, "RECONSTRUCTION_DAMPING", 0.0)
    torch.manual_seed(0)
    x, held_back = inputs().split([40, 10])
    layer = nn.Linear(6, 4, bias=bias)
    statistics, statistics.held_back = (empty_statistics(6, second=True) for _ in range(2))
    statistics.update(x)
    statistics.held_back.update(held_back)
    full_weight = layer.weight.detach().clone()
    with torch.no_grad():
        y, y_held_back = (layer(part).double().numpy() for part in (x, held_back))
    layer.weight = nn.Parameter(full_weight[:, KEPT].clone())  # as cut
    layer.in_features = 3
    error_ratio = refit_layer(nn.ModuleDict({"layer": layer}), "layer", full_weight, KEPT, statistics)
    weight, fitted_bias = fitted(x.double().numpy(), y, bias)
    kept_inputs = held_back[:, KEPT].double().numpy()
    error = y_held_back - kept_inputs @ weight.T - (fitted_bias if bias else 0)
    cut = y_held_back - kept_inputs @ full_weight[:, KEPT].double().numpy().T
    if bias:  # the cut, too, keeps the mean output on the calibration samples
        cut -= (y - x[:, KEPT].double().numpy() @ full_weight[:, KEPT].double().numpy().T).mean(axis=0)
    assert error_ratio == pytest.approx((error**2).sum() / (cut**2).sum(), rel=1e-3)


def test_refit_of_sparse_rows_equals_least_squares_of_nonzero_weights(monkeypatch):
    monkeypatch.setattr(reconstruct, "RECONSTRUCTION_DAMPING", 0.0)
    torch.manual_seed(0)
    x = inputs()
    layer = nn.Linear(6, 4)
    mark_masked(layer)
    with torch.no_grad():
        layer.weight[0, 2] = layer.weight[1, 0] = layer.weight[1, 5] = layer.weight[3, KEPT] = 0
        y = layer(x).double().numpy()
    statistics = empty_statistics(6, second=True)
    statistics.update(x)
    full_weight = layer.weight.detach().clone()
    layer.weight = nn.Parameter(full_weight[:, KEPT].clone())  # as cut
    layer.in_features = 3
    refit_layer(nn.ModuleDict({"layer": layer}), "layer", full_weight, KEPT, statistics)
    for row in range(4):
        nonzero = (full_weight[row, KEPT] != 0).numpy()
        columns = np.concatenate([x[:, KEPT].double().numpy()[:, nonzero], np.ones((len(x), 1))], axis=1)
        expected = np.linalg.lstsq(columns, y[:, row], rcond=None)[0]
        np.testing.assert_allclose(layer.weight[row].detach()[nonzero], expected[:-1], rtol=1e-2, atol=1e-3)
        assert (layer.weight[row].detach()[~nonzero] == 0).all()
        assert layer.bias[row].item() == pytest.approx(expected[-1], rel=1e-2, abs=1e-2)


def test_refit_without_observed_inputs_keeps_plain_cut():
    layer = nn.Linear(6, 2, bias=False)
    full_weight = layer.weight.detach().clone()
    layer.weight = nn.Parameter(full_weight[:, KEPT].clone())
    model = nn.ModuleDict({"layer": layer})
    assert refit_layer(model, "layer", full_weight, KEPT, empty_statistics(6, second=True)) == 1.0
    assert torch.equal(layer.weight, full_weight[:, KEPT])


def pruned(source, family, out, **settings):
    settings = PruneSettings(
        **({"targets": ["heads", "ffn"], "importance": "magnitude", "keep_ratio": 0.5} | settings)
    )
    return every_family.run_stage(Prune(), settings, source, family, out)


@pytest.mark.parametrize("family", ["t5", "gpt2"])
def test_reconstruction_lowers_output_error(family, tmp_path):
    source = every_family.model_with_layers(family, 2)
    expected = harness.logits(load_model(source)[0])
    plain = pruned(source, family, tmp_path / "plain", reconstruct=False)
    refit = pruned(source, family, tmp_path / "fit")
    assert plain.details["reconstruction_error"] == {}
    assert plain.details["kept_neurons"] == refit.details["kept_neurons"]
    error_ratios = refit.details["reconstruction_error"]
    assert len(error_ratios) == len(refit.details["kept_heads"]) + len(refit.details["kept_neurons"])
    assert all(0 <= part < 1 for part in error_ratios.values())
    if family != "t5":  # on other ids than those of the rows, of which a random T5 has few
        errors = [
            float((harness.logits(harness.load_output_model(c)) - expected).square().mean())
            for c in (plain, refit)
        ]
        assert errors[1] < errors[0]


def test_shared_layer_is_pruned_once_and_fitted_on_all_uses(tmp_path):
    source = every_family.model_with_layers("bert", 2)
    shared = every_family.run_stage(
        ShareWeights(), ShareWeightsSettings(targets=["ffn"]), source, "bert", tmp_path / "shared"
    ).out
    ctx = pruned(shared, "bert", tmp_path / "fit", targets=["ffn"])
    assert list(ctx.details["reconstruction_error"]) == ["bert.encoder.layer.0.output.dense"]
    model = harness.load_output_model(ctx)
    first, second = (block.output.dense for block in model.bert.encoder.layer)
    assert first is second
    assert first.in_features == 32


def test_missing_samples_disable_reconstruction_with_warning(tmp_path):
    source = every_family.model_with_layers("bert", 1)
    settings = {"importance": "magnitude", "keep_ratio": 0.5}
    task = "text-classification"
    chosen = harness.run_stage(Prune(), PruneSettings(**settings), source, tmp_path / "a", task)
    meant = harness.run_stage(
        Prune(), PruneSettings(**settings, reconstruct=False), source, tmp_path / "b", task
    )
    assert message_codes(w for w in chosen.warnings if w not in meant.warnings) == ["no-calibration-data"]
    a, b = (harness.load_output_model(ctx).state_dict() for ctx in (chosen, meant))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_fewer_tokens_than_inputs_warn(tmp_path):
    ctx = pruned(
        every_family.model_with_layers("bert", 1),
        "bert",
        tmp_path / "out",
        calibration_samples=1,
        targets=["ffn"],
    )
    (warning,) = [w for w in ctx.warnings if w.code == "few-calibration-tokens"]
    assert "32 inputs" in warning.message
