"""The stage: which layers become pairs, what it says of the others, and what rows it looks at."""

import json

import pytest
import torch
from transformers import MarianConfig, MarianMTModel

from smelt.calibration.samples import load_calibration_samples, model_outputs, observe_inputs
from smelt.compress.factorize.settings import FactorizeSettings
from smelt.compress.factorize.stage import Factorize
from smelt.core.artifact import Artifact, Manifest
from smelt.core.errors import InputError
from smelt.core.messages import message_codes
from smelt.data.splits import Columns
from smelt.models.checkpoint import load_model
from smelt.models.layers import LowRankLinear
from smelt.tasks.read_split import read_split
from tests.support import harness
from tests.support.expected_errors import raises_code, raises_setting_codes
from tests.support.models import tiny


@pytest.fixture
def source(tmp_path):
    torch.manual_seed(0)
    config = MarianConfig(
        vocab_size=64,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=16,
        pad_token_id=63,
        decoder_start_token_id=63,
        eos_token_id=0,
        forced_eos_token_id=0,
    )
    MarianMTModel(config).save_pretrained(tmp_path / "model")
    manifest = Manifest(
        key="0" * 64,
        format="torch",
        task="translation",
        stage="model",
        settings={},
        seed=0,
        parent=None,
        versions={},
    )
    return Artifact(tmp_path / "model", manifest)


def context(tmp_path):
    out = tmp_path / "out"
    return harness.make_context(out, seed=1)


def test_factorizes_layers_that_save_weights_and_lists_the_rest(source, tmp_path):
    ctx = context(tmp_path)
    Factorize()(
        source,
        FactorizeSettings(method="svd", optimize_for="size", rank=18, exclude=["lm_head", "model.decoder.*"]),
        ctx,
    )
    # 32 x 32 breaks even at 16, 64 x 32 at 21.3
    chosen = {f"model.encoder.layers.{i}.{n}" for i in (0, 1) for n in ("fc1", "fc2")}
    assert ctx.details["ranks"] == dict.fromkeys(chosen, 18)
    assert "rank 18 of 32 x 32" in ctx.details["left_alone"]["model.encoder.layers.0.self_attn.q_proj"]
    assert ctx.details["parameters_before"] - ctx.details["parameters_after"] == 4 * (64 * 32 - 18 * 96)
    assert ctx.warnings == []
    model, edits = load_model(ctx.out)
    assert {e["module"] for e in edits} == chosen
    original, _ = load_model(source.path)
    x = torch.randn(2, 32)
    fc1 = model.model.encoder.layers[0].fc1
    assert isinstance(fc1, LowRankLinear)
    u, s, vt = torch.linalg.svd(original.model.encoder.layers[0].fc1.weight)
    expected = x @ (u[:, :18] * s[:18] @ vt[:18]).T + original.model.encoder.layers[0].fc1.bias
    torch.testing.assert_close(fc1(x), expected, rtol=1e-4, atol=1e-6)


def test_optimize_for_latency_skips_slower_pairs_with_reason(tmp_path):
    """Decoders get one token a step, encoders whole texts, and so do keys and values of cross-attention."""
    folder = tiny.write_marian(tmp_path / "model", d_model=128, encoder_ffn_dim=256, decoder_ffn_dim=256)
    include = ["*.0.fc1", "*.1.fc1", "*.0.encoder_attn.*"]
    ctx = harness.run_stage(
        Factorize(), FactorizeSettings(method="svd", rank=36, include=include), folder, tmp_path / "out"
    )
    pairs = {f"model.encoder.layers.{n}.fc1" for n in range(2)}
    pairs |= {f"model.decoder.layers.0.encoder_attn.{n}_proj" for n in "kv"}
    assert ctx.details["ranks"] == dict.fromkeys(pairs, 36)
    details = ctx.details["left_alone"]
    assert "rank 36 of 256 x 128" in details["model.decoder.layers.0.fc1"]
    assert details.keys() == {
        *(f"model.decoder.layers.{n}.fc1" for n in range(2)),
        *(f"model.decoder.layers.0.encoder_attn.{n}_proj" for n in ("q", "out")),
    }
    wide = FactorizeSettings(method="svd", rank=76, include=include)
    details = harness.run_stage(Factorize(), wide, folder, tmp_path / "wide").details["left_alone"]
    # (0.9 * 256 * 128 - 5000) / 384 = 63.8; 256 * 128 / 384 = 85.3; 128 * 128 / 256 = 64
    for name, values in (
        ("model.encoder.layers.0.fc1", ("rank 76 of 256 x 128", "63.8")),
        ("model.decoder.layers.0.encoder_attn.k_proj", ("rank 76 of 128 x 128", "64.0")),
    ):
        assert all(value in details[name] for value in values), name


def test_no_faster_pair_warns_and_suggests_optimize_for_size(source, tmp_path):
    ctx = context(tmp_path)
    Factorize()(source, FactorizeSettings(method="svd", rank=15, include=["model.decoder.*.fc1"]), ctx)
    assert ctx.details["ranks"] == {}
    [warning] = ctx.warnings
    assert warning.code == "no-rank-saves"
    assert "int8" in warning.message
    assert "optimize_for: size" in warning.message


def test_factorized_layers_are_not_factorized_again(source, tmp_path):
    ctx = context(tmp_path)
    Factorize()(source, FactorizeSettings(method="svd", optimize_for="size", rank=8), ctx)
    second_ctx = context(tmp_path / "out")
    factorized = Artifact(ctx.out, source.manifest)
    Factorize()(factorized, FactorizeSettings(method="svd", rank=4), second_ctx)
    (warning,) = second_ctx.warnings
    assert warning.code == "already-factorized"
    assert f" {len(ctx.details['ranks'])} layers" in warning.message
    assert (second_ctx.out / "structure.json").read_text() == (ctx.out / "structure.json").read_text()
    nothing = FactorizeSettings(method="svd", rank=4, include=["*.nowhere"])
    with raises_code("no-layer-selected", InputError):
        Factorize()(factorized, nothing, context(tmp_path / "none"))


def test_nothing_factorized_warns_and_leaves_model_unchanged(source, tmp_path):
    ctx = context(tmp_path)
    Factorize()(source, FactorizeSettings(method="svd", optimize_for="size", energy=1.0), ctx)
    assert ctx.details["ranks"] == {}
    assert message_codes(ctx.warnings) == ["no-rank-saves"]
    assert " 32 layers" in ctx.warnings[0].message
    assert not (ctx.out / "structure.json").exists()
    assert json.loads((ctx.out / "config.json").read_text())["encoder_layers"] == 2


def test_conflicting_rank_settings_are_rejected():
    with raises_setting_codes("settings-conflict"):
        FactorizeSettings(energy=0.9, rank=4)


@pytest.fixture(scope="module")
def marian(tmp_path_factory):
    return tiny.write_marian(tmp_path_factory.mktemp("marian"))


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    return read_split(str(tiny.write_pairs(folder / "rows.jsonl")), "translation", Columns(), folder, "train")


def run(marian, split, tmp_path, **settings):
    return harness.run_stage(
        Factorize(),
        FactorizeSettings(**({"optimize_for": "size"} | settings)),
        marian,
        tmp_path / "out",
        data=split,
    )


def change(marian, ctx):
    """The mean squared change of the logits on the rows, which the stage saw too."""
    source = tiny.as_artifact(marian)
    original = load_model(marian)[0]
    rows = load_calibration_samples(original, source, 256, ctx, "test")
    changed_outputs, original_outputs = (
        list(model_outputs(model, rows.batches)) for model in (harness.load_output_model(ctx), original)
    )
    return sum(float((a - b).square().sum()) for a, b in zip(changed_outputs, original_outputs, strict=True))


def test_data_aware_methods_change_logits_less_than_svd(marian, rows, tmp_path):
    changes = {
        method: change(marian, run(marian, rows, tmp_path / method, method=method, keep_ratio=0.5))
        for method in ("whitened-svd", "asvd", "svd")
    }
    assert changes["whitened-svd"] < 0.8 * changes["svd"]
    assert changes["asvd"] != changes["svd"]


def test_whitened_svd_error_equals_layer_output_error(marian, rows, tmp_path):
    ctx = run(marian, rows, tmp_path, keep_ratio=0.5, calibration_samples=6)
    name = "model.encoder.layers.0.fc1"
    original = load_model(marian)[0]
    artifact = tiny.as_artifact(marian)
    batches = load_calibration_samples(original, artifact, 6, ctx, "test", held_back=True).held_back
    pair, layer = harness.load_output_model(ctx).get_submodule(name), original.get_submodule(name)
    lost, all_of_it, inputs = 0.0, 0.0, []
    observe_inputs(original, batches, {name: [layer]}, lambda _, x: inputs.append(x), ctx)
    with torch.no_grad():
        x = torch.cat(inputs)
        lost, all_of_it = (pair(x) - layer(x)).norm(), (layer(x) - layer(x).mean(dim=0)).norm()
    assert ctx.details["relative_error"][name] == pytest.approx(float(lost / all_of_it), rel=0.25)


def test_fwsvd_weights_inputs_by_loss_gradients(marian, rows, tmp_path):
    ctx = run(marian, rows, tmp_path, method="fwsvd", rank=4)
    plain = run(marian, rows, tmp_path / "plain", method="svd", rank=4)
    name = "model.encoder.layers.0.fc1"
    pair, plain_pair = (harness.load_output_model(c).get_submodule(name) for c in (ctx, plain))
    assert not torch.allclose(
        pair.up.weight @ pair.down.weight, plain_pair.up.weight @ plain_pair.down.weight
    )
    assert ctx.details["calibration"]["samples"] == len(rows)


@pytest.mark.parametrize("objective", ["error", "sensitivity"])
def test_ranks_do_not_exceed_parameter_budget(marian, rows, tmp_path, objective):
    ctx = run(marian, rows, tmp_path, parameter_budget=0.5, objective=objective)
    sizes = {n: m.weight for n, m in load_model(marian)[0].named_modules() if isinstance(m, torch.nn.Linear)}
    sizes.pop("lm_head")
    spent = sum(
        ctx.details["ranks"][name] * sum(w.shape) if name in ctx.details["ranks"] else w.numel()
        for name, w in sizes.items()
    )
    assert 0.45 < spent / sum(w.numel() for w in sizes.values()) <= 0.5
    assert len(set(ctx.details["ranks"].values())) > 1
    assert ("sensitivity" in ctx.details) == (objective == "sensitivity")


def test_few_calibration_tokens_warn(marian, rows, tmp_path):
    ctx = run(marian, rows, tmp_path, keep_ratio=0.5, calibration_samples=1)
    assert ctx.warnings[0].code == "few-calibration-tokens"


def test_missing_calibration_data_is_rejected(marian, tmp_path):
    with raises_code("no-calibration-data", InputError):
        harness.run_stage(Factorize(), FactorizeSettings(), marian, tmp_path / "out")


def test_calibration_data_is_needed_only_by_data_aware_methods():
    needs = Factorize.needs_with
    assert needs(FactorizeSettings(method="svd"), ["train"]) == frozenset()
    assert needs(FactorizeSettings(), ["train"]) == {"train"}
    assert needs(FactorizeSettings(), ["train", "calibration"]) == {"calibration"}
    by_sensitivity = FactorizeSettings(method="svd", parameter_budget=0.5, objective="sensitivity")
    assert needs(by_sensitivity, ["train"]) == {"train"}
