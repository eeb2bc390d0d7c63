"""Channels of a user's PyTorch module: which are found, and that the smaller module computes the same."""

import pytest
import torch
import torch_pruning
from torch import nn

from smelt.compress.prune import module_channels
from smelt.compress.prune.importances.taylor import gate_scores
from smelt.compress.prune.module_channels import cut_module_channels, find_module_channels
from smelt.compress.prune.settings import PruneSettings
from smelt.compress.prune.stage import Prune
from smelt.compress.sparsify.stage import Sparsify, SparsifySettings
from smelt.core.errors import InputError
from smelt.models.checkpoint import load_model
from smelt.models.edits import is_masked
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.models import images, user_modules

SIZE = user_modules.SIZE


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def load(tmp_path, function):
    return load_model(user_modules.model_folder(tmp_path / function, function))[0]


@torch.no_grad()
def logits(model, seed=3):
    pixels = torch.randn(4, 3, *SIZE, generator=torch.Generator().manual_seed(seed))
    return model(pixel_values=pixels).logits


def sizes(model):
    return {
        n: tuple(m.weight.shape) for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)
    }


def test_groups_of_residual_network_are_its_stream_and_its_inner_channels(tmp_path):
    groups = {group.name: group for group in find_module_channels(load(tmp_path, "cnn"), SIZE)}
    readers = {name: {each.layer for each in group.axes if each.axis == 1} for name, group in groups.items()}
    stream = next(name for name, layers in readers.items() if "network.head" in layers)
    assert readers.pop(stream) == {"network.blocks.0.conv1", "network.blocks.2.conv1", "network.head"}
    assert sorted(map(sorted, readers.values())) == [["network.blocks.0.conv2"], ["network.blocks.2.conv2"]]
    head = next(each for each in groups[stream].axes if each.layer == "network.head")
    assert head.channels.tolist() == torch.arange(16).repeat_interleave(16).tolist()  # flattened


def test_groups_of_mixer_are_the_inner_channels_of_its_perceptrons(tmp_path):
    names = [group.name for group in find_module_channels(load(tmp_path, "mixer"), SIZE)]
    assert sorted(names) == [
        f"network.layers.{n}.{part}.0" for n in (0, 1) for part in ("channels", "tokens")
    ]


def test_split_channels_and_own_parameters_are_kept(tmp_path):
    groups = find_module_channels(load(tmp_path, "gated"), SIZE)
    assert {group.name for group in groups} == {"network.first", "network.last"}


def test_magnitude_is_sum_of_l1_norms_of_all_filters_of_a_channel(tmp_path):
    model = load(tmp_path, "cnn")
    group = next(g for g in find_module_channels(model, SIZE) if "network.head" in {a.layer for a in g.axes})
    layers = ["network.stem.0", "network.blocks.0.conv2", "network.blocks.2.conv2"]
    weights = [model.get_submodule(name).weight.detach().double() for name in layers]
    expected = sum(weight.abs().flatten(1).sum(dim=1) for weight in weights)
    assert torch.allclose(group.filter_norms(model), expected)


@pytest.mark.parametrize("function", ["cnn", "mixer", "attentive", "gated"])
def test_saved_module_equals_module_with_removed_channels_at_zero(function, tmp_path):
    source = user_modules.model_folder(tmp_path / "own", function)
    settings = PruneSettings(targets=["channels"], keep_ratio=0.5, multiple_of=4, importance="magnitude")
    ctx = harness.run_stage(Prune(), settings, source, tmp_path / "out", images.TASK)
    model, pruned = load_model(source)[0], load_model(ctx.out)[0]
    for group in find_module_channels(model, SIZE):
        kept_channels = group.filter_norms(model).topk(group.size // 2).indices
        gate = torch.zeros(group.size).index_fill(0, kept_channels, 1)
        group.add_gate(model, gate)
    expected = logits(model)
    assert torch.allclose(logits(pruned), expected, atol=1e-5 * float(expected.abs().max()))
    assert sizes(pruned) != sizes(model)
    assert ctx.details["parameters_after"] < ctx.details["parameters_before"]
    assert ctx.details["flops_after"] < ctx.details["flops_before"]
    norms = [(type(m), m.num_features) for m in pruned.modules() if isinstance(m, nn.BatchNorm2d)]
    kinds = [type(m).__name__ for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert [kind.__name__ for kind, _ in norms] == kinds


def test_pruned_tensors_equal_torch_prunings(tmp_path):
    model, reference = load(tmp_path, "cnn"), load(tmp_path, "cnn").network
    groups = find_module_channels(model, SIZE)
    kept_channels = {group.name: torch.arange(1, group.size, 2) for group in groups}
    cut_module_channels(model, [], groups, kept_channels, SIZE)
    for group in groups:
        graph = torch_pruning.DependencyGraph().build_dependency(reference, torch.zeros(1, 3, *SIZE))
        layer = reference.get_submodule(group.name.removeprefix("network."))
        removed = list(range(0, group.size, 2))
        graph.get_pruning_group(layer, torch_pruning.prune_conv_out_channels, removed).prune()
    expected, pruned = reference.state_dict(), model.network.state_dict()
    assert expected.keys() == pruned.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, pruned[name]), name


def test_gate_scores_are_squared_slopes_of_the_masks(tmp_path):
    model = load(tmp_path, "cnn")
    groups = find_module_channels(model, SIZE)
    batch = {"pixel_values": torch.randn(2, 3, *SIZE, generator=torch.Generator().manual_seed(2))}

    def loss_of(model, batch):
        return model(**batch).logits.square().sum()

    scores = gate_scores(model, groups, [batch, batch], loss_of)
    group, step = groups[0], 1e-3
    for channel in (0, 5):
        losses = []
        for change in (-step, step):
            gate = torch.ones(group.size)
            gate[channel] += change
            handles = group.add_gate(model, gate)
            losses.append(float(loss_of(model, batch).detach()))
            for handle in handles:
                handle.remove()
        slope = (losses[1] - losses[0]) / (2 * step)
        assert float(scores[group.name][channel]) == pytest.approx(slope**2, rel=0.05, abs=1e-6)


@pytest.mark.parametrize("importance", ["taylor", "fisher", "random"])
def test_each_importance_keeps_the_requested_channels(importance, tmp_path):
    source = user_modules.model_folder(tmp_path / "own", "cnn")
    rows = images.read_rows(tmp_path / "own" / "train.jsonl")
    settings = PruneSettings(targets=["channels"], keep_ratio=0.5, importance=importance)
    ctx = harness.run_stage(Prune(), settings, source, tmp_path / "out", images.TASK, data=rows)
    assert set(ctx.details["kept_channels"].values()) == {8}


def test_code_with_a_fixed_width_is_refused(tmp_path):
    source = user_modules.model_folder(tmp_path / "own", "fixed_width")
    settings = PruneSettings(targets=["channels"], keep_ratio=0.5, importance="magnitude")
    with raises_code("not-prunable", InputError):
        harness.run_stage(Prune(), settings, source, tmp_path / "out", images.TASK)


def test_changed_outputs_are_refused(tmp_path, monkeypatch):
    model = load(tmp_path, "mixer")
    groups = find_module_channels(model, SIZE)
    monkeypatch.setattr(module_channels, "_cut_layer", lambda *_: None)
    kept_channels = {groups[0].name: torch.arange(4)}
    with raises_code("not-prunable", InputError):
        cut_module_channels(model, [], groups, kept_channels, SIZE)


def test_pruned_sparse_layers_are_still_marked(tmp_path):
    source = user_modules.model_folder(tmp_path / "own", "mixer")
    sparse = harness.run_stage(
        Sparsify(), SparsifySettings(method="magnitude"), source, tmp_path / "sparse", images.TASK
    )
    settings = PruneSettings(targets=["channels"], keep_ratio=0.5, importance="magnitude")
    ctx = harness.run_stage(Prune(), settings, sparse.out, tmp_path / "out", images.TASK)
    masked = [name for name, module in load_model(ctx.out)[0].named_modules() if is_masked(module)]
    assert len(masked) == 8
