"""The stage with what: [channels]: which channels of convolutions go, and what goes with them."""

import pytest
import torch
import torch_pruning
from pydantic import ValidationError

from smelt.compress.factorize.settings import FactorizeSettings
from smelt.compress.factorize.stage import Factorize
from smelt.compress.prune.channels import find_channels
from smelt.compress.prune.importances.magnitude import filter_magnitudes
from smelt.compress.prune.importances.taylor import gate_scores
from smelt.compress.prune.settings import PruneSettings
from smelt.compress.prune.stage import Prune
from smelt.compress.prune.units import whole_kernel
from smelt.core.messages import message_codes
from smelt.models.checkpoint import load_model, save_model
from smelt.models.edits import read_edits
from tests.support import harness
from tests.support.models import images

BASIC = {"embedding_size": 16, "hidden_sizes": [16, 24], "depths": [1, 2]}
KINDS = {"basic": BASIC, "bottleneck": BASIC | {"hidden_sizes": [64, 96], "layer_type": "bottleneck"}}


@pytest.fixture(scope="module", params=KINDS)
def source(request, tmp_path_factory):
    return images.write_model(
        tmp_path_factory.mktemp(request.param) / "model", "resnet", **KINDS[request.param]
    )


@pytest.fixture(scope="module")
def basic(tmp_path_factory):
    return images.write_model(tmp_path_factory.mktemp("basic") / "model", "resnet", **BASIC)


def run(source, out, **settings):
    rows = images.read_rows(images.write_rows(out.parent / "rows.jsonl"))
    chosen = PruneSettings.model_validate(
        {"targets": ["channels"], "calibration_samples": 8, "multiple_of": 4, **settings}
    )
    return harness.run_stage(Prune(), chosen, source, out, images.TASK, {"train": rows})


def logits(model):
    with torch.no_grad():
        return model(torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))).logits


def free(model):
    """Return by hand the channels that can go, by the module that norms them."""
    blocks = [b for stage in model.resnet.encoder.stages for b in stage.layers]
    return [
        (layer, next_layer) for b in blocks for layer, next_layer in zip(b.layer, b.layer[1:], strict=False)
    ]


def test_removing_zero_channels_preserves_outputs(source, tmp_path):
    model, edits = load_model(source)
    with torch.no_grad():
        for layer, _ in free(model):
            layer.convolution.weight[::2], layer.normalization.weight[::2] = 0, 0
            layer.normalization.bias[::2] = 0
    (tmp_path / "idle").mkdir()
    save_model(model, edits, tmp_path / "idle", source)
    ctx = run(tmp_path / "idle", tmp_path / "out", keep_ratio=0.5, multiple_of=1, importance="magnitude")
    pruned, _ = load_model(ctx.out)
    before = logits(model)
    assert torch.allclose(logits(pruned), before, atol=1e-6 * float(before.abs().max()))
    assert all(
        torch.equal(new.normalization.running_var, old.normalization.running_var[1::2])
        for (new, _), (old, _) in zip(free(pruned), free(model), strict=True)
    )
    assert ctx.details["kept_channels"] == {g.name: g.count(model) // 2 for g in find_channels(model)}
    assert ctx.details["parameters_after"] < 0.7 * ctx.details["parameters_before"]
    assert ctx.details["flops_after"] < 0.8 * ctx.details["flops_before"]


def test_pruned_channels_equal_torch_pruning(source, tmp_path):
    """torch-pruning follows the graph from the first convolution's outputs to all that is coupled."""
    ctx = run(source, tmp_path / "out", keep_ratio=0.5, importance="magnitude")
    model, _ = load_model(source)
    scores = filter_magnitudes(model, find_channels(model))
    for group in find_channels(model):
        kept_channels = scores[group.name].topk(ctx.details["kept_channels"][group.name]).indices.tolist()
        removed_channels = sorted(set(range(group.count(model))) - set(kept_channels))
        graph = torch_pruning.DependencyGraph().build_dependency(model, torch.zeros(1, 3, 16, 16))
        first = model.get_submodule(group.first)
        graph.get_pruning_group(first, torch_pruning.prune_conv_out_channels, removed_channels).prune()
    expected, pruned = model.state_dict(), load_model(ctx.out)[0].state_dict()
    assert set(expected) == set(pruned)
    for name, tensor in expected.items():
        assert torch.equal(tensor, pruned[name]), name


def test_channel_magnitude_is_l1_norm_of_filter(source):
    model, _ = load_model(source)
    groups = find_channels(model)
    assert len(groups) == len(free(model))
    for group, (layer, _) in zip(groups, free(model), strict=True):
        expected = torch.stack([f.abs().sum() for f in layer.convolution.weight.detach().double()])
        assert torch.allclose(filter_magnitudes(model, groups)[group.name], expected)


def test_channel_taylor_is_mean_squared_gate_gradient(basic):
    """Molchanov et al.: the gate's slope is the sum of scale times its slope and shift times its slope."""
    model, _ = load_model(basic)
    groups = find_channels(model)
    draw = torch.Generator().manual_seed(2)
    batches = [{"pixel_values": torch.randn(4, 3, 16, 16, generator=draw)} for _ in range(3)]

    def loss_of(model, batch):
        return model(**batch).logits.square().mean()

    gate_scores_by_group = gate_scores(model, groups, batches, loss_of)
    expected = {g.name: 0 for g in groups}
    for batch in batches:
        model.zero_grad()
        loss_of(model, batch).backward()
        for group in groups:
            norm = model.get_submodule(group.norm)
            slope = norm.weight * norm.weight.grad + norm.bias * norm.bias.grad
            expected[group.name] = expected[group.name] + slope.detach().double().square() / 3
    for name, scores in gate_scores_by_group.items():
        assert torch.allclose(scores, expected[name], rtol=1e-3, atol=1e-9 + 1e-4 * float(scores.max()))


@pytest.mark.parametrize("importance", ["taylor", "fisher", "random"])
def test_each_importance_keeps_requested_channels(importance, basic, tmp_path):
    ctx = run(basic, tmp_path / "out", importance=importance, keep_ratio=0.5)
    assert set(ctx.details["kept_channels"].values()) == {8, 12}


def test_global_scope_ranks_channels_across_layers(basic, tmp_path):
    ctx = run(basic, tmp_path / "out", scope="global", keep_ratio=0.5)
    assert sum(ctx.details["kept_channels"].values()) == (16 + 24 + 24) // 2
    assert min(ctx.details["kept_channels"].values()) >= 4


def test_factorized_convolutions_lose_channels(basic, tmp_path):
    method = "cp"
    thin = harness.run_stage(
        Factorize(), FactorizeSettings(method=method, keep_ratio=0.5), basic, tmp_path / "thin", images.TASK
    )
    ctx = run(thin.out, tmp_path / "out", keep_ratio=0.5, importance="magnitude")
    pruned, _ = load_model(ctx.out)
    assert torch.isfinite(logits(pruned)).all()
    thin_model, _ = load_model(thin.out)
    group = find_channels(thin_model)[0]
    module = thin_model.get_submodule(group.first)
    x = torch.randn(1, 16, 9, 9, generator=torch.Generator().manual_seed(0))
    plain = torch.nn.functional.conv2d(x, whole_kernel(module), padding=1)
    assert torch.allclose(module(x)[..., 1:-1, 1:-1], plain[..., 1:-1, 1:-1], atol=1e-3)


@pytest.mark.parametrize("wrong", [
    {"importance": "activation"}, {"targets": ["channels", "ffn"]}, {"budget": {"parameters": 0.5}},
    {"reconstruct": True}, {"keep_ratio": {"ffn": 0.5}},
])  # fmt: skip
def test_unsupported_channel_settings_are_rejected(wrong):
    with pytest.raises(ValidationError):
        PruneSettings.model_validate({"targets": ["channels"]} | wrong)


@pytest.mark.parametrize(
    ("what", "kind"),
    [(["channels"], "vit"), (["channels"], "bert"), (["ffn"], "resnet"), (["width"], "resnet")],
)
def test_plan_reports_prunable_units_of_family(what, kind):
    settings = PruneSettings.model_validate({"targets": what})
    [error], _ = Prune.check_model(settings, {"model_type": kind})
    assert (error.setting, error.code) == ("targets", "does-not-fit-model")


def test_too_few_channels_to_prune_warns(basic, tmp_path):
    ctx = run(basic, tmp_path / "out", keep_ratio=0.75, multiple_of=32, importance="magnitude")
    assert read_edits(ctx.out) == []
    assert "nothing-to-remove" in message_codes(ctx.warnings)
