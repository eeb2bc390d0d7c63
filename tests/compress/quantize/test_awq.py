"""AWQ in the stage: a float model that stays what it was, less error than nearest, and graphs that agree."""

from types import SimpleNamespace

import pytest
import torch

from smelt.calibration.samples import CalibrationSamples, load_calibration_samples
from smelt.calibration.sequential import ModelPart
from smelt.calibration.statistics import collect_statistics
from smelt.compress.quantize.awq import AwqRunner, ScaleTarget
from smelt.compress.quantize.plan_layers import output_layer, plan_layers
from smelt.compress.quantize.qat import convert_qat, load_trainable
from smelt.compress.quantize.settings import QuantizeSettings
from smelt.compress.quantize.stage import Quantize
from smelt.compress.share_weights import ShareWeights, ShareWeightsSettings
from smelt.core.artifact import Artifact, Manifest
from smelt.core.errors import InputError
from smelt.core.messages import message_codes
from smelt.models.checkpoint import load_model, save_model
from smelt.models.edits import read_edits
from smelt.models.families.registry import model_attentions
from smelt.models.layers import LowRankLinear, ScaledLinear
from tests.support import harness
from tests.support.expected_errors import raises_code, raises_setting_codes
from tests.support.models import every_family, family_models, tiny

DENSE = "bert.encoder.layer.0.intermediate.dense"
AWQ = {"scheme": "int4", "method": "awq", "group_size": 16, "calibration_samples": 6}


def scaled(model, tmp_path, kind=torch.float32, **settings):
    """Scale `model` by its own batch; return what the stage would tell, and what is left to quantize."""
    batch = family_models.example_batch(model)
    rows = CalibrationSamples("made", [batch], 2, batch["input_ids"].numel())
    ctx = harness.make_context(tmp_path / "out")
    layers = plan_layers(model, QuantizeSettings(**(AWQ | settings)))
    return apply_awq(model, layers, rows, ctx, kind=kind), ctx


def apply_awq(model, layers, rows, ctx, *, clip=False, kind=torch.float32):
    """Scale a model in memory; return the runner, and the layers with their new names."""
    runner = AwqRunner(model, layers, rows, clip, True, lambda names: kind, ctx)
    runner.calibrate(runner.targets, ModelPart(model, rows, ctx))
    runner.report()
    return SimpleNamespace(layers=runner.renamed(layers), edits=runner.edits, codes=runner.codes)


@pytest.mark.parametrize("family", every_family.DISTINCT_FAMILIES)
@torch.no_grad()
def test_awq_scaling_preserves_float_outputs(family, tmp_path):
    model = family_models.load(family)
    batch = family_models.example_batch(model)
    before = family_models.run_model(model, batch).logits
    scaled_layers, ctx = scaled(model, tmp_path)
    torch.testing.assert_close(family_models.run_model(model, batch).logits, before, rtol=1e-4, atol=1e-4)
    errors = ctx.details["awq_error"].values()
    assert max(errors) <= 1
    assert min(errors) < 0.95
    assert sum(ctx.details["awq_scales_in"].values()) == len(ctx.details["awq_alpha"])
    for layer in scaled_layers.layers:
        assert model.get_submodule(layer.name) is layer.module
    wrapped = {name for name, m in model.named_modules() if isinstance(m, ScaledLinear)}
    assert wrapped == {edit["module"] for edit in scaled_layers.edits if edit["op"] == "scale"}
    if family in ("llama", "mistral", "phi3", "m2m_100", "opt"):  # pre-norm, and a gate or ReLU
        assert not wrapped


@torch.no_grad()
def test_float16_rounding_of_factors_is_compensated_in_weights(tmp_path):
    model = family_models.load("bart")
    batch = family_models.example_batch(model)
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.weight.copy_(module.weight.half())
    before = family_models.run_model(model, batch).logits
    scaled(model, tmp_path, kind=torch.float16)
    factors = [m.factors for m in model.modules() if isinstance(m, ScaledLinear)]
    assert factors
    assert all(f.equal(f.half().float()) for f in factors)
    torch.testing.assert_close(family_models.run_model(model, batch).logits, before, rtol=1e-4, atol=1e-4)


def test_non_finite_activations_are_rejected(tmp_path):
    model = family_models.load("bert")
    with torch.no_grad():
        model.get_submodule("bert.encoder.layer.0.output.LayerNorm").weight.fill_(float("nan"))
    with raises_code("non-finite-activations", InputError) as caught:
        scaled(model, tmp_path)
    assert "encoder.layer.1.attention" in str(caught.value)


def made(family, out, **settings):
    source = every_family.model_with_layers(family, 2)
    return source, every_family.run_stage(
        Quantize(), QuantizeSettings(**(AWQ | settings)), source, family, out
    )


@torch.no_grad()
def errors_of(source, codes, ctx, held_back=False):
    """The squared error of each product's outputs, by its name, on rows of the stage, or those held back."""
    plain, _ = load_model(source)
    names = [n for n, m in plain.named_modules() if isinstance(m, torch.nn.Linear)]
    names = [n for n in names if plain.get_submodule(n) is not plain.get_output_embeddings()]
    artifact = tiny.as_artifact(source, ctx.task)
    rows = load_calibration_samples(plain, artifact, 6, ctx, "quantize", held_back=True)
    rows = rows.held_back if held_back else rows
    outputs = {}
    with collect_statistics(plain, rows, {n: [plain.get_submodule(n)] for n in names}, ctx) as statistics:
        for name in names:
            layer = codes.get_submodule(name)
            inner = layer.linear if isinstance(layer, ScaledLinear) else layer
            value = inner.matrix.dequantized() * (layer.factors if inner is not layer else 1)
            difference = value - plain.get_submodule(name).weight
            outputs[name] = float(((difference @ statistics[name].second_moment.float()) * difference).sum())
    return outputs


@pytest.mark.parametrize("clip", ["none", "awq"])
def test_input_scaled_layers_have_lower_error_than_rtn(clip, tmp_path):
    """Of products behind factors and between nothing else: their own outputs, computed from the codes."""
    source, ctx = made("gpt2", tmp_path / "awq", clip=clip)
    settings = QuantizeSettings(scheme="int4", group_size=16)
    nearest = every_family.run_stage(Quantize(), settings, source, "gpt2", tmp_path / "nearest")
    awq_errors, rtn_errors = (
        errors_of(source, harness.load_output_model(ctx), ctx),
        errors_of(source, harness.load_output_model(nearest), ctx),
    )
    downs = [
        n for n in awq_errors if n.endswith("mlp.c_proj")
    ]  # GELU in front: a factor, and no rows are changed
    assert len(downs) == 2
    assert all(awq_errors[n] <= rtn_errors[n] * 1.001 for n in downs)
    assert sum(awq_errors[n] for n in downs) < 0.97 * sum(rtn_errors[n] for n in downs)
    if clip == "none":
        for name in downs:
            error_ratio = ctx.details["awq_error"][name]
            assert awq_errors[name] == pytest.approx(error_ratio * rtn_errors[name], rel=0.02)


def test_reported_awq_error_is_that_on_samples_held_back(tmp_path):
    source, ctx = made("bert", tmp_path / "awq")
    settings = QuantizeSettings(scheme="int4", group_size=16)
    nearest = every_family.run_stage(Quantize(), settings, source, "bert", tmp_path / "nearest")
    name = "bert.encoder.layer.0.output.dense"
    ratios = []
    for held_back in (True, False):
        errors = [
            errors_of(source, harness.load_output_model(c), ctx, held_back)[name] for c in (ctx, nearest)
        ]
        ratios.append(errors[0] / errors[1])
    assert ctx.details["awq_error"][name] == pytest.approx(ratios[0], rel=0.02)
    assert ratios[1] < 0.95 * ratios[0]  # on the samples that chose the scales the error looks smaller


def test_awq_gptq_uses_awq_scales_and_lowers_error(tmp_path):
    """The scales are AWQ's, the codes are GPTQ's of the scaled model: less error than of either's start."""
    source, ctx = made("gpt2", tmp_path / "both", method="awq-gptq", scheme="int2", group_size=32)
    _, scales = made("gpt2", tmp_path / "awq", scheme="int2", group_size=32)
    settings = QuantizeSettings(scheme="int2", group_size=32)
    nearest = every_family.run_stage(Quantize(), settings, source, "gpt2", tmp_path / "nearest")
    combined_errors, awq_errors, rtn_errors = (
        errors_of(source, harness.load_output_model(c), ctx) for c in (ctx, scales, nearest)
    )
    assert ctx.details["awq_alpha"] == scales.details["awq_alpha"]
    downs = [n for n in combined_errors if n.endswith("mlp.c_proj")]
    assert {f"{name}.linear" for name in downs} <= ctx.details["gptq_error"].keys()
    assert sum(combined_errors[n] for n in downs) < 0.7 * sum(awq_errors[n] for n in downs)
    assert sum(combined_errors[n] for n in downs) < 0.7 * sum(rtn_errors[n] for n in downs)
    _, few_ctx = made("bert", tmp_path / "one", method="awq-gptq", calibration_samples=1)
    assert message_codes(few_ctx.warnings).count("few-calibration-tokens") == 1  # though both methods warn


@pytest.mark.parametrize(("method", "most"), [("awq", 0.01), ("awq-gptq", 0.05)])
def test_qat_starts_from_dequantized_awq_weights(method, most, tmp_path):
    """The weights of the step before have other scales; so the very codes are decided again.

    Where GPTQ left a group without its largest value, the grid of what is left is another one.
    """
    source, ctx = made("bert", tmp_path / "awq", method=method)
    float_step, step = (
        Artifact(folder, Manifest(
            key=key * 64, format="torch", task=ctx.task, stage=stage, settings=settings, seed=0,
            parent=parent and parent * 64, versions={},
        ))
        for folder, key, stage, parent, settings in (
            (source, "a", "model", None, {}), (ctx.out, "b", "quantize", "a", AWQ | {"method": method}),
        )
    )  # fmt: skip
    later = harness.make_context(
        tmp_path / "later", ctx.task, ancestors={"model": float_step, "quantize": step}
    )
    model, _ = load_trainable(step, later)
    convert_qat(model, later)
    assert later.details["latent_weights"] == "codes"
    assert later.details["codes_changed"] < most


def test_invalid_awq_settings_are_rejected():
    settings = QuantizeSettings(**AWQ, clip="awq")
    assert Quantize.needs_with(settings, {"train"}) == {"train"}
    for code, names, options in (
        ("settings-conflict", ("clip: awq", "method: awq"), {"clip": "awq"}),
        ("unused-setting", ("duo_scaling", "method: gptq"), {"method": "gptq", "duo_scaling": True}),
        ("settings-conflict", ("clip: awq", "awq-gptq"), {"method": "awq-gptq", "clip": "awq"}),
        (
            "settings-conflict",
            ("low_rank_correction", "method: awq-gptq"),
            {"method": "awq-gptq", "low_rank_correction": {"rank": 2}},
        ),
        ("settings-conflict", ("method: hqq", "clip: mse"), {"method": "hqq", "clip": "mse"}),
        ("unused-setting", ("calibration_percentile",), {"calibration_percentile": 99.9}),
    ):
        with raises_setting_codes(code) as caught:
            QuantizeSettings(scheme="int4", **options)
        assert all(name in caught.value.errors()[0]["msg"] for name in names)
    assert (
        QuantizeSettings(scheme="int4", clip="percentile", calibration_percentile=99.9).calibration_percentile
        == 99.9
    )
    assert not QuantizeSettings(scheme="int4", method="hqq").needs_calibration


@pytest.mark.parametrize("method", ["gptq", "awq", "awq-gptq"])
def test_non_finite_weights_are_rejected_with_layer_name(method, tmp_path):
    """The layer that has them is named, not the one that is fed what comes of them."""
    model, edits = load_model(every_family.model_with_layers("bert", 2))
    with torch.no_grad():
        model.get_submodule(DENSE).weight[0, 0] = float("inf")
    (tmp_path / "bad").mkdir()
    save_model(model, edits, tmp_path / "bad", every_family.model_with_layers("bert", 2))
    settings = QuantizeSettings(**AWQ | {"method": method})
    with raises_code("non-finite-weights", InputError) as caught:
        every_family.run_stage(Quantize(), settings, tmp_path / "bad", "bert", tmp_path / "out")
    assert DENSE in str(caught.value)
    assert "inf" in str(caught.value)


def queries_and_keys(model):
    """The products that make them, halves of pairs too, by the name that `plan_layers` has for each."""
    names = [name for attention in model_attentions(model) for name in (attention.query, attention.key)]
    return {n for n, m in model.named_modules() if type(m) is torch.nn.Linear and n.startswith(tuple(names))}


@pytest.mark.parametrize("family", ["llama", "bert"])  # scales in norms, and in factors before the products
@pytest.mark.parametrize("pair", [False, True])
def test_awq_clips_all_layers_except_queries_and_keys(family, pair, tmp_path):
    model = family_models.load(family)
    torch.manual_seed(0)
    if pair:
        name = model_attentions(model)[0].query
        query_layer = model.get_submodule(name)
        model.set_submodule(
            name, LowRankLinear(query_layer.in_features, query_layer.out_features, 9, bias=False)
        )
    scored = queries_and_keys(model)
    assert len(scored) == 2 * len(model_attentions(model)) + pair
    batch = family_models.example_batch(model)
    rows = CalibrationSamples("made", [batch], 2, batch["input_ids"].numel())
    layers = plan_layers(model, QuantizeSettings(**AWQ, clip="awq"))
    scaled_layers = apply_awq(model, layers, rows, harness.make_context(tmp_path / "out"), clip=True)
    uncut = {
        n.name.removesuffix(".linear")
        for n in scaled_layers.layers
        if n.multiplies and n.weight_id not in scaled_layers.codes
    }
    assert uncut - {"lm_head", "classifier"} == scored


@pytest.mark.parametrize("shared", ["module", "weight"])
@torch.no_grad()
def test_shared_layer_gets_no_awq_scales(shared, tmp_path):
    model = family_models.load("llama")
    first, second = (layer.mlp for layer in model.model.layers)
    if shared == "module":
        second.up_proj = first.up_proj
    else:
        second.up_proj.weight = first.up_proj.weight
    batch = family_models.example_batch(model)
    before = family_models.run_model(model, batch).logits
    scaled(model, tmp_path)
    torch.testing.assert_close(family_models.run_model(model, batch).logits, before, rtol=1e-4, atol=1e-4)
    assert isinstance(first.down_proj, ScaledLinear)
    assert isinstance(second.down_proj, ScaledLinear)


@torch.no_grad()
def test_output_layer_gets_no_awq_factor(tmp_path):
    model = family_models.load("bert")
    scaled_layers, ctx = scaled(model, tmp_path)
    head = output_layer(model)
    names = [layer.name for layer in scaled_layers.layers if layer.module is head]
    assert names
    assert ctx.details["awq_without_scales"] == names
    assert not any(isinstance(m, ScaledLinear) and m.linear is head for m in model.modules())


@torch.no_grad()
def test_channels_with_unrepresentable_factors_are_not_scaled():
    model = family_models.load("bert")
    layer = next(planned for planned in plan_layers(model, QuantizeSettings(**AWQ)) if planned.name == DENSE)
    before, scales = layer.module.weight.clone(), torch.full((layer.module.in_features,), 2.0)
    scales[:2] = torch.tensor([1e-6, 1e9])  # factors of 1e6 and 1e-9, which float16 does not have
    applied = ScaleTarget([layer]).apply(model, scales, lambda names: torch.float16, [])
    assert applied[:3].tolist() == [1, 1, 2]
    assert model.get_submodule(DENSE).factors[:3].tolist() == [1, 1, 0.5]
    assert layer.module.weight[:, :3].equal(before[:, :3] * torch.tensor([1, 1, 2]))


def test_layer_shared_by_blocks_gets_one_factor(tmp_path):
    """Each block's cross-attention reads the encoder with the same keys."""
    source = every_family.model_with_layers("marian", 2)
    sharing = ShareWeightsSettings(targets=["layers"], groups=1)
    shared = every_family.run_stage(ShareWeights(), sharing, source, "marian", tmp_path / "shared").out
    settings = QuantizeSettings(scheme="int4", group_size=32, method="awq", calibration_samples=4)
    out = every_family.run_stage(Quantize(), settings, shared, "marian", tmp_path / "out").out
    names = [edit["module"] for edit in read_edits(out) if edit["op"] == "scale"]
    assert names
    assert len(names) == len({*names})
    model, _ = load_model(out)
    keys = [layer.encoder_attn.k_proj for layer in model.model.decoder.layers]
    assert keys[0] is keys[1]
