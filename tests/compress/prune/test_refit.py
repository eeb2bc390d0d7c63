"""The refit of narrower states against numpy's least squares, and what it gives back in a model."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from smelt.calibration.samples import load_calibration_samples
from smelt.compress.prune import width
from smelt.compress.prune.reconstruct import RECONSTRUCTION_DAMPING
from smelt.compress.prune.width import LayerInputs, fit_logits, fit_norm, refit_narrow_layer, refit_width
from smelt.compress.share_weights import ShareWeights, ShareWeightsSettings
from smelt.data.splits import Columns
from smelt.models.checkpoint import load_model
from smelt.models.families.registry import FAMILIES, output_modules
from smelt.models.hidden_width import hidden_width, prune_hidden_width
from smelt.tasks.read_split import read_split
from tests.support import harness
from tests.support.models import every_family


class _One(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.reader = nn.Linear(5, 3, bias=bias)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_held_back", [0, 50])
def test_refit_layer_equals_ridge_regression(bias, num_held_back):
    """By numpy on rows that stand for the ridge: sqrt(e) (W' - W_k) = 0."""
    draw = torch.Generator().manual_seed(0)
    full_inputs, narrow_inputs = (
        torch.randn(200, 8, generator=draw) + 1,
        torch.randn(200, 5, generator=draw) - 2,
    )
    full_inputs[:, :5] += narrow_inputs
    old, model = torch.randn(3, 8, generator=draw), _One(bias)
    cut, shift = model.reader.weight.detach().clone().double(), model.reader.bias
    before = None if shift is None else shift.detach().clone().double()
    count = 200 - num_held_back
    judged = (full_inputs[count:], narrow_inputs[count:]) if num_held_back else None
    layer_inputs = LayerInputs(full_inputs[:count], narrow_inputs[:count], judged)
    error_ratio = refit_narrow_layer(model, "reader", old, layer_inputs)
    all_x, all_y = narrow_inputs.double().numpy(), (full_inputs.double() @ old.double().t()).numpy()
    x, y = all_x[:count], all_y[:count]
    centered = (x - x.mean(0), y - y.mean(0)) if bias else (x, y)
    e = RECONSTRUCTION_DAMPING * np.trace(centered[0].T @ centered[0]) / 5
    rows = np.concatenate([centered[0], np.sqrt(e) * np.eye(5)])
    values = np.concatenate([centered[1], np.sqrt(e) * cut.numpy().T])
    expected = np.linalg.lstsq(rows, values, rcond=None)[0].T
    np.testing.assert_allclose(model.reader.weight.detach().numpy(), expected, atol=1e-5)
    residual = y - x @ expected.T
    if before is not None:
        moved = model.reader.bias.detach().double() - before
        np.testing.assert_allclose(moved.numpy(), residual.mean(0), atol=1e-5)
    judged_x, judged_y = (values[count:] if num_held_back else values for values in (all_x, all_y))
    error = judged_y - judged_x @ expected.T - (residual.mean(0) if bias else 0)
    assert error_ratio == pytest.approx(
        np.square(error).sum() / np.square(judged_y - judged_x @ cut.numpy().T).sum(), abs=1e-6
    )


@pytest.mark.parametrize(("kind", "plus_one"), [("layer", False), ("rms", False), ("rms", True)])
def test_refit_norm_recovers_scale_and_shift_per_channel(kind, plus_one):
    draw = torch.Generator().manual_seed(0)
    norm = nn.LayerNorm(4) if kind == "layer" else nn.Module()
    norm.weight = nn.Parameter(torch.rand(4, generator=draw) + 0.5 - int(plus_one))
    x = torch.randn(300, 4, generator=draw)
    weight_offset = 1 if plus_one else 0
    shift = norm.bias if kind == "layer" else 0
    outputs = x * (weight_offset + norm.weight) + shift
    target = outputs.detach() * torch.tensor([2.0, 0.5, 1.0, 3.0]) + (0.7 if kind == "layer" else 0)
    fitted = fit_norm(norm, target, outputs.detach(), plus_one)
    refit_outputs = x * (weight_offset + norm.weight) + (norm.bias if kind == "layer" else 0)
    torch.testing.assert_close(fitted, refit_outputs.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(fitted, target, atol=0.2, rtol=0.05)  # nearly: the ridge holds it back


@pytest.mark.parametrize("family", ["bart", "t5", "gpt2", "gemma"])
def test_width_refit_lowers_model_error(family, tmp_path):
    original, _ = load_model(every_family.model_with_layers(family, 2))
    keep = torch.tensor([channel for channel in range(hidden_width(original)) if channel % 4 != 1])
    task = FAMILIES[family].tasks[0]
    ctx = harness.make_context(tmp_path / "out", task)
    rows = _rows(original, family, task, ctx, tmp_path)
    cut = copy.deepcopy(original)
    prune_hidden_width(cut, keep.tolist())
    plain = copy.deepcopy(cut)
    error_ratios = refit_width(original, cut, keep, rows, ctx)
    assert error_ratios
    assert all(0 <= value <= 1 for value in error_ratios.values())
    module_names = {name for name, _ in original.named_modules()}
    assert set(error_ratios) <= module_names
    errors = [_error(original, model, rows) for model in (plain, cut)]
    assert errors[1] < 0.9 * errors[0]
    assert torch.equal(
        harness.logits(original), harness.logits(load_model(every_family.model_with_layers(family, 2))[0])
    )


@pytest.mark.parametrize("family", ["marian"])
def test_shared_layers_are_refit_on_all_uses(family, tmp_path):
    shared_folder = every_family.run_stage(
        ShareWeights(),
        ShareWeightsSettings(),
        every_family.model_with_layers(family, 2),
        family,
        tmp_path / "shared",
    ).out
    original, _ = load_model(shared_folder)
    task = FAMILIES[family].tasks[0]
    ctx = harness.make_context(tmp_path / "out", task)
    rows = _rows(original, family, task, ctx, tmp_path)
    cut = copy.deepcopy(original)
    keep = torch.tensor([channel for channel in range(hidden_width(original)) if channel % 4 != 1])
    prune_hidden_width(cut, keep.tolist())
    plain = copy.deepcopy(cut)
    assert all(value <= 1 for value in refit_width(original, cut, keep, rows, ctx).values())
    assert _error(original, cut, rows) < 0.9 * _error(original, plain, rows)


def _rows(model, family, task, ctx, space):
    from smelt.core.artifact import Artifact
    from tests.support.models import causal, tiny

    source: Artifact = tiny.as_artifact(every_family.model_with_layers(family, 2), task)
    make = {"language-modeling": lambda p: causal.write_lines(p.with_suffix(".txt"), 2)}.get(
        task,
        lambda p: (tiny.write_labeled if task == "text-classification" else tiny.write_pairs)(
            p.with_suffix(".jsonl")
        ),
    )
    ctx.data["train"] = read_split(str(make(space / "rows")), task, Columns(), space)
    return load_calibration_samples(model, source, 64, ctx, "prune", padded=True)


def _error(original, model, rows):
    """Return the squared distance of the last states' products, at tokens."""
    from smelt.calibration.samples import model_outputs

    total = 0.0
    for a, b in zip(model_outputs(original, rows.batches), model_outputs(model, rows.batches), strict=True):
        total += float((a - b).square().mean())
    return total


@pytest.mark.parametrize("has_bias", [True, False])
def test_logit_fit_equals_least_squares_with_fixed_output_layer(has_bias):
    """By numpy on one row for each logit of each token, in the scales and, with a bias, the shifts."""
    draw = np.random.default_rng(0)
    old, new = draw.normal(size=(60, 6)) + 1, draw.normal(size=(60, 4)) - 1
    old[:, :4] += 2 * new
    old_weight, weight = draw.normal(size=(9, 6)), draw.normal(size=(9, 4))
    held_back = (torch.tensor(old[40:]), torch.tensor(new[40:]))
    inputs = LayerInputs(torch.tensor(old[:40]), torch.tensor(new[:40]), held_back)
    scale, shift, error_ratio = fit_logits(torch.tensor(old_weight), torch.tensor(weight), inputs, has_bias)
    y = new[:40] - new[:40].mean(0) * has_bias
    x = old[:40] - old[:40].mean(0) * has_bias
    rows = np.concatenate([weight * token for token in y])
    e = RECONSTRUCTION_DAMPING * np.square(rows).sum() / 4
    rows, values = (
        np.concatenate([rows, np.sqrt(e) * np.eye(4)]),
        np.concatenate([(x @ old_weight.T).flatten(), np.full(4, np.sqrt(e))]),
    )
    expected = np.linalg.lstsq(rows, values, rcond=None)[0]
    np.testing.assert_allclose(scale, expected, atol=1e-9)
    mean_error = old[:40].mean(0) @ old_weight.T - (expected * new[:40].mean(0)) @ weight.T
    e = RECONSTRUCTION_DAMPING * np.square(weight).sum() / 4
    rows, values = (np.concatenate(pair) for pair in (
        (weight, np.sqrt(e) * np.eye(4)), (mean_error, np.zeros(4)),
    ))  # fmt: skip
    np.testing.assert_allclose(shift, np.linalg.lstsq(rows, values, rcond=None)[0] * has_bias, atol=1e-9)
    logits = old[40:] @ old_weight.T
    errors = [
        np.square(logits - y @ weight.T).sum() for y in (new[40:] * scale.numpy() + shift.numpy(), new[40:])
    ]
    assert error_ratio == pytest.approx(errors[0] / errors[1])


@pytest.mark.parametrize(("family", "options"), [
    ("marian", {}), ("gemma", {"tie_word_embeddings": True}), ("t5", {"gated": False}),
])  # fmt: skip
def test_last_norm_is_fitted_to_logits_of_tied_output_layer(family, options, tmp_path):
    source = every_family.make_model(tmp_path / "model", family, **options)
    original, _ = load_model(source)
    head = output_modules(original)[0]
    assert original.get_submodule(head).weight is original.get_input_embeddings().weight
    task = FAMILIES[family].tasks[0]
    ctx = harness.make_context(tmp_path / "out", task)
    rows = _rows(original, family, task, ctx, tmp_path)
    keep = torch.tensor([channel for channel in range(hidden_width(original)) if channel % 4 != 1])
    models, ratios = [], []
    for improves in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if not improves:  # then the norm is left as it is
                patch.setattr(width, "_divergence", lambda *_: 1.0)
            model = copy.deepcopy(original)
            prune_hidden_width(model, keep.tolist())
            ratios.append(refit_width(original, model, keep, rows, ctx)[head])
            models.append(model)
    errors = [_error(original, model, rows) for model in models]
    assert ratios[1] < ratios[0] == 1
    assert errors[1] / errors[0] == pytest.approx(ratios[1], rel=0.15)  # batches differ in length
    assert models[1].get_submodule(head).weight is models[1].get_input_embeddings().weight


def test_divergence_of_logits_includes_bias_of_model(tmp_path, monkeypatch):
    original, _ = load_model(every_family.make_model(tmp_path / "model", "marian"))
    original.final_logits_bias.normal_(generator=torch.Generator().manual_seed(0))
    ctx = harness.make_context(tmp_path / "out", "translation")
    rows = _rows(original, "marian", "translation", ctx, tmp_path)
    results, divergence = [], width._divergence
    monkeypatch.setattr(
        width, "_divergence", lambda *a: results.append((a, divergence(*a))) or results[-1][1]
    )
    model, keep = copy.deepcopy(original), torch.arange(hidden_width(original) - 4)
    prune_hidden_width(model, keep.tolist())
    refit_width(original, model, keep, rows, ctx)
    assert len(results) == 2
    for (old, old_weight, new, weight, _), value in results:
        bias = original.final_logits_bias.double()
        p, q = ((x @ w.double().T + bias).softmax(-1) for x, w in ((old, old_weight), (new, weight)))
        assert value == pytest.approx(float((p * (p.log() - q.log())).sum()))
