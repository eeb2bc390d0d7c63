"""Pairs with codes against the papers' formulas, written out in numpy, and as a part of the stage."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open

from smelt.calibration.statistics import empty_statistics
from smelt.compress.factorize.svd import ErrorMetric
from smelt.compress.finetune import Finetune, FinetuneSettings
from smelt.compress.quantize.low_rank_correction import (
    correction_metric,
    oversized_correction_warnings,
    quantize_with_correction,
)
from smelt.compress.quantize.nested_settings import LowRankCorrection
from smelt.compress.quantize.plan_layers import dequantize_codes, round_to_nearest
from smelt.compress.quantize.qat import prepare_qat
from smelt.compress.quantize.settings import QuantizeSettings
from smelt.compress.quantize.stage import Quantize
from smelt.compress.share_weights import ShareWeights, ShareWeightsSettings
from smelt.core.messages import message_codes
from smelt.models.checkpoint import copy_tokenizer, load_model
from smelt.models.edits import read_edits
from smelt.models.layers import LowRankCorrectedLinear
from smelt.quantization.layers import QuantizedMatrix
from smelt.quantization.schemes.registry import default_options, find_scheme
from tests.support import harness, usability_checks
from tests.support.expected_errors import raises_setting_codes
from tests.support.models import every_family

INT4 = {"scheme": "int4", "group_size": 16}
# what else moves the outputs: codes of head and tables, activations in int8 blocks
FLOAT_BESIDE = {"output_layer": False, "embeddings": False, "accuracy_level": 0}


def drawn(outputs=24, inputs=64):
    draw = torch.Generator().manual_seed(0)
    return torch.randn(outputs, inputs, generator=draw)


def made(weight, metric=None, scheme="int4", judged=None, **settings):
    kind = find_scheme(scheme)
    options = default_options(kind)
    return quantize_with_correction(
        weight,
        lambda left: round_to_nearest(left, kind, options),
        lambda codes: dequantize_codes(codes, kind, options, weight),
        LowRankCorrection(**settings),
        metric or ErrorMetric(),
        judged,
    )


def rounded(weight, scheme="int4"):
    kind = find_scheme(scheme)
    codes = round_to_nearest(torch.as_tensor(weight, dtype=torch.float32), kind, default_options(kind))
    return dequantize_codes(codes, kind, default_options(kind), weight).double().numpy()


def truncated(matrix, rank):
    u, s, vt = np.linalg.svd(matrix, full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ vt[:rank]


@pytest.mark.parametrize("init", ["quantize", "svd"])
def test_loftq_iterations_equal_algorithm_and_reduce_error(init):
    weight = drawn()
    exact, pair = weight.double().numpy(), np.zeros(weight.shape)
    if init == "svd":  # SVDQuant takes the largest directions away before anything is coded
        pair = truncated(exact, 6)
    errors = []
    for _ in range(4):
        codes = rounded(exact - pair)
        pair = truncated(exact - codes, 6)
        errors.append(((exact - codes - pair) ** 2).sum())
    corrected = made(weight, rank=6, iterations=4, init=init)
    initial_error = ((exact - rounded(exact)) ** 2).sum()
    np.testing.assert_allclose(corrected.error_ratios, np.array(errors) / initial_error, rtol=1e-3)
    assert errors[3] < errors[2] < errors[1] < errors[0] < initial_error
    np.testing.assert_allclose(corrected.correction.double().numpy(), pair, atol=1e-3)


def test_best_iteration_is_returned():
    """With one scale a row, and few directions left, rounds also lose (seen: a later one is worse)."""
    weight = drawn(8, 16)
    corrected = made(weight, rank=3, iterations=12)
    residual = (
        weight
        - dequantize_codes(corrected.codes, find_scheme("int4"), default_options(find_scheme("int4")), weight)
        - corrected.correction
    )
    initial_error = ((weight.double().numpy() - rounded(weight)) ** 2).sum()
    assert float(residual.double().square().sum()) / initial_error == pytest.approx(
        min(corrected.error_ratios), rel=1e-4
    )
    assert min(corrected.error_ratios) < corrected.error_ratios[-1]


def test_correction_errors_are_measured_on_samples_held_back():
    weight, scale = drawn(), torch.linspace(0.5, 1.5, 64, dtype=torch.float64)
    judged = ErrorMetric(transform=scale, inverse=1 / scale)
    pair = made(weight, rank=6, judged=judged)
    quantized, scales = rounded(weight), scale.numpy()
    off = weight.double().numpy() - quantized
    expected = np.square((off - truncated(off, 6)) * scales).sum() / np.square(off * scales).sum()
    assert pair.error_ratios == pytest.approx([expected], rel=1e-4)
    assert pair.error_ratios != pytest.approx(made(weight, rank=6).error_ratios, rel=1e-4)


def test_rank_zero_is_plain_quantization_and_full_rank_is_exact():
    weight = drawn()
    plain = round_to_nearest(weight, find_scheme("int4"), default_options(find_scheme("int4")))
    none = made(weight, rank=0)
    assert torch.equal(none.codes.q_weight, plain.q_weight)
    assert none.error_ratios == (1.0,)
    full = made(weight, rank=100)
    assert (len(full.down), full.up.shape[1]) == (24, 24)
    values = dequantize_codes(full.codes, find_scheme("int4"), default_options(find_scheme("int4")), weight)
    torch.testing.assert_close(values + full.correction, weight, atol=1e-5, rtol=0)
    assert full.error_ratios[0] < 1e-10


def seen_of(inputs=64, tokens=300):
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, inputs, generator=draw) @ torch.randn(inputs, inputs, generator=draw)
    x = x * torch.linspace(0.1, 4, inputs)
    statistics = empty_statistics(inputs, second=True)
    statistics.update(x)
    return x.double().numpy(), statistics


def test_input_objective_equals_lqer_formula():
    """S = diag(a / sqrt(min a max a)), a the mean magnitudes; A' B' = S^-1 SVD(S E), E = W - Q."""
    weight = drawn()
    x, statistics = seen_of()
    a = np.abs(x).mean(axis=0)
    s = a / np.sqrt(a.min() * a.max())
    difference = weight.double().numpy() - rounded(weight)
    expected = truncated(difference * s, 5) / s
    corrected = made(weight, correction_metric(LowRankCorrection(objective="inputs"), statistics), rank=5)
    np.testing.assert_allclose(corrected.correction.double().numpy(), expected, atol=1e-5)


def test_output_objective_equals_qera_theorem():
    """SVD_r(E R^1/2) R^-1/2 with R = E[x x^T] (here with the ridge), by the symmetric root."""
    weight = drawn()
    x, statistics = seen_of()
    values, vectors = np.linalg.eigh(x.T @ x / len(x))
    values = values + 0.1 * values.mean()
    root, back = vectors * values**0.5 @ vectors.T, vectors * values**-0.5 @ vectors.T
    difference = weight.double().numpy() - rounded(weight)
    expected = truncated(difference @ root, 5) @ back
    corrected = made(weight, correction_metric(LowRankCorrection(objective="outputs"), statistics), rank=5)
    np.testing.assert_allclose(corrected.correction.double().numpy(), expected, atol=1e-4)

    def lost(pair):
        return (((difference - pair) @ x.T) ** 2).sum()

    assert lost(expected) < 0.9 * lost(truncated(difference, 5))


def quantized(family, out, low_rank, **more):
    source = every_family.model_with_layers(family, 2)
    settings = QuantizeSettings(**INT4, **more, low_rank_correction=low_rank)
    return source, every_family.run_stage(Quantize(), settings, source, family, out)


@pytest.mark.parametrize("family", ["bart", "gpt2"])
def test_full_rank_correction_reproduces_float_model(family, tmp_path):
    source, ctx = quantized(family, tmp_path / "out", LowRankCorrection(rank=999), **FLOAT_BESIDE)
    model, float_model = harness.load_output_model(ctx), load_model(source)[0]
    torch.testing.assert_close(harness.logits(model), harness.logits(float_model), atol=2e-3, rtol=1e-3)
    details = ctx.details["low_rank_correction"]
    pairs = [m for m in model.modules() if isinstance(m, LowRankCorrectedLinear)]
    assert details["layers"] == len(pairs) == len([e for e in read_edits(ctx.out) if e["op"] == "adapter"])
    assert details["weights"] == sum(p.numel() for m in pairs for p in m.adapter.parameters())
    assert all(errors[0] < 1e-6 for errors in details["error_left"].values())
    assert "no-size-reduction" in message_codes(ctx.warnings)


@pytest.mark.parametrize(("dtype", "bytes_each"), [("fp32", 4), ("fp16", 2)])
def test_bits_per_weight_include_stored_correction(dtype, bytes_each, tmp_path):
    source = every_family.model_with_layers("bart", 2)
    half = tmp_path / "half"
    load_model(source)[0].to(getattr(torch, {"fp32": "float32", "fp16": "float16"}[dtype])).save_pretrained(
        half
    )
    copy_tokenizer(source, half)
    plain, pairs = (
        every_family.run_stage(
            Quantize(), QuantizeSettings(**INT4, low_rank_correction=low_rank), half, "bart", tmp_path / name
        )
        for name, low_rank in {"plain": None, "pairs": LowRankCorrection(rank=3)}.items()
    )
    with safe_open(pairs.out / "model.safetensors", "pt") as file:
        thin = [file.get_slice(name) for name in file.keys() if ".adapter." in name]  # noqa: SIM118
        correction_bytes = bytes_each * sum(math.prod(part.get_shape()) for part in thin)
    matrices = [
        module for module in harness.load_output_model(pairs).modules() if isinstance(module, QuantizedMatrix)
    ]
    weights = sum(len(matrix.codes) * matrix.width for matrix in matrices)
    added = pairs.details["bits_per_weight"] - plain.details["bits_per_weight"]
    assert added == pytest.approx(8 * correction_bytes / weights, abs=2e-3)


def test_rank_zero_output_equals_plain_quantization(tmp_path):
    source, ctx = quantized("bert", tmp_path / "none", LowRankCorrection(rank=0))
    plain = every_family.run_stage(Quantize(), QuantizeSettings(**INT4), source, "bert", tmp_path / "plain")
    assert (ctx.out / "model.safetensors").read_bytes() == (plain.out / "model.safetensors").read_bytes()
    assert "low_rank_correction" not in ctx.details


def test_corrected_model_can_be_saved_and_trained_from_residual(tmp_path):
    source, ctx = quantized("bert", tmp_path / "made", LowRankCorrection(rank=4, iterations=2))
    usability_checks.check_save_and_load(ctx.out, tmp_path / "saved")
    assert ctx.details["float_linear_layers"] == []
    model, floats = harness.load_output_model(ctx), load_model(source)[0]
    prepare_qat(model, floats)
    layer = model.bert.encoder.layer[0].output.dense
    pair = layer.adapter.up.weight @ layer.adapter.down.weight
    float_weight = floats.bert.encoder.layer[0].output.dense.weight
    torch.testing.assert_close(layer.coded.weight + pair, float_weight)
    settings = FinetuneSettings(max_steps=2, batch_size=4, num_evals=0, precision="fp32", learning_rate=1e-2)
    trained = every_family.run_stage(Finetune(), settings, ctx.out, "bert", tmp_path / "trained")
    assert read_edits(trained.out) == read_edits(ctx.out)


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_output_objective_lowers_error_on_samples(method, tmp_path):
    source = every_family.model_with_layers("gpt2", 2)
    float_logits = harness.logits(load_model(source)[0])

    def off(name, low_rank):
        looks = low_rank is not None or method == "gptq"
        more = FLOAT_BESIDE | ({"calibration_samples": 8} if looks else {})
        settings = QuantizeSettings(**INT4, **more, method=method, low_rank_correction=low_rank)
        ctx = every_family.run_stage(Quantize(), settings, source, "gpt2", tmp_path / name)
        return float((harness.logits(harness.load_output_model(ctx)) - float_logits).square().mean()), ctx

    plain, _ = off("plain", None)
    of_outputs, ctx = off("outputs", LowRankCorrection(rank=8, objective="outputs"))
    assert of_outputs < 0.8 * plain
    assert ctx.details["calibration"]["tokens"] > 0
    assert set(ctx.details["low_rank_correction"]["error_left"]) == {
        n for n, m in load_model(source)[0].named_modules() if type(m) is torch.nn.Linear and n != "lm_head"
    }


@pytest.mark.parametrize("error", ["weights", "inputs", "outputs"])
def test_few_calibration_tokens_warn_for_data_aware_objectives(error, tmp_path):
    source, low_rank = every_family.model_with_layers("bert", 1), LowRankCorrection(rank=2, objective=error)
    rows = {"calibration_samples": 1} if error != "weights" else {}
    settings = QuantizeSettings(**INT4, low_rank_correction=low_rank, **rows)
    ctx = every_family.run_stage(Quantize(), settings, source, "bert", tmp_path / "few")
    messages = [message.message for message in ctx.warnings if message.code == "few-calibration-tokens"]
    assert len(messages) == (error != "weights"), ctx.warnings
    assert all(" 8 " in text for text in messages)
    if error != "weights":
        many = every_family.run_stage(
            Quantize(),
            settings.model_copy(update={"calibration_samples": 8}),
            source,
            "bert",
            tmp_path / "many",
        )
        assert many.details["calibration"]["tokens"] >= 32
        assert "few-calibration-tokens" not in message_codes(many.warnings)


def test_shared_layers_have_one_correction(tmp_path):
    shared = every_family.run_stage(
        ShareWeights(),
        ShareWeightsSettings(targets=["ffn"]),
        every_family.model_with_layers("bert", 2),
        "bert",
        tmp_path / "shared",
    ).out
    settings = QuantizeSettings(**INT4, low_rank_correction=LowRankCorrection(rank=3))
    model = harness.load_output_model(
        every_family.run_stage(Quantize(), settings, shared, "bert", tmp_path / "codes")
    )
    first, second = (layer.output.dense for layer in model.bert.encoder.layer)
    assert isinstance(first, LowRankCorrectedLinear)
    assert first is second


def test_calibration_data_is_needed_only_by_data_aware_objectives():
    def needs(**low_rank):
        return Quantize.needs_with(
            QuantizeSettings(**INT4, low_rank_correction=LowRankCorrection(**low_rank)), {"train"}
        )

    assert needs(objective="outputs") == needs(objective="inputs") == {"train"}
    assert needs() == needs(rank=0, objective="outputs") == frozenset()
    with raises_setting_codes("unused-setting"):
        QuantizeSettings(**INT4, low_rank_correction=LowRankCorrection(), calibration_samples=4)


def test_correction_larger_than_saved_bits_warns():
    """24 x 64 in 16 bits, coded in 4.25: 18,048 bits are saved, and rank 12 takes 12 x 88 x 16 = 16,896."""
    corrections = {1: made(drawn(), rank=12), 2: made(drawn(), rank=13)}

    layers = [SimpleNamespace(name="a", weight_id=1), SimpleNamespace(name="b", weight_id=2)]
    (warning,) = oversized_correction_warnings(layers, corrections, 4.25, 16)
    assert warning.code == "no-size-reduction"
    assert all(value in warning.message for value in ("1 of 2", "(b)"))
    assert oversized_correction_warnings(layers[:1], {1: corrections[1]}, 4.25, 16) == []


def test_untied_output_layer_gets_no_correction(tmp_path):
    source = every_family.model_with_layers("llama", 1)
    assert not load_model(source)[0].config.tie_word_embeddings
    settings = QuantizeSettings(**INT4, low_rank_correction=LowRankCorrection(rank=2))
    ctx = every_family.run_stage(Quantize(), settings, source, "llama", tmp_path / "out")
    assert ctx.details["low_rank_correction"]["layers"] == 7
    assert "lm_head" not in ctx.details["low_rank_correction"]["error_left"]


def test_smoothed_model_does_not_use_cached_statistics(tmp_path, monkeypatch):
    """What was kept of the stored model's inputs is not what the smoothed one's layers are fed."""
    from smelt.compress.quantize import low_rank_correction

    def cached(*_, **__):
        raise AssertionError("statistics of the model before it was smoothed")

    monkeypatch.setattr(low_rank_correction, "cached_statistics", cached)
    settings = QuantizeSettings(
        scheme="int8-dynamic",
        smoothquant_alpha=0.5,
        low_rank_correction=LowRankCorrection(rank=2, objective="outputs"),
        calibration_samples=4,
    )
    ctx = every_family.run_stage(
        Quantize(), settings, every_family.model_with_layers("llama", 1), "llama", tmp_path / "out"
    )
    assert ctx.details["smoothed"]
    assert ctx.details["low_rank_correction"]["layers"]


def test_size_warning_depends_on_stored_dtype(tmp_path):
    """32 x 32 in 16 bits, coded in 5: 11,264 bits are saved, and rank 12 takes 12 x 64 x 16 = 12,288."""
    source, reported = every_family.model_with_layers("bert", 1), {}
    for kind in ("float16", "float32"):
        stored = tmp_path / kind
        load_model(source)[0].to(getattr(torch, kind)).save_pretrained(stored)
        copy_tokenizer(source, stored)
        settings = QuantizeSettings(**INT4, low_rank_correction=LowRankCorrection(rank=12))
        ctx = every_family.run_stage(Quantize(), settings, stored, "bert", tmp_path / f"{kind}-out")
        reported[kind] = [message for message in ctx.warnings if message.code == "no-size-reduction"]
    assert len(reported["float16"]) == 1
    assert reported["float32"] == []
