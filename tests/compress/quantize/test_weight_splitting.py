"""Ternary layers that become two binary ones compute the same, and go on from there (BinaryBERT)."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from smelt.compress.distill.stage import Distill, DistillSettings
from smelt.compress.finetune import Finetune, FinetuneSettings
from smelt.compress.prune.stage import Prune, PruneSettings
from smelt.compress.quantize.plan_layers import quantized_weight_bits
from smelt.compress.quantize.qat import as_converted, load_trainable, qat_layers, save_trained
from smelt.compress.quantize.qat_extensions import (
    split_ternary_groups,
    split_ternary_layers,
)
from smelt.compress.quantize.stage import Quantize, QuantizeSettings
from smelt.core.artifact import MASTER_WEIGHTS_FILE
from smelt.core.errors import InputError
from smelt.export.onnx_stage import Onnx
from smelt.export.settings import OnnxSettings
from smelt.models.checkpoint import load_model
from smelt.quantization.layers import QuantizedMatrix, SplitLinear, layer_scheme
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.models import every_family, tiny

TERNARY = {"scheme": "ternary", "group_size": 32, "accuracy_level": 0}
TRAIN = {"max_steps": 3, "learning_rate": 3e-3, "batch_size": 4, "precision": "fp32", "num_evals": 0}
# signs cross zero at rates that move weights as far as half a scale
SPLIT = TRAIN | {"qat": {"weight_splitting": True}, "learning_rate": 0.1}


def published(w):
    """The rows of `w`, split as binary_model_init.py of BinaryBERT does it (equations 5 to 8), in float64."""
    ones, twos = np.empty_like(w), np.empty_like(w)
    for row, (first_half, second_half) in zip(w, zip(ones, twos, strict=True), strict=True):
        inside = np.abs(row) > 0.7 * np.abs(row).mean()
        a = np.abs(row[inside]).mean()
        outside, n0 = row[~inside], (~inside).sum()
        b = (a * len(row) - np.abs(row).sum()) / (2 * n0)
        first_half[~inside] = np.where(outside > 0, outside + b, b)
        second_half[~inside] = np.where(outside >= 0, -b, outside - b)
        a11 = np.abs(row[inside]).sum()
        m = (a11 + np.abs(second_half[~inside]).sum() - np.abs(first_half[~inside]).sum()) / (2 * a11)
        first_half[inside], second_half[inside] = m * row[inside], (1 - m) * row[inside]
    return ones, twos


def ternary_of(w):
    """Threshold 0.7 mean |w|, scale the mean of what lies beyond: codes and scales by rows."""
    codes = np.sign(w) * (np.abs(w) > 0.7 * np.abs(w).mean(axis=1, keepdims=True))
    return codes, (np.abs(w) * (codes != 0)).sum(axis=1) / (codes != 0).sum(axis=1)


@pytest.mark.parametrize("filled", [0, 12])
def test_split_values_equal_binarybert_reference(filled):
    """Also where zeros fill the group up, which are no weights."""
    w = np.random.default_rng(0).normal(size=(12, 64)) * 0.05
    w[3, 5] = 0.0
    codes, scales = ternary_of(w)
    real = torch.arange(64 + filled)[None] < 64
    groups = (F.pad(torch.tensor(part), (0, filled))[:, None] for part in (w, codes))
    parts = split_ternary_groups(*groups, torch.tensor(scales)[:, None], real)
    assert all(part[..., 64:].eq(0).all() for part in parts)
    first_half, second_half = (part[:, 0, :64].numpy() for part in parts)
    expected = published(w)
    assert first_half == pytest.approx(expected[0], abs=1e-12)
    assert second_half == pytest.approx(expected[1], abs=1e-12)
    assert first_half + second_half == pytest.approx(w, abs=1e-15)

    def binary(v):
        return np.where(v >= 0, 1, -1) * np.abs(v).mean(axis=1, keepdims=True)

    assert binary(first_half) + binary(second_half) == pytest.approx(codes * scales[:, None], abs=1e-12)


@pytest.mark.parametrize("strange", ["zeros", "equal", "learned", "other signs", "one-sided", "padded"])
def test_split_halves_sum_to_ternary_matrix(strange):
    """Signs are right also where mean magnitudes cannot be: with half of its scale they add up to it."""
    rng = torch.Generator().manual_seed(0)
    w = torch.randn(6, 1, 32, generator=rng, dtype=torch.float64)
    codes = w.sign() * (w.abs() > 0.6)
    scales = (w.abs() * (codes != 0)).sum(-1) / (codes != 0).sum(-1)
    real = torch.ones(1, 32, dtype=torch.bool)
    if strange == "zeros":
        w[2], codes[2], scales[2] = 0, 0, 0
    elif strange == "equal":
        w, codes, scales = w.sign(), w.sign(), torch.ones(6, 1)
    elif strange == "learned":
        scales = scales / 4
    elif strange == "other signs":
        codes = -codes
    elif strange == "one-sided":
        w = w.abs() * 0.01 + 0.3
        w[..., 0] = 1
        codes = (w > 0.9).double()
    else:
        real[:, 20:], w[..., 20:], codes[..., 20:] = False, 0, 0
    first_half, second_half = split_ternary_groups(w, codes, scales, real)
    sign_sum = torch.where(first_half >= 0, 1.0, -1.0) + torch.where(second_half >= 0, 1.0, -1.0)
    reconstructed = (sign_sum * scales[..., None] / 2)[..., real[0]]
    assert reconstructed.equal((codes * scales[..., None])[..., real[0]])


def ternary_model(family, out):
    source = every_family.model_with_layers(family, 2)
    return every_family.run_stage(Quantize(), QuantizeSettings(**TERNARY), source, family, out).out


def trained(family, source, out, **settings):
    return every_family.run_stage(Finetune(), FinetuneSettings(**TRAIN | settings), source, family, out)


@pytest.mark.parametrize("family", ["bert", "t5", "llama"])
def test_split_model_computes_same_outputs_as_ternary(family, tmp_path):
    first = trained(family, ternary_model(family, tmp_path / "coded"), tmp_path / "ternary")
    expected = harness.logits(harness.load_output_model(first))
    ctx = harness.make_context(tmp_path / "out", first.task)
    model, edits = load_trainable(tiny.as_artifact(first.out, first.task), ctx)
    float_weights = {name: latent.weight.detach().clone() for name, latent in qat_layers(model)}
    before = {m.quantized.matrix.scheme.name for _, m in qat_layers(model)}
    edits, count = split_ternary_layers(model, edits)
    spread = float(expected.std())
    assert harness.logits(model).allclose(expected, atol=2e-3 * spread)
    with as_converted(model):
        assert harness.logits(model).allclose(expected, atol=2e-3 * spread)
    halves = {name: m for name, m in model.named_modules() if isinstance(m, SplitLinear)}
    assert len(halves) == count >= 8
    for name, half in halves.items():  # and what is behind them is what the training before kept
        assert (half.first.weight + half.second.weight).allclose(float_weights[name], atol=1e-6)
    assert before == {"ternary", "int4"}
    save_trained(model, edits, first.out, "keep", None, ctx)
    reloaded, _ = load_model(ctx.out)
    assert harness.logits(reloaded).allclose(expected, atol=2e-3 * spread)
    assert {layer_scheme(m) for m in reloaded.modules()} - {None} == {"binary", "int4"}


@pytest.mark.parametrize("family", ["bert"])
def test_half_width_ternary_model_is_split_into_full_width_binary(family, tmp_path):
    """The paper's way: half the heads and neurons, ternary with a teacher, split, binary with the teacher."""
    float_folder = every_family.model_with_layers(family, 2)
    prune_settings = PruneSettings(keep_ratio=0.5, importance="magnitude", calibration_samples=4)
    narrow = every_family.run_stage(Prune(), prune_settings, float_folder, family, tmp_path / "narrow")
    coded = every_family.run_stage(
        Quantize(), QuantizeSettings(**TERNARY), narrow.out, family, tmp_path / "coded"
    )
    teacher = {"ancestors": {"model": tiny.as_artifact(float_folder, narrow.task)}}

    def taught(source, name, settings):
        distill_settings = DistillSettings(**settings)
        return harness.run_stage(
            Distill(), distill_settings, source, tmp_path / name, narrow.task, narrow.data, **teacher
        )

    ternary = taught(coded.out, "ternary", TRAIN)
    ctx = taught(ternary.out, "binary", SPLIT)
    assert ctx.details["latent_weights"] == "kept"
    assert ctx.details["split_layers"] >= 8
    assert ctx.details["codes_changed"] > 0
    assert ctx.details["bits_per_weight"] == quantized_weight_bits(harness.load_output_model(ctx))
    stored = load_file(ctx.out / "model.safetensors")
    stored_bytes = sum(t.nbytes for name, t in stored.items() if name.endswith((".codes", ".scales")))
    ternary_matrices = {
        id(m): m for m in harness.load_output_model(ternary).modules() if isinstance(m, QuantizedMatrix)
    }
    num_weights = sum(len(m.codes) * m.width for m in ternary_matrices.values())
    assert ctx.details["bits_per_weight"] == pytest.approx(8 * stored_bytes / num_weights, abs=1e-3)
    # a binary model trains on as any other, from its own float weights, and leaves
    retrained = trained(family, ctx.out, tmp_path / "more")
    assert retrained.details["latent_weights"] == "kept"
    assert (retrained.out / MASTER_WEIGHTS_FILE).is_file()
    every_family.run_stage(
        Onnx(), OnnxSettings(generation_graph=False), retrained.out, family, tmp_path / "onnx"
    )


def test_embedding_matrix_is_not_split(tmp_path):
    settings = QuantizeSettings(**TERNARY, embedding_scheme="ternary")
    source = every_family.model_with_layers("marian", 2)
    quantized = harness.run_stage(Quantize(), settings, source, tmp_path / "coded")
    model, edits = load_trainable(tiny.as_artifact(quantized.out), harness.make_context(tmp_path / "out"))
    split_ternary_layers(model, edits)
    assert {n for n, m in qat_layers(model) if m.quantized.matrix.scheme.name == "ternary"} >= {"lm_head"}
    assert model.lm_head.weight is model.model.shared.weight


def test_unsupported_models_are_rejected_for_weight_splitting(tmp_path):
    source = every_family.model_with_layers("bert", 1)

    def refuses(code, **settings):
        out = tmp_path / code
        quantized = harness.run_stage(
            Quantize(), QuantizeSettings(**settings), source, out, "text-classification"
        ).out
        with raises_code(code, InputError) as caught:
            trained("bert", quantized, out / "trained", qat={"weight_splitting": True})
        assert caught.value.setting == "qat.weight_splitting"

    refuses("no-layer-of-scheme", scheme="int4")
    refuses("wrong-granularity", scheme="ternary", granularity="channel", group_size=32)
    refuses("has-low-rank-correction", **TERNARY, low_rank_correction={"rank": 2})
    with raises_code("no-layer-of-scheme", InputError):
        trained("bert", source, tmp_path / "float", qat={"weight_splitting": True})
