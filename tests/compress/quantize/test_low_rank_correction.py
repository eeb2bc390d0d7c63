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
from smelt.compress.quantize.plan_layers import dequantize_codes, round_to_nearest
from smelt.compress.quantize.qat import prepare_qat
from smelt.compress.quantize.settings import LowRankCorrection, QuantizeSettings
from smelt.compress.quantize.stage import Quantize
from smelt.compress.share_weights import ShareWeights, ShareWeightsSettings
from smelt.core.messages import message_codes
from smelt.models.checkpoint import copy_tokenizer, load_model
from smelt.models.edits import read_edits
from smelt.quantization.layers import LowRankCorrectedLinear, QuantizedMatrix
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


def made(weight, metric=None, scheme="int4", **settings):
    kind = find_scheme(scheme)
    options = default_options(kind)
    return quantize_with_correction(
        weight,
        lambda left: round_to_nearest(left, kind, options),
        lambda codes: dequantize_codes(codes, kind, options, weight),
        LowRankCorrection(**settings),
        metric or ErrorMetric(),
    )


def rounded(weight, scheme="int4"):
    kind = find_scheme(scheme)
    codes = round_to_nearest(torch.as_tensor(weight, dtype=torch.float32), kind, default_options(kind))
    return dequantize_codes(codes, kind, default_options(kind), weight).double().numpy()


def truncated(matrix, rank):
    u, s, vt = np.linalg.svd(matrix, full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ vt[:rank]


@pytest.mark.parametrize("init", ["quantize", "svd"])
def test_codes_and_pair_alternate_as_in_algorithm_1_of_loftq_and_errors_fall(init):
    weight = drawn()
    exact, pair = weight.double().numpy(), np.zeros(weight.shape)
    if init == "svd":  # SVDQuant takes the largest directions away before anything is coded
        pair = truncated(exact, 6)
    errors = []
    for _ in range(4):
        codes = rounded(exact - pair)
        pair = truncated(exact - codes, 6)
        errors.append(((exact - codes - pair) ** 2).sum())
    found = made(weight, rank=6, iterations=4, init=init)
    whole = ((exact - rounded(exact)) ** 2).sum()
    np.testing.assert_allclose(found.error_ratios, np.array(errors) / whole, rtol=1e-3)
    assert errors[3] < errors[2] < errors[1] < errors[0] < whole
    np.testing.assert_allclose(found.correction.double().numpy(), pair, atol=1e-3)


def test_the_best_round_is_kept():
    """With one scale a row, and few directions left, rounds also lose (seen: a later one is worse)."""
    weight = drawn(8, 16)
    found = made(weight, rank=3, iterations=12)
    kept = (
        weight
        - dequantize_codes(found.codes, find_scheme("int4"), default_options(find_scheme("int4")), weight)
        - found.correction
    )
    whole = ((weight.double().numpy() - rounded(weight)) ** 2).sum()
    assert float(kept.double().square().sum()) / whole == pytest.approx(min(found.error_ratios), rel=1e-4)
    assert min(found.error_ratios) < found.error_ratios[-1]


def test_no_rank_is_the_codes_alone_and_full_rank_is_the_float_matrix():
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
    found = empty_statistics(inputs, second=True)
    found.update(x)
    return x.double().numpy(), found


def test_error_of_inputs_is_the_formula_of_lqer():
    """S = diag(a / sqrt(min a max a)), a the mean magnitudes; A' B' = S^-1 SVD(S E), E = W - Q."""
    weight = drawn()
    x, seen = seen_of()
    a = np.abs(x).mean(axis=0)
    s = a / np.sqrt(a.min() * a.max())
    off = weight.double().numpy() - rounded(weight)
    wanted = truncated(off * s, 5) / s
    found = made(weight, correction_metric(LowRankCorrection(objective="inputs"), seen), rank=5)
    np.testing.assert_allclose(found.correction.double().numpy(), wanted, atol=1e-5)


def test_error_of_outputs_is_the_theorem_of_qera():
    """SVD_r(E R^1/2) R^-1/2 with R = E[x x^T] (here with the ridge), by the symmetric root."""
    weight = drawn()
    x, seen = seen_of()
    values, vectors = np.linalg.eigh(x.T @ x / len(x))
    values = values + 0.1 * values.mean()
    root, back = vectors * values**0.5 @ vectors.T, vectors * values**-0.5 @ vectors.T
    off = weight.double().numpy() - rounded(weight)
    wanted = truncated(off @ root, 5) @ back
    found = made(weight, correction_metric(LowRankCorrection(objective="outputs"), seen), rank=5)
    np.testing.assert_allclose(found.correction.double().numpy(), wanted, atol=1e-4)

    def lost(pair):
        return (((off - pair) @ x.T) ** 2).sum()

    assert lost(wanted) < 0.9 * lost(truncated(off, 5))


def quantized(family, out, low_rank, **more):
    source = every_family.model_with_layers(family, 2)
    settings = QuantizeSettings(**INT4, **more, low_rank_correction=low_rank)
    return source, every_family.run_stage(Quantize(), settings, source, family, out)


@pytest.mark.parametrize("family", ["bart", "gpt2"])
def test_at_full_rank_the_model_is_the_float_one_but_for_head_and_tables(family, tmp_path):
    source, ctx = quantized(family, tmp_path / "out", LowRankCorrection(rank=999), **FLOAT_BESIDE)
    model, whole = harness.load_output_model(ctx), load_model(source)[0]
    torch.testing.assert_close(harness.logits(model), harness.logits(whole), atol=2e-3, rtol=1e-3)
    details = ctx.details["low_rank_correction"]
    pairs = [m for m in model.modules() if isinstance(m, LowRankCorrectedLinear)]
    assert details["layers"] == len(pairs) == len([e for e in read_edits(ctx.out) if e["op"] == "adapter"])
    assert details["weights"] == sum(p.numel() for m in pairs for p in m.adapter.parameters())
    assert all(left[0] < 1e-6 for left in details["error_left"].values())
    assert "no-size-reduction" in message_codes(ctx.warnings)


@pytest.mark.parametrize(("dtype", "bytes_each"), [("fp32", 4), ("fp16", 2)])
def test_bits_a_weight_have_the_pairs_as_the_file_does(dtype, bytes_each, tmp_path):
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
        taken = bytes_each * sum(math.prod(part.get_shape()) for part in thin)
    matrices = [
        module for module in harness.load_output_model(pairs).modules() if isinstance(module, QuantizedMatrix)
    ]
    weights = sum(len(matrix.codes) * matrix.width for matrix in matrices)
    added = pairs.details["bits_per_weight"] - plain.details["bits_per_weight"]
    assert added == pytest.approx(8 * taken / weights, abs=2e-3)


def test_no_rank_is_plain_and_the_key_is_that_of_before(tmp_path):
    source, ctx = quantized("bert", tmp_path / "none", LowRankCorrection(rank=0))
    plain = every_family.run_stage(Quantize(), QuantizeSettings(**INT4), source, "bert", tmp_path / "plain")
    assert (ctx.out / "model.safetensors").read_bytes() == (plain.out / "model.safetensors").read_bytes()
    assert "low_rank_correction" not in ctx.details


def test_what_is_made_is_saved_exported_and_trained_from_what_the_pair_leaves(tmp_path):
    source, ctx = quantized("bert", tmp_path / "made", LowRankCorrection(rank=4, iterations=2))
    usability_checks.check_save_and_load(ctx.out, tmp_path / "saved")
    assert ctx.details["float_linear_layers"] == []
    model, floats = harness.load_output_model(ctx), load_model(source)[0]
    prepare_qat(model, floats)
    layer = model.bert.encoder.layer[0].output.dense
    pair = layer.adapter.up.weight @ layer.adapter.down.weight
    own = floats.bert.encoder.layer[0].output.dense.weight
    torch.testing.assert_close(layer.coded.weight + pair, own)
    settings = FinetuneSettings(max_steps=2, batch_size=4, num_evals=0, precision="fp32", learning_rate=1e-2)
    trained = every_family.run_stage(Finetune(), settings, ctx.out, "bert", tmp_path / "trained")
    assert read_edits(trained.out) == read_edits(ctx.out)


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_errors_of_outputs_look_at_rows_and_are_smaller_there(method, tmp_path):
    source = every_family.model_with_layers("gpt2", 2)
    whole = harness.logits(load_model(source)[0])

    def off(name, low_rank):
        looks = low_rank is not None or method == "gptq"
        more = FLOAT_BESIDE | ({"calibration_samples": 8} if looks else {})
        settings = QuantizeSettings(**INT4, **more, method=method, low_rank_correction=low_rank)
        ctx = every_family.run_stage(Quantize(), settings, source, "gpt2", tmp_path / name)
        return float((harness.logits(harness.load_output_model(ctx)) - whole).square().mean()), ctx

    plain, _ = off("plain", None)
    of_outputs, ctx = off("outputs", LowRankCorrection(rank=8, objective="outputs"))
    assert of_outputs < 0.8 * plain
    assert ctx.details["calibration"]["tokens"] > 0
    assert set(ctx.details["low_rank_correction"]["error_left"]) == {
        n for n, m in load_model(source)[0].named_modules() if type(m) is torch.nn.Linear and n != "lm_head"
    }


@pytest.mark.parametrize("error", ["weights", "inputs", "outputs"])
def test_a_pair_that_is_nearest_on_next_to_nothing_is_told(error, tmp_path):
    source, low_rank = every_family.model_with_layers("bert", 1), LowRankCorrection(rank=2, objective=error)
    rows = {"calibration_samples": 1} if error != "weights" else {}
    settings = QuantizeSettings(**INT4, low_rank_correction=low_rank, **rows)
    ctx = every_family.run_stage(Quantize(), settings, source, "bert", tmp_path / "few")
    messages = [one.message for one in ctx.warnings if one.code == "few-calibration-tokens"]
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


def test_layers_that_stand_in_several_places_have_one_pair(tmp_path):
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
    one, other = (layer.output.dense for layer in model.bert.encoder.layer)
    assert isinstance(one, LowRankCorrectedLinear)
    assert one is other


def test_rows_are_asked_for_where_the_pair_is_measured_by_them():
    def needs(**low_rank):
        return Quantize.needs_with(
            QuantizeSettings(**INT4, low_rank_correction=LowRankCorrection(**low_rank)), {"train"}
        )

    assert needs(objective="outputs") == needs(objective="inputs") == {"train"}
    assert needs() == needs(rank=0, objective="outputs") == frozenset()
    with raises_setting_codes("unused-setting"):
        QuantizeSettings(**INT4, low_rank_correction=LowRankCorrection(), calibration_samples=4)


def test_a_pair_that_takes_what_codes_save_is_warned_of():
    """24 x 64 in 16 bits, coded in 4.25: 18,048 bits are saved, and rank 12 takes 12 x 88 x 16 = 16,896."""
    found = {1: made(drawn(), rank=12), 2: made(drawn(), rank=13)}

    layers = [SimpleNamespace(name="a", weight_id=1), SimpleNamespace(name="b", weight_id=2)]
    (warning,) = oversized_correction_warnings(layers, found, 4.25, 16)
    assert warning.code == "no-size-reduction"
    assert all(value in warning.message for value in ("1 of 2", "(b)"))
    assert oversized_correction_warnings(layers[:1], {1: found[1]}, 4.25, 16) == []


def test_an_output_layer_of_its_own_gets_no_pair(tmp_path):
    source = every_family.model_with_layers("llama", 1)
    assert not load_model(source)[0].config.tie_word_embeddings
    settings = QuantizeSettings(**INT4, low_rank_correction=LowRankCorrection(rank=2))
    ctx = every_family.run_stage(Quantize(), settings, source, "llama", tmp_path / "out")
    assert ctx.details["low_rank_correction"]["layers"] == 7
    assert "lm_head" not in ctx.details["low_rank_correction"]["error_left"]


def test_what_was_smoothed_is_looked_at_anew(tmp_path, monkeypatch):
    """What was kept of the stored model's inputs is not what the smoothed one's layers are fed."""
    from smelt.compress.quantize import low_rank_correction

    def kept(*_, **__):
        raise AssertionError("statistics of the model before it was smoothed")

    monkeypatch.setattr(low_rank_correction, "cached_statistics", kept)
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


def test_what_codes_save_is_told_of_the_type_that_weights_are_stored_in(tmp_path):
    """32 x 32 in 16 bits, coded in 5: 11,264 bits are saved, and rank 12 takes 12 x 64 x 16 = 12,288."""
    source, reported = every_family.model_with_layers("bert", 1), {}
    for kind in ("float16", "float32"):
        stored = tmp_path / kind
        load_model(source)[0].to(getattr(torch, kind)).save_pretrained(stored)
        copy_tokenizer(source, stored)
        settings = QuantizeSettings(**INT4, low_rank_correction=LowRankCorrection(rank=12))
        ctx = every_family.run_stage(Quantize(), settings, stored, "bert", tmp_path / f"{kind}-out")
        reported[kind] = [one for one in ctx.warnings if one.code == "no-size-reduction"]
    assert len(reported["float16"]) == 1
    assert reported["float32"] == []
