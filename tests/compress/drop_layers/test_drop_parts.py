"""Attentions and feed-forward parts go by what they do; of each kind one stays in each stack."""

import json

import pytest
import torch

from smelt.compress.drop_layers.settings import DropLayersSettings, check_layer_counts
from smelt.compress.drop_layers.stage import DropLayers
from smelt.compress.share_weights import ShareWeights, ShareWeightsSettings
from smelt.core.errors import InputError
from smelt.core.messages import message_codes
from smelt.models.checkpoint import load_model, save_model
from tests.support import harness
from tests.support.expected_errors import raises_code, raises_setting_codes
from tests.support.models import every_family


def run(settings, out, family="llama", source=None):
    chosen = DropLayersSettings(**({"calibration_samples": 4} | settings))
    return every_family.run_stage(
        DropLayers(), chosen, source or every_family.model_with_layers(family, 3), family, out
    )


def test_greedy_part_losses_equal_models_without_the_parts(tmp_path):
    """After each drop the others are tried again: by hand, on models from which the part was really taken."""
    ctx = run({"targets": ["attention", "ffn"], "keep_ratio": 0.67}, tmp_path / "out")
    dropped = [(d["layer"], d["part"]) for d in ctx.details["dropped"]]
    losses = {}
    for kind in ("attention", "ffn"):
        for layer in range(3):
            kept_layers = [index for index in range(3) if index != layer]
            name = f"{kind}-{layer}"
            ablated = run({"targets": [kind], "layers": kept_layers}, tmp_path / name)
            assert ablated.details["dropped_parts"] == {"layers": [f"{layer} {kind}"]}
            evaluation = run({"layers": 2}, tmp_path / f"{name}-again", source=ablated.out)
            losses[layer, kind] = evaluation.details["loss_before"]
    assert dropped[0] == min(losses, key=losses.get)
    assert ctx.details["dropped"][0]["loss"] == pytest.approx(losses[dropped[0]], abs=1e-5)
    assert len(dropped) == 2


@pytest.mark.parametrize("importance", ["loss", "block-influence", "random"])
def test_one_part_of_each_kind_is_kept_per_stack(importance, tmp_path):
    targets = ["attention", "cross-attention", "ffn"]
    ctx = run({"targets": targets, "keep_ratio": 0.1, "importance": importance}, tmp_path / "out", "t5")
    dropped_parts = ctx.details["dropped_parts"]
    for stack, kinds in (("encoder_layers", targets[::2]), ("decoder_layers", targets)):
        assert {
            kind: sum(name.endswith(f" {kind}") for name in dropped_parts[stack]) for kind in kinds
        } == dict.fromkeys(kinds, 2)
    assert torch.isfinite(harness.logits(harness.load_output_model(ctx))).all()
    assert ctx.details["parameters_after"] < ctx.details["parameters_before"]


def test_parts_with_least_influence_are_removed_and_reported(tmp_path):
    ctx = run({"targets": ["ffn"], "layers": 1, "importance": "block-influence"}, tmp_path / "out")
    values = ctx.details["part_influence"]["layers"]
    kept_part = max(values, key=values.get)
    assert sorted(ctx.details["dropped_parts"]["layers"]) == sorted(set(values) - {kept_part})
    config = json.loads((ctx.out / "config.json").read_text())
    assert config["num_hidden_layers"] == 3


def test_layers_and_parts_can_be_removed_in_successive_stages(tmp_path):
    first = run({"targets": ["attention"], "layers": [1, 2]}, tmp_path / "first")
    second = run({"layers": [0, 2]}, tmp_path / "second", source=first.out)
    third = run({"targets": ["ffn"], "layers": [0]}, tmp_path / "third", source=second.out)
    layers = load_model(third.out)[0].model.layers
    assert [hasattr(layer.self_attn, "q_proj") for layer in layers] == [False, True]
    assert [hasattr(layer.mlp, "up_proj") for layer in layers] == [True, False]
    assert layers[1].self_attn.layer_idx == 0
    with raises_code("no-part-left", InputError) as caught:
        run({"layers": [0]}, tmp_path / "none", source=first.out)
    assert str(caught.value).startswith("drop-layers: layers: ")
    assert "attention" in str(caught.value)


def test_t5_position_bias_moves_to_first_remaining_attention(tmp_path):
    first = run(
        {"targets": ["attention"], "encoder_layers": [2], "decoder_layers": [1, 2]}, tmp_path / "a", "t5"
    )
    shortened = run({"encoder_layers": [1, 2], "decoder_layers": [0, 2]}, tmp_path / "b", "t5", first.out)
    original, shortened_model = (
        load_model(every_family.model_with_layers("t5", 3))[0],
        load_model(shortened.out)[0],
    )
    for side in ("encoder", "decoder"):
        table = getattr(original, side).block[0].layer[0].SelfAttention.relative_attention_bias.weight
        moved_table = (
            getattr(shortened_model, side).block[1].layer[0].SelfAttention.relative_attention_bias.weight
        )
        assert torch.equal(moved_table, table)
    assert torch.equal(harness.logits(shortened_model), harness.logits(harness.load_output_model(shortened)))


MARIAN = {"model_type": "marian", "encoder_layers": 6, "decoder_layers": 3}


@pytest.mark.parametrize(("settings", "config", "setting", "code"), [
    ({"targets": ["cross-attention"]}, {"model_type": "llama", "num_hidden_layers": 3}, "targets",
     "unknown-part"),
    ({"targets": ["ffn"], "layers": 2}, MARIAN, "layers", "unknown-stack"),
    ({"targets": ["ffn"], "decoder_layers": [0, 3]}, MARIAN, "decoder_layers", "wrong-layer-numbers"),
])  # fmt: skip
def test_unknown_part_targets_are_rejected(settings, config, setting, code):
    [error], after = check_layer_counts(DropLayersSettings(**settings), config)
    assert (error.setting, error.code) == (setting, code)
    assert after == config


@pytest.mark.parametrize(("settings", "code"), [
    ({"targets": ["ffn", "layers"]}, "settings-conflict"),
    ({"targets": ["ffn"], "importance": "uniform"}, "wrong-importance"), ({"targets": []}, "too_short"),
])  # fmt: skip
def test_invalid_part_settings_are_rejected(settings, code):
    with raises_setting_codes(code):
        DropLayersSettings(**settings)


@pytest.mark.parametrize(("settings", "code"), [
    ({"targets": ["attention", "ffn"], "layers": 1}, "too-few-kept"),
    ({"targets": ["attention"], "layers": 4}, "more-than-model-has"),
])  # fmt: skip
def test_invalid_part_counts_are_rejected(settings, code, tmp_path):
    with raises_code(code, InputError) as caught:
        run(settings, tmp_path / "out")
    assert [error.setting for error in caught.value.messages] == ["layers"]


def test_removing_last_part_of_a_kind_is_rejected(tmp_path):
    first = run({"targets": ["ffn"], "layers": [0, 1]}, tmp_path / "first")
    with raises_code("no-part-left", InputError) as caught:
        run({"targets": ["ffn"], "layers": [2]}, tmp_path / "second", source=first.out)
    assert caught.value.setting == "layers"
    assert "ffn" in str(caught.value)


def test_keep_ratio_that_removes_nothing_warns(tmp_path):
    ctx = run({"targets": ["ffn"], "keep_ratio": 0.9}, tmp_path / "out")
    assert message_codes(ctx.warnings) == ["nothing-to-remove"]
    assert ctx.details["dropped_parts"] == {"layers": []}


@pytest.mark.parametrize("family", ["bert", "llama"])  # post-norm, pre-norm
def test_parts_with_shared_norms_have_influence_of_copied_norms(family, tmp_path):
    """A norm that several blocks call does not tell which part computes."""
    source = every_family.model_with_layers(family, 3)
    sharing = ShareWeightsSettings(targets=["norms"], groups=1)
    shared = every_family.run_stage(ShareWeights(), sharing, source, family, tmp_path / "shared").out
    (copied := tmp_path / "copied").mkdir()
    model, _ = load_model(shared)
    plain, edits = load_model(source)
    plain.load_state_dict(model.state_dict())  # under all names
    save_model(plain, edits, copied, source, "keep")
    settings = {"targets": ["attention", "ffn"], "keep_ratio": 0.4, "importance": "block-influence"}
    values = [
        run(settings, tmp_path / path.name / "parts", family, path).details["part_influence"]
        for path in (shared, copied)
    ]
    assert values[0] == values[1]
