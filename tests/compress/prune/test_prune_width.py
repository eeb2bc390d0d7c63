"""The stage with what: [width]: which channels go, what it says, and what it refuses."""

import json

import pytest
import torch

from smelt.compress.prune.settings import PruneSettings, check_units, fixed_width_error
from smelt.compress.prune.stage import Prune
from smelt.core.errors import InputError
from smelt.core.messages import message_codes
from smelt.data.splits import Example, Split
from smelt.models.checkpoint import load_model
from smelt.models.edits import read_edits
from smelt.models.hidden_width import hidden_width
from tests.support import harness
from tests.support.expected_errors import raises_code, raises_setting_codes
from tests.support.models import every_family, images


def run(out, family="bert", **settings):
    chosen = PruneSettings.model_validate({"targets": ["width"], "calibration_samples": 8, **settings})
    return every_family.run_stage(Prune(), chosen, every_family.model_with_layers(family, 2), family, out)


@pytest.mark.parametrize("importance", ["activation", "taylor", "fisher", "magnitude", "random"])
def test_width_pruning_removes_channels_and_reports_width(importance, tmp_path):
    ctx = run(tmp_path / "out", importance=importance, keep_ratio=0.75)
    model, _ = load_model(ctx.out)
    assert ctx.details["width_before"] == 32
    assert ctx.details["width_after"] == hidden_width(model) == 24
    assert ctx.details["parameters_after"] == sum(p.numel() for p in model.parameters())
    assert ctx.details["parameters_after"] < 0.8 * ctx.details["parameters_before"]
    assert ctx.details["reconstruction_error"]
    [edit] = read_edits(ctx.out)
    assert json.loads((ctx.out / "config.json").read_text())["hidden_size"] == 32
    assert len(edit["keep"]) == 24


def test_channels_with_largest_norm_scale_are_kept(tmp_path):
    """Channels that every norm scales to nothing go first."""
    source = every_family.model_with_layers("llama", 2)
    model, edits = load_model(source)
    idle = list(range(0, 64, 4))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter[idle] *= 1e-3
    from smelt.models.checkpoint import save_model

    (tmp_path / "idle").mkdir()
    save_model(model, edits, tmp_path / "idle", source)
    settings = PruneSettings.model_validate(
        {"targets": ["width"], "keep_ratio": 0.75, "calibration_samples": 4, "reconstruct": False}
    )
    ctx = every_family.run_stage(Prune(), settings, tmp_path / "idle", "llama", tmp_path / "out")
    pruned, _ = load_model(ctx.out)
    kept_channels = [channel for channel in range(64) if channel not in idle]
    assert torch.equal(pruned.model.norm.weight, model.model.norm.weight[kept_channels])
    assert "reconstruction_error" not in ctx.details
    assert not (ctx.out / "structure.json").exists()


def test_keep_ratio_that_removes_nothing_warns(tmp_path):
    ctx = run(tmp_path / "out", keep_ratio=0.9, importance="magnitude")
    assert message_codes(ctx.warnings) == ["nothing-to-remove"]
    assert ctx.details["width_after"] == 32


def test_keep_ratio_below_minimum_warns(tmp_path):
    ctx = run(tmp_path / "out", keep_ratio=0.01, importance="magnitude")
    assert ctx.warnings[0].code == "minimum-kept"
    assert ctx.details["width_after"] == 8


@pytest.mark.parametrize(("settings", "code", "named"), [
    ({"targets": ["width", "ffn"]}, "settings-conflict", "width"),
    ({"targets": ["width"], "budget": {"parameters": 0.5}}, "unused-setting", "budget"),
    ({"targets": ["channels"], "budget": {"parameters": 0.5}}, "unused-setting", "budget"),
    ({"targets": ["width"], "scope": "global"}, "unused-setting", "scope: global"),
    ({"targets": ["width"], "keep_ratio": {"ffn": 0.5}}, "settings-conflict", "keep_ratio"),
    ({"targets": ["ffn"], "importance": "activation"}, "wrong-importance", "importance: activation"),
])  # fmt: skip
def test_invalid_width_settings_are_rejected(settings, code, named):
    with raises_setting_codes(code) as caught:
        PruneSettings.model_validate(settings)
    assert named in caught.value.errors()[0]["msg"]


def test_default_importance_depends_on_targets():
    assert PruneSettings().importance == "taylor"
    for targets in (["width"], ("width",), ["width", "width"]):
        assert PruneSettings.model_validate({"targets": targets}).importance == "activation"
    assert Prune.needs_with(PruneSettings.model_validate({"targets": ["width"]}), ("train",)) == {"train"}


def test_models_with_fixed_width_are_rejected(tmp_path):
    fixed = fixed_width_error({"model_type": "resnet"}, "image-classification")
    strange = fixed_width_error({"model_type": "roformer"}, "text-classification")
    assert message_codes([fixed, strange]) == ["does-not-fit-model", "unsupported-family"]
    assert fixed_width_error({"model_type": "bert"}, "text-classification") is None
    split = Split("pairs.jsonl", (Example("a"), Example("b")))
    settings = PruneSettings.model_validate({"targets": ["width"]})
    [row_error] = Prune.check_rows(settings, "sentence-similarity", {"train": split})
    assert (row_error.setting, row_error.code) == ("targets", "fixed-width")
    [unit_error] = check_units(["width"], {"model_type": "resnet"})
    assert (unit_error.setting, unit_error.code) == ("targets", "does-not-fit-model")
    assert "[channels]" in unit_error.message


def test_quantized_convolutional_model_is_rejected_for_width(tmp_path):
    from smelt.compress.quantize.stage import Quantize, QuantizeSettings

    source = images.write_model(tmp_path / "resnet", "resnet")
    rows = {"train": images.read_rows(images.write_rows(tmp_path / "rows.jsonl"))}
    settings = QuantizeSettings(scheme="int8-static", calibration_samples=8)
    coded = harness.run_stage(Quantize(), settings, source, tmp_path / "coded", images.TASK, rows).out
    narrow = PruneSettings.model_validate({"targets": ["width"]})
    with raises_code("does-not-fit-model", InputError) as caught:
        harness.run_stage(Prune(), narrow, coded, tmp_path / "out", images.TASK, rows)
    assert caught.value.setting == "targets"


@pytest.mark.parametrize("importance", ["taylor", "fisher"])
def test_empty_training_split_is_rejected(importance, tmp_path):
    source = every_family.model_with_layers("bart", 2)
    settings = PruneSettings(importance=importance, reconstruct=False)
    with raises_code("missing-data", InputError) as caught:
        harness.run_stage(
            Prune(), settings, source, tmp_path / "out", data={"train": Split("empty.jsonl", ())}
        )
    assert caught.value.setting == "data.train"


def test_plan_uses_pruned_width_for_later_steps():
    """So that a distillation by cosine, which needs equal widths, is refused before anything runs."""
    settings = PruneSettings.model_validate({"targets": ["width"], "keep_ratio": 0.7})
    errors, after = Prune.check_model(settings, {"model_type": "bert", "hidden_size": 768})
    assert not errors
    assert after == {"model_type": "bert", "hidden_size": 536}
    assert (
        Prune.check_model(PruneSettings(), {"model_type": "bert", "hidden_size": 768})[1]["hidden_size"]
        == 768
    )


def test_width_pruning_supports_quantized_model(tmp_path):
    from smelt.compress.quantize.stage import Quantize, QuantizeSettings
    from smelt.quantization.layers import is_quantized

    coded = every_family.run_stage(
        Quantize(), QuantizeSettings(), every_family.model_with_layers("bert", 2), "bert", tmp_path / "coded"
    ).out
    settings = PruneSettings.model_validate(
        {"targets": ["width"], "calibration_samples": 4, "reconstruct": False}
    )
    ctx = every_family.run_stage(Prune(), settings, coded, "bert", tmp_path / "out")
    assert ctx.details["codes_kept"] == 1  # a scale for each row is no group that could be cut
    model = harness.load_output_model(ctx)
    assert (
        model.get_input_embeddings().matrix.width == ctx.details["width_after"] < ctx.details["width_before"]
    )
    before = [type(m) for m in load_model(coded)[0].modules() if is_quantized(m)]
    assert [type(m) for m in model.modules() if is_quantized(m)] == before
