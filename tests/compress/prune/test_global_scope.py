"""Where all layers compete, those lose most whose units say least."""

import pytest
import torch
from torch import tensor

from smelt.compress.prune.importances.scores import UnitScores
from smelt.compress.prune.stage import Prune, PruneSettings
from smelt.compress.prune.units import allocate_globally
from smelt.models.checkpoint import load_model, save_model
from smelt.models.families.registry import blocks_of
from tests.support.models import every_family


def test_heads_are_removed_globally_and_one_is_kept_per_layer():
    scores = {"a": tensor([9.0, 8.0, 7.0, 6.0]), "b": tensor([0.1, 0.3, 0.2, 0.4]), "c": tensor([5.0, 0.5])}
    assert allocate_globally(scores, 0.6, 1) == {"a": 4, "b": 1, "c": 1}
    assert allocate_globally(scores, 0.7, 1) == {"a": 4, "b": 1, "c": 2}
    assert allocate_globally(scores, 0.1, 1) == {"a": 1, "b": 1, "c": 1}
    assert allocate_globally(scores, 1.0, 1) == {"a": 4, "b": 4, "c": 2}


def test_neurons_are_removed_in_blocks_by_mean_score():
    scores = {"a": tensor([1.0, 8.0, 2.0, 9.0, 3.0]), "b": tensor([7.0, 5.0, 6.0, 2.2])}
    # a: 9 8 | 3 2 | 1, b: 7 6 | 5 2.2
    assert allocate_globally(scores, 0.5, 2) == {"a": 2, "b": 2}
    assert allocate_globally(scores, 0.7, 2) == {"a": 2, "b": 4}
    assert allocate_globally(scores, 0.9, 2) == {"a": 4, "b": 4}
    assert allocate_globally(scores, 1.0, 2) == {"a": 5, "b": 4}
    # a: 9 8 | 3 2 | 1.9, b: 7 6 | 1.5 1: the one that is left over counts by itself
    scores = {"a": tensor([9.0, 8.0, 3.0, 2.0, 1.9]), "b": tensor([7.0, 6.0, 1.5, 1.0])}
    assert allocate_globally(scores, 0.75, 2) == {"a": 5, "b": 2}


def test_scores_are_normalized_by_layer_norm():
    normalized = UnitScores(
        {"a": tensor([3.0, 4.0])}, {"b": tensor([0.0, 0.0], dtype=torch.float64)}
    ).normalized()
    assert normalized.heads["a"].tolist() == pytest.approx([0.6, 0.8], rel=1e-6)
    assert normalized.neurons["b"].tolist() == [0, 0]
    same = UnitScores({"a": tensor([3.0, 4.0])}, {}, comparable_across_layers=True)
    assert same.normalized() is same


@pytest.mark.parametrize("importance", ["fisher", "random"])
def test_global_ratio_is_met_and_saved_model_loads(importance, tmp_path):
    source = every_family.model_with_layers("t5", 3)
    settings = PruneSettings(
        targets=["heads", "ffn"],
        keep_ratio=0.5,
        scope="global",
        importance=importance,
        calibration_samples=4,
        reconstruct=False,
    )
    ctx = every_family.run_stage(Prune(), settings, source, "t5", tmp_path / "out")
    model, _ = load_model(ctx.out)
    original, _ = load_model(source)
    for name, kept_units in (("heads", ctx.details["kept_heads"]), ("neurons", ctx.details["kept_neurons"])):
        before = sum(_sizes(original, name))
        assert sum(kept_units.values()) == sum(_sizes(model, name))
        assert sum(kept_units.values()) == pytest.approx(before / 2, abs=4)
        assert min(kept_units.values()) >= 1


def _sizes(model, kind):
    for block in blocks_of(model):
        if kind == "neurons":
            yield model.get_submodule(block.feed_forwards[0].down).in_features
        else:
            yield from (model.get_submodule(a.name).n_heads for a in block.attentions)


def test_idle_layer_keeps_only_multiple_of_neurons(tmp_path):
    source = every_family.model_with_layers("llama", 3)
    model, edits = load_model(source)
    torch.nn.init.zeros_(model.model.layers[1].mlp.down_proj.weight)
    idle = tmp_path / "idle"
    idle.mkdir()
    save_model(model, edits, idle, source)
    settings = PruneSettings(
        keep_ratio=0.5, scope="global", importance="fisher", calibration_samples=4, reconstruct=False
    )
    ctx = every_family.run_stage(Prune(), settings, idle, "llama", tmp_path / "out")
    first, middle, last = ctx.details["kept_neurons"].values()
    assert middle == settings.multiple_of
    assert first + middle + last == pytest.approx(1.5 * model.config.intermediate_size, abs=4)


def test_global_magnitude_does_not_depend_on_weight_scale(tmp_path):
    source = every_family.model_with_layers("llama", 3)
    model, edits = load_model(source)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(16)
    large = tmp_path / "large"
    large.mkdir()
    save_model(model, edits, large, source)
    settings = PruneSettings(keep_ratio=0.5, scope="global", importance="magnitude", reconstruct=False)
    kept_neurons = [
        every_family.run_stage(Prune(), settings, folder, "llama", tmp_path / f"out-{index}").details[
            "kept_neurons"
        ]
        for index, folder in enumerate((source, large))
    ]
    assert kept_neurons[0] == kept_neurons[1]


@pytest.mark.parametrize(("target", "other"), [("heads", "kept_neurons"), ("ffn", "kept_heads")])
def test_keep_ratio_of_one_target_does_not_prune_the_other(tmp_path, target, other):
    source = every_family.model_with_layers("bert", 2)
    settings = PruneSettings(
        keep_ratio={target: 0.5}, scope="global", importance="magnitude", reconstruct=False
    )
    ctx = every_family.run_stage(Prune(), settings, source, "bert", tmp_path / "out")
    details_key = {"heads": "kept_heads", "ffn": "kept_neurons"}[target]
    assert ctx.details[details_key]
    assert not ctx.details.get(other)


def test_random_scores_depend_on_seed(tmp_path):
    from smelt.compress.prune.importances.random import random_scores
    from smelt.compress.prune.units import find_groups

    model, _ = load_model(every_family.model_with_layers("bert", 3))
    scores = [random_scores(model, *find_groups(model), seed) for seed in (1, 1, 2)]
    names = list(scores[0].neurons)
    assert all(torch.equal(scores[0].neurons[n], scores[1].neurons[n]) for n in names)
    assert not torch.equal(scores[0].neurons[names[0]], scores[2].neurons[names[0]])
    assert not torch.equal(scores[0].neurons[names[0]], scores[0].neurons[names[1]])
