"""Zeros that come while the weights train: which, when, by what gradient, and that they last."""

import pytest
import torch
from torch.nn import functional as F

from smelt.compress.finetune import Finetune, FinetuneSettings
from smelt.compress.quantize.settings import QuantizeSettings
from smelt.compress.quantize.stage import Quantize
from smelt.compress.share_weights import ShareWeights, ShareWeightsSettings
from smelt.compress.sparsify.gradual import GradualSparsifier, MaskedWeight
from smelt.compress.sparsify.settings import GradualSparsitySettings
from smelt.compress.sparsify.stage import Sparsify, SparsifySettings
from smelt.core.errors import InputError
from smelt.core.messages import message_codes
from smelt.models.checkpoint import load_model
from smelt.models.edits import read_edits
from tests.support import harness
from tests.support.expected_errors import raises_code, raises_setting_codes
from tests.support.models import every_family, tiny

SHORT = {"max_steps": 12, "batch_size": 4, "learning_rate": 3e-3, "precision": "fp32", "num_evals": 2}


def gradual(family="bert", **settings):
    model, _ = load_model(every_family.model_with_layers(family, 1))
    return GradualSparsifier(model, GradualSparsitySettings(**settings)), model


def zeros_of(model, names):
    return {name: (model.get_submodule(name).weight == 0) for name in names}


def test_masked_weight_gradients_equal_formula():
    """Sanh et al. 2020, equation 2, and appendix A.1: dL/dS = dL/dW' W; dL/dW = dL/dW' M."""
    torch.manual_seed(0)
    x, weight = torch.randn(5, 4), torch.randn(3, 4, requires_grad=True)
    scores, mask = torch.zeros(3, 4, requires_grad=True), (torch.rand(3, 4) > 0.5).float()
    target = torch.randn(5, 3)
    ((x @ MaskedWeight.apply(weight, scores, mask).T - target) ** 2).sum().backward()
    slope = 2 * (x @ (weight * mask).detach().T - target).T @ x  # of a sum of squares, by hand
    torch.testing.assert_close(weight.grad, slope * mask)
    torch.testing.assert_close(scores.grad, slope * weight.detach())


def test_sparsity_follows_cubic_schedule():
    masks, _model = gradual(method="magnitude", sparsity=0.8, start=0.1, end=0.6)
    name, layer = next(iter(masks.layers.items()))
    # equation 1 with s_i 0, s_f 0.8, t0 10, t1 60
    for step, share in {5: 0.0, 10: 0.0, 20: 0.3904, 35: 0.7, 50: 0.7936, 60: 0.8, 100: 0.8}.items():
        masks._before_step(step, 100)
        mask = masks._mask(name, layer)
        assert float((mask == 0).float().mean()) == pytest.approx(share, abs=1 / mask.numel()), step
        assert masks._may_be_best(step) == (step >= 60)
        least = layer.weight.abs()[mask == 0]
        assert not len(least) or least.max() <= layer.weight.abs()[mask == 1].min()
    assert not masks._may_be_best(0)


def test_movement_keeps_weights_with_highest_scores():
    masks, _model = gradual(sparsity=0.75, start=0.0, end=0.5)
    name, layer = next(iter(masks.layers.items()))
    with torch.no_grad():
        masks.scores[name].copy_(torch.randn_like(layer.weight))
    masks._before_step(10, 10)
    kept_mask = masks._mask(name, layer).bool()
    assert int(kept_mask.sum()) == layer.weight.numel() // 4
    assert masks.scores[name][kept_mask].min() > masks.scores[name][~kept_mask].max()


def test_soft_movement_keeps_scores_above_threshold_and_at_least_a_few():
    masks, _model = gradual(method="soft-movement", threshold=0.25, start=0.0, end=0.5)
    name, layer = next(iter(masks.layers.items()))
    with torch.no_grad():
        masks.scores[name].copy_(torch.randn_like(layer.weight))
    masks._before_step(10, 10)
    # sigmoid(s) > 1/4 where s > log(1/3)
    assert torch.equal(masks._mask(name, layer).bool(), masks.scores[name].detach() > -1.0986123)
    masks._before_step(1, 10)  # of 5 updates until all of the threshold
    early = torch.tensor(0.25 * (1 - 0.8**3)).logit()
    assert torch.equal(masks._mask(name, layer).bool(), masks.scores[name].detach() > early)
    with torch.no_grad():
        masks.scores[name].sub_(100.0)
    masks._before_step(10, 10)
    assert int(masks._mask(name, layer).sum()) == round(0.005 * layer.weight.numel())


def test_two_of_four_pattern_removes_smallest_weights_first():
    masks, _model = gradual(method="magnitude", pattern="2:4", start=0.0, end=1.0)
    name, layer = next(iter(masks.layers.items()))
    masks._before_step(4, 10)
    early = masks._mask(name, layer) == 0
    masks._before_step(10, 10)
    late = masks._mask(name, layer) == 0
    assert float(early.float().mean()) == pytest.approx(0.392, abs=0.001)  # half of 1 - 0.6^3
    assert bool((early <= late).all())
    assert ((~late).reshape(-1, 4).sum(dim=1) == 2).all()
    assert layer.weight.abs()[early].max() <= layer.weight.abs()[late & ~early].min()


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    home = tmp_path_factory.mktemp("rows")
    return tiny.read_pairs(home)


@pytest.mark.parametrize("asked", [{"sparsity": 0.7}, {"method": "magnitude", "pattern": "2:4"}])
def test_stored_model_is_sparse_and_equals_validated_model(asked, rows, tmp_path):
    source = tiny.write_marian(tmp_path / "model", num_layers=1)
    settings = FinetuneSettings(**SHORT, sparsify={**asked, "end": 0.5})
    ctx = harness.run_stage(Finetune(), settings, source, tmp_path / "out", data=rows)
    model, share = harness.load_output_model(ctx), asked.get("sparsity", 0.5)
    by_layer = ctx.details["sparsity_by_layer"]
    assert all(layer_sparsity == pytest.approx(share, abs=0.01) for layer_sparsity in by_layer.values())
    zeros = zeros_of(model, by_layer)
    assert sum(int(z.sum()) for z in zeros.values()) == ctx.details["zeros"]
    assert {edit["module"] for edit in read_edits(ctx.out)} == set(by_layer)
    validations = {v["step"]: v["loss"] for v in ctx.details["training"]["validations"]}
    best_step = ctx.details["training"]["kept_step"]
    assert best_step in (6, 12)  # never the dense beginning
    assert "zeros-not-faster" in message_codes(ctx.warnings)
    retrain_settings = FinetuneSettings(**{**SHORT, "max_steps": 2, "num_evals": 1}, weight_decay=0.1)
    later = harness.run_stage(Finetune(), retrain_settings, ctx.out, tmp_path / "again", data=rows)
    assert later.details["training"]["validations"][0]["loss"] == pytest.approx(
        validations[best_step], rel=1e-4
    )
    for name, new_zeros in zeros_of(harness.load_output_model(later), by_layer).items():
        assert bool((new_zeros >= zeros[name]).all())


def test_existing_zeros_are_removed_first(tmp_path):
    settings = SparsifySettings(method="magnitude", sparsity=0.3)
    ctx = every_family.run_stage(
        Sparsify(), settings, every_family.model_with_layers("bert", 1), "bert", tmp_path / "a"
    )
    model = harness.load_output_model(ctx)
    masks = GradualSparsifier(model, GradualSparsitySettings(sparsity=0.5, start=0.0, end=0.5))
    for scores in masks.home:
        torch.nn.init.normal_(scores)
    masks._before_step(10, 10)
    for name, layer in masks.layers.items():
        assert not bool(((layer.weight == 0) & masks._mask(name, layer).bool()).any())
        assert float(masks._mask(name, layer).mean()) == pytest.approx(0.5, abs=0.01)


def test_as_stored_applies_zeros_and_restores_weights():
    masks, model = gradual(sparsity=0.5, start=0.0, end=0.5)
    for scores in masks.home:
        torch.nn.init.normal_(scores)
    masks._before_step(10, 10)
    expected, masked_logits = (
        {n: p.detach().clone() for n, p in model.named_parameters()},
        harness.logits(model),
    )
    with masks.as_stored():
        plain = {name: layer.weight.detach().clone() for name, layer in masks.layers.items()}
        assert all(float((w == 0).float().mean()) == pytest.approx(0.5, abs=0.01) for w in plain.values())
        _name, layer = next(iter(masks.layers.items()))
        x = torch.randn(2, layer.in_features)
        stored = F.linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(layer(x), stored)
    assert all(torch.equal(p, expected[n]) for n, p in model.named_parameters())
    torch.testing.assert_close(harness.logits(model), masked_logits)


@pytest.mark.parametrize("method", ["magnitude", "movement"])
def test_each_mask_is_computed_once_per_validation(method, monkeypatch):
    """To choose one takes ten times as long as the product of a batch; a decoder is called for each token."""
    masks, model = gradual(method=method, sparsity=0.5, start=0.0, end=0.5)
    chosen, choose = [], masks._mask
    monkeypatch.setattr(masks, "_mask", lambda name, layer: chosen.append(name) or choose(name, layer))
    masks._before_step(10, 10)
    chosen.clear()
    first, second = harness.logits(model), harness.logits(model)
    assert chosen == list(masks.layers)
    torch.testing.assert_close(first, second)
    with torch.no_grad():  # as other weights that are validated come
        for name, layer in masks.layers.items():
            (masks.scores.get(name, layer.weight)).copy_(torch.randn_like(layer.weight))
    other = harness.logits(model)
    assert len(chosen) == 2 * len(masks.layers)
    with masks.as_stored():
        torch.testing.assert_close(harness.logits(model), other)


def test_finalize_without_updates_applies_full_sparsity(tmp_path):
    """A run that was stopped behind the last update restores the weights and makes no update."""
    masks, model = gradual(method="magnitude", sparsity=0.5)
    ctx = harness.make_context(tmp_path / "out")
    masks.finalize(ctx)
    assert ctx.details["sparsity"] == pytest.approx(0.5, abs=0.01)
    assert harness.logits(model).isfinite().all()


def test_shared_layer_has_one_mask(tmp_path):
    source = every_family.model_with_layers("bert", 2)
    ctx = every_family.run_stage(
        ShareWeights(), ShareWeightsSettings(layers_per_group=2), source, "bert", tmp_path / "shared"
    )
    model = harness.load_output_model(ctx)
    assert len(GradualSparsifier(model, GradualSparsitySettings()).layers) == 6


def test_gradual_sparsity_after_quantize_is_rejected(rows, tmp_path):
    source = tiny.write_marian(tmp_path / "model", num_layers=1)
    codes = harness.run_stage(Quantize(), QuantizeSettings(scheme="int4"), source, tmp_path / "q", data=rows)
    settings = FinetuneSettings(**SHORT, sparsify={})
    with raises_code("behind-quantize", InputError) as caught:
        harness.run_stage(Finetune(), settings, codes.out, tmp_path / "out", data=rows)
    short = FinetuneSettings(**(SHORT | {"max_steps": 1, "num_evals": 0}), lora={"r": 2})
    beside = harness.run_stage(Finetune(), short, codes.out, tmp_path / "lora", data=rows)
    assert "QatLinear" in str(caught.value)
    with raises_code("behind-quantize", InputError) as caught:
        harness.run_stage(Finetune(), settings, beside.out, tmp_path / "again", data=rows)
    assert "LowRankCorrectedLinear" in str(caught.value)


@pytest.mark.parametrize(("wrong", "code", "named"), [
    ({"sparsify": {"start": 0.5, "end": 0.4}}, "end-before-start", "start"),
    ({"sparsify": {"sparsity": 0.5, "pattern": "2:4"}}, "settings-conflict", "pattern"),
    ({"sparsify": {"method": "soft-movement", "sparsity": 0.5}}, "unused-setting", "sparsity"),
    ({"sparsify": {"threshold": 0.5}}, "unused-setting", "threshold"),
    ({"sparsify": {"threshold": 0.5, "penalty": 1.0}}, "unused-setting", "penalty has"),
    ({"sparsify": {"pattern": "4:2"}}, "wrong-pattern", "4:2"),
    ({"sparsify": {}, "lora": {}}, "settings-conflict", "lora, sparsify and learned_masks"),
])  # fmt: skip
def test_conflicting_gradual_settings_are_rejected(wrong, code, named):
    with raises_setting_codes(code) as caught:
        FinetuneSettings(**wrong)
    assert named in caught.value.errors()[0]["msg"]
