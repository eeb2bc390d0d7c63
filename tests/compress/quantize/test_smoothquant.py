"""SmoothQuant: the paper's formula, a float model that stays what it was, and an error that falls."""

import pytest
import torch

from smelt.calibration.samples import CalibrationSamples
from smelt.calibration.sequential import ModelPart
from smelt.compress.quantize.plan_layers import plan_layers
from smelt.compress.quantize.settings import QuantizeSettings
from smelt.compress.quantize.smoothquant import SmoothQuantRunner, smoothquant_scales
from smelt.core.messages import message_codes
from smelt.models.families.registry import FAMILIES, norm_consumers
from tests.support import harness
from tests.support.expected_errors import raises_code, raises_setting_codes
from tests.support.models import family_models
from tests.support.models.every_family import DISTINCT_FAMILIES

STATIC = {"scheme": "int8-static", "smoothquant_alpha": 0.5}
READS = ("q_proj", "k_proj", "v_proj")
FORMULA = {"llama": 0.5, "gpt2": 0.8, "gemma": 0.5, "phi3": 0.3}


def context(tmp_path):
    return harness.make_context(tmp_path / "out")


def rows_of(*batches):
    return CalibrationSamples(
        "made", list(batches), len(batches), sum(b["input_ids"].numel() for b in batches)
    )


def smoothed(model, tmp_path, alpha=0.5, kind=torch.float32, targets=("norms",), **settings):
    """Smooth `model` on its own batch; return the context of the stage."""
    ctx = context(tmp_path)
    layers = plan_layers(model, QuantizeSettings(**(STATIC | {"smoothquant_alpha": alpha} | settings)))
    smooth(model, layers, rows_of(family_models.example_batch(model)), ctx, alpha, kind, targets)
    return ctx


def smooth(model, layers, rows, ctx, alpha=0.5, kind=torch.float32, targets=("norms",)):
    runner = SmoothQuantRunner(model, layers, rows, alpha, targets, lambda names: kind, ctx)
    runner.calibrate(runner.targets, ModelPart(model, rows, ctx))
    runner.report()


def first_norms(model):
    """The norms that stand before a part, of models whose blocks begin with one; not of routed experts."""
    stacks = FAMILIES[model.config.model_type].stacks(model.config.to_dict())
    words = tuple(
        norm
        for stack in stacks
        if stack.stream.pre_norm
        for norm in stack.stream.part_norms[: -1 if stack.feed_forward.router else None]
    )
    closing = {stack.stream.final_norm for stack in stacks}  # OPT calls it as it calls those of its blocks
    return [f for f in norm_consumers(model) if words and f.norm.endswith(words) and f.norm not in closing]


def given(model, norm):
    """What a norm gives on the model's batch, float [..., K]."""
    outputs = []
    hook = model.get_submodule(norm).register_forward_hook(lambda m, i, o: outputs.append(o.flatten(0, -2)))
    with torch.no_grad():
        family_models.run_model(model, family_models.example_batch(model))
    hook.remove()
    return torch.cat(outputs)


@pytest.mark.parametrize(("family", "alpha"), FORMULA.items())
def test_norms_and_columns_are_scaled_by_formula(family, alpha, tmp_path):
    model = family_models.load(family)
    weight_offset = 1.0 if family == "gemma" else 0.0
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    norm_outputs = {feed.norm: given(model, feed.norm) for feed in first_norms(model)}
    ctx = smoothed(model, tmp_path, alpha)
    assert len(norm_outputs) == 4
    for feed in first_norms(model):
        x, w = norm_outputs[feed.norm], torch.cat([before[f"{name}.weight"] for name in feed.consumers])
        s = x.abs().amax(0) ** alpha / w.abs().amax(0) ** (1 - alpha)
        after = model.state_dict()
        norm, old = after[f"{feed.norm}.weight"], before[f"{feed.norm}.weight"]
        torch.testing.assert_close((norm + weight_offset) * s, old + weight_offset, rtol=1e-4, atol=1e-5)
        for name in feed.consumers:
            torch.testing.assert_close(
                after[f"{name}.weight"], before[f"{name}.weight"] * s, rtol=1e-4, atol=1e-5
            )
        if f"{feed.norm}.bias" in before:
            torch.testing.assert_close(after[f"{feed.norm}.bias"] * s, before[f"{feed.norm}.bias"])
        details = ctx.details["smoothed"][feed.norm]
        for details_key, values in (("outliers_before", x), ("outliers_after", x / s)):
            channels = values.abs().amax(0)
            assert details[details_key] == pytest.approx(float(channels.max() / channels.median()), rel=1e-2)


@pytest.mark.parametrize("family", DISTINCT_FAMILIES)
def test_smoothing_preserves_float_outputs(family, tmp_path):
    model = family_models.load(family)
    batch = family_models.example_batch(model)
    with torch.no_grad():
        before = family_models.run_model(model, batch).logits
        norm_weights = {
            feed.norm: model.get_submodule(feed.norm).weight.clone() for feed in norm_consumers(model)
        }
        ctx = smoothed(model, tmp_path)
        torch.testing.assert_close(family_models.run_model(model, batch).logits, before, rtol=1e-4, atol=1e-4)
    changed = {name for name, w in norm_weights.items() if not w.equal(model.get_submodule(name).weight)}
    assert changed == set(ctx.details["smoothed"])
    assert {feed.norm for feed in first_norms(model)} <= changed
    unchanged = [feed.norm for feed in norm_consumers(model) if feed.consumers and feed.norm not in changed]
    assert set(message_codes(ctx.warnings)) <= {"norms-not-smoothed"}
    assert sum(int(message.message.split()[1]) for message in ctx.warnings) == len(unchanged)


@pytest.mark.parametrize("family", DISTINCT_FAMILIES)
def test_targets_beyond_norms_preserve_float_outputs(family, tmp_path):
    model = family_models.load(family)
    batch = family_models.example_batch(model)
    with torch.no_grad():
        before = family_models.run_model(model, batch).logits
        ctx = smoothed(model, tmp_path, targets=("norms", "layers", "factors"))
        torch.testing.assert_close(family_models.run_model(model, batch).logits, before, rtol=1e-4, atol=1e-4)
    assert ctx.details["smoothed"].keys() - {feed.norm for feed in norm_consumers(model)}


def test_post_norm_inputs_are_divided_by_factors(tmp_path):
    """The inputs of queries, keys and values are divided once, by the maxima of all three matrices."""
    model = family_models.load("bert")
    attention = model.bert.encoder.layer[1].attention.self
    x = given(model, "bert.encoder.layer.0.output.LayerNorm").abs().amax(0)
    layers = [attention.query, attention.key, attention.value]
    s = (x / torch.cat([layer.weight.detach() for layer in layers]).abs().amax(0)) ** 0.5
    before = [layer.weight.detach().clone() for layer in layers]
    smoothed(model, tmp_path, targets=("norms", "layers", "factors"))
    for name, layer, weight in zip(("query", "key", "value"), layers, before, strict=True):
        torch.testing.assert_close(getattr(attention, name).factors, 1 / s)
        if name != "value":  # whose rows are divided for the output layer
            torch.testing.assert_close(layer.weight, weight * s)


@pytest.mark.parametrize(("producer", "reader"), [("self_attn.v_proj", "self_attn.o_proj"),
                                                  ("mlp.up_proj", "mlp.down_proj")])  # fmt: skip
def test_rows_of_producers_are_divided_by_formula(producer, reader, tmp_path):
    """The 2 value heads of this model are read by 4 query heads: each pair shares its maxima."""
    model = family_models.load("llama")
    block = model.model.layers[0]
    inputs, layer = [], block.get_submodule(reader)
    hook = layer.register_forward_pre_hook(lambda m, i: inputs.append(i[0].flatten(0, -2)))
    with torch.no_grad():
        family_models.run_model(model, family_models.example_batch(model))
    hook.remove()
    maxima, weight = torch.cat(inputs).abs().amax(0), layer.weight.detach().clone()
    weight_maxima, rows = weight.abs().amax(0), block.get_submodule(producer).weight.detach().clone()
    repeats = len(maxima) // len(rows)
    if repeats > 1:
        width = len(rows) // model.config.num_key_value_heads
        maxima, weight_maxima = (
            v.view(-1, repeats, width).amax(1).repeat_interleave(repeats, 0).view(-1, width).flatten()
            for v in (maxima, weight_maxima)
        )
    s = (maxima / weight_maxima) ** 0.5
    smoothed(model, tmp_path, targets=("layers",))
    torch.testing.assert_close(layer.weight, weight * s)
    of_rows = s.view(-1, repeats, width)[:, 0].flatten() if repeats > 1 else s
    torch.testing.assert_close(block.get_submodule(producer).weight, rows / of_rows[:, None])


def test_post_norm_blocks_are_not_smoothed_with_warning(tmp_path):
    ctx = smoothed(family_models.load("marian"), tmp_path)
    sums, tied = ctx.warnings
    assert {sums.code, tied.code} == {"norms-not-smoothed"}
    assert "model.encoder.layers.0.self_attn_layer_norm" in sums.message
    assert "model.decoder.layers.1.final_layer_norm" in tied.message
    # the encoder's last norm feeds the decoder's cross-attentions alone
    assert list(ctx.details["smoothed"]) == ["model.encoder.layers.1.final_layer_norm"]


@pytest.mark.parametrize(("family", "kind"), [("llama", torch.float16), ("gemma", torch.bfloat16)])
def test_half_precision_rounding_of_norm_is_compensated_in_consumers(family, kind, tmp_path):
    model = family_models.load(family)
    batch = family_models.example_batch(model)
    with torch.no_grad():
        for feed in norm_consumers(model):
            weight = model.get_submodule(feed.norm).weight
            weight.copy_(weight.to(kind))
        before = family_models.run_model(model, batch).logits
        ctx = smoothed(model, tmp_path, kind=kind)
        for name in ctx.details["smoothed"]:
            weight = model.get_submodule(name).weight
            assert weight.equal(weight.to(kind).float())
        torch.testing.assert_close(family_models.run_model(model, batch).logits, before, rtol=1e-4, atol=1e-4)


def test_scale_is_one_without_activations_or_weights():
    s = smoothquant_scales(torch.tensor([4.0, 0, 4]), torch.tensor([1.0, 1, 0]), 0.5)
    assert s.tolist() == [2, 1, 1]


def test_channels_with_zero_or_underflowing_norm_weight_are_not_scaled(tmp_path):
    model = family_models.load("gpt2")
    norm, reader = model.transformer.h[0].ln_1, model.transformer.h[0].attn.c_attn
    with torch.no_grad():
        norm.weight.copy_(norm.weight.half())
        norm.weight[3], norm.weight[4] = 0.0, 6e-8  # the least number of float16
        norm.bias[3:5] = 100.0
    before, columns = norm.weight.detach().clone(), reader.weight.detach().clone()
    smoothed(model, tmp_path, kind=torch.float16)
    assert norm.weight[3:5].equal(before[3:5])
    assert norm.bias[3:5].tolist() == [100, 100]
    assert reader.weight[:, 3:5].equal(columns[:, 3:5])
    assert not reader.weight[:, 5].equal(columns[:, 5])


def test_float_consumers_are_rescaled_but_do_not_affect_scales(tmp_path):
    model = family_models.load("llama")
    layer = model.model.layers[0]
    x = given(model, "model.layers.0.input_layernorm").abs().amax(0)
    before = {name: layer.self_attn.get_submodule(name).weight.detach().clone() for name in READS}
    smoothed(model, tmp_path, exclude=["*.q_proj"])
    w = torch.cat([before["k_proj"], before["v_proj"]]).abs().amax(0)
    s = (x / w) ** 0.5
    for name in READS:
        torch.testing.assert_close(layer.self_attn.get_submodule(name).weight, before[name] * s)


def test_first_factor_of_low_rank_consumer_is_scaled(tmp_path):
    from smelt.models.layers import LowRankLinear

    model = family_models.load("llama")
    torch.manual_seed(0)
    up = model.model.layers[0].mlp.up_proj
    model.model.layers[0].mlp.up_proj = LowRankLinear(up.in_features, up.out_features, 9, bias=False)
    batch = family_models.example_batch(model)
    with torch.no_grad():
        before = family_models.run_model(model, batch).logits
        ctx = smoothed(model, tmp_path)
        torch.testing.assert_close(family_models.run_model(model, batch).logits, before, rtol=1e-4, atol=1e-4)
    assert "model.layers.0.post_attention_layernorm" in ctx.details["smoothed"]


def test_only_norms_of_quantized_layers_are_smoothed(tmp_path):
    model = family_models.load("llama")
    ctx = smoothed(model, tmp_path, exclude=["*.layers.0.mlp.*", "*.layers.1.*"], embedding_scheme="int4")
    assert list(ctx.details["smoothed"]) == ["model.layers.0.input_layernorm"]
    assert ctx.warnings == []


def test_shared_consumers_are_not_smoothed_with_warning(tmp_path):
    model = family_models.load("llama")
    layers = model.get_submodule("model.layers")
    layers[1].self_attn.q_proj = layers[0].self_attn.q_proj
    ctx = smoothed(model, tmp_path)
    (warning,) = ctx.warnings
    assert warning.code == "norms-not-smoothed"
    assert "2 of 5" in warning.message
    assert "model.layers.0.input_layernorm, model.layers.1.input_layernorm" in warning.message


def test_non_finite_activations_are_rejected(tmp_path):
    from smelt.core.errors import InputError

    model = family_models.load("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(float("inf"))
    with raises_code("non-finite-activations", InputError) as caught:
        smoothed(model, tmp_path)
    assert "model.layers.0.self_attn.q_proj" in str(caught.value)


def test_model_without_quantized_layers_warns(tmp_path):
    ctx = context(tmp_path)
    smooth(family_models.load("llama"), [], rows_of(), ctx)
    assert message_codes(ctx.warnings) == ["nothing-smoothed"]


@pytest.mark.parametrize(("settings", "code", "named"), [
    (STATIC | {"smoothquant_alpha": 1.1}, "less_than_equal", "1"),
    (STATIC | {"smoothquant_alpha": -0.1}, "greater_than_equal", "0"),
    (STATIC | {"smoothquant_alpha": True}, "float_type", ""),
    ({"scheme": "int8-static", "smoothquant_targets": ["norms"]}, "unused-setting", "smoothquant_alpha"),
    (STATIC | {"smoothquant_targets": ["factors"], "method": "awq"}, "settings-conflict", "factors"),
    (STATIC | {"smoothquant_targets": []}, "too_short", ""),
    ({"scheme": "int4", "smoothquant_alpha": 0.5}, "unused-setting", "int8-dynamic, int8-static"),
    ({"scheme": "int4", "embedding_scheme": "int8-static", "smoothquant_alpha": 0.5}, "unused-setting",
     "int4"),
])  # fmt: skip
def test_invalid_smoothquant_settings_are_rejected(settings, code, named):
    with raises_setting_codes(code) as caught:
        QuantizeSettings(**settings)
    assert named in caught.value.errors()[0]["msg"]
