"""Float weights behind codes: a second training goes on from those of the first."""

import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from smelt.compress.distill.stage import Distill, DistillSettings
from smelt.compress.finetune import Finetune, FinetuneSettings, train_with_techniques
from smelt.compress.quantize.qat import (
    load_trainable,
    qat_layers,
    read_master_weights,
    save_trained,
    write_master_weights,
)
from smelt.compress.quantize.stage import Quantize, QuantizeSettings
from smelt.core.artifact import MASTER_WEIGHTS_FILE, Artifact, Manifest
from smelt.core.errors import InputError
from smelt.core.files import sha256_of
from smelt.core.messages import message_codes
from smelt.data.splits import Columns, Example, Split
from smelt.models.checkpoint import load_model
from smelt.tasks.read_split import read_split
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.models import every_family, tiny

TASK = "text-classification"
ROWS = Split("x", tuple(Example(s, label=i % 2) for i, s in enumerate(tiny.SENTENCES * 2)))
TRAIN = {"max_steps": 3, "learning_rate": 5e-3, "batch_size": 8, "precision": "fp32", "num_evals": 0}


@pytest.fixture(scope="module")
def coded(tmp_path_factory):
    """A tiny classifier of ternary and int4 codes."""
    source = every_family.model_with_layers("bert", 2)
    settings = QuantizeSettings(scheme="ternary", group_size=32)
    return harness.run_stage(Quantize(), settings, source, tmp_path_factory.mktemp("coded") / "out", TASK).out


def trained(source, out, **settings):
    return harness.run_stage(Finetune(), FinetuneSettings(**TRAIN | settings), source, out, TASK, ROWS)


@pytest.fixture(scope="module")
def first(coded, tmp_path_factory):
    return trained(coded, tmp_path_factory.mktemp("first") / "out")


def latents(model):
    return {name: latent.weight.detach().clone() for name, latent in qat_layers(model)}


def test_second_training_starts_from_master_weights_of_first(coded, tmp_path):
    source, settings = tiny.as_artifact(coded, TASK), FinetuneSettings(**TRAIN)
    ctx = harness.make_context(tmp_path / "first", TASK, ROWS)
    model, edits = load_trainable(source, ctx)
    assert ctx.details["latent_weights"] == "codes"
    train_with_techniques(model, source, settings, ctx, edits=edits, stage="finetune")
    final = latents(model)
    save_trained(model, edits, coded, settings.dtype, settings.qat, ctx)
    assert ctx.details["latent_bytes"] == (ctx.out / MASTER_WEIGHTS_FILE).stat().st_size
    later = harness.make_context(tmp_path / "second", TASK, ROWS)
    retrainable, _ = load_trainable(tiny.as_artifact(ctx.out, TASK), later)
    initial = latents(retrainable)
    assert initial.keys() == final.keys()
    assert all(initial[name].equal(final[name]) for name in final)
    assert later.details["latent_weights"] == "kept"
    codes = load_model(ctx.out)[0].bert.pooler.dense.matrix.dequantize()
    assert not initial["bert.pooler.dense"].equal(codes)  # which a training without them would start from
    assert later.warnings == []


def test_quantizing_master_weights_reproduces_stored_weights(first, tmp_path):
    ctx = harness.make_context(tmp_path / "out", TASK)
    model, edits = load_trainable(tiny.as_artifact(first.out, TASK), ctx)
    save_trained(model, edits, first.out, "keep", None, ctx)
    assert ctx.details["codes_changed"] == 0
    assert sha256_of(ctx.out / "model.safetensors") == sha256_of(first.out / "model.safetensors")
    assert sha256_of(ctx.out / MASTER_WEIGHTS_FILE) == sha256_of(first.out / MASTER_WEIGHTS_FILE)


def test_master_weights_are_not_stored_if_disabled(coded, tmp_path):
    ctx = trained(coded, tmp_path / "out", qat={"save_master_weights": False})
    assert not (ctx.out / MASTER_WEIGHTS_FILE).exists()
    assert "latent_bytes" not in ctx.details
    plain = trained(every_family.model_with_layers("bert", 2), tmp_path / "float")
    assert not (plain.out / MASTER_WEIGHTS_FILE).exists()


def test_lora_training_stores_no_master_weights(first, tmp_path):
    ctx = trained(first.out, tmp_path / "out", lora={"r": 2})
    assert not (ctx.out / MASTER_WEIGHTS_FILE).exists()


def test_tied_matrix_has_one_master_weight(tmp_path):
    settings = QuantizeSettings(scheme="int4", group_size=16)
    rows = read_split(str(tiny.write_pairs(tmp_path / "r.jsonl", 16)), "translation", Columns(), tmp_path)
    source = every_family.model_with_layers("marian", 2)
    quantized = harness.run_stage(Quantize(), settings, source, tmp_path / "coded").out
    # a student of fewer layers, whose names are others than those of what was quantized
    student = DistillSettings(**TRAIN, student={"decoder_layers": [1]})
    ctx = harness.run_stage(Distill(), student, quantized, tmp_path / "out", data=rows)
    master_weights = load_file(ctx.out / MASTER_WEIGHTS_FILE)
    model, _ = load_trainable(tiny.as_artifact(ctx.out), harness.make_context(tmp_path / "later"))
    assert len(master_weights) == len({id(latent.weight) for _, latent in qat_layers(model)})
    assert model.lm_head.weight is model.model.shared.weight
    assert all(
        master_weights[name].equal(latent.weight)
        for name, latent in qat_layers(model)
        if name in master_weights
    )
    assert not any("decoder.layers.1" in name for name in master_weights)


def test_master_weights_are_stored_with_low_rank_correction(tmp_path):
    settings = QuantizeSettings(scheme="int4", group_size=16, low_rank_correction={"rank": 2})
    quantized = harness.run_stage(
        Quantize(), settings, every_family.model_with_layers("bert", 2), tmp_path / "coded", TASK
    ).out
    ctx = trained(quantized, tmp_path / "out")
    later = harness.make_context(tmp_path / "later", TASK)
    model, _ = load_trainable(tiny.as_artifact(ctx.out, TASK), later)
    assert later.details["latent_weights"] == "kept"
    assert any(name.endswith(".coded") for name, _ in qat_layers(model))


def test_mismatched_master_weights_are_ignored_with_warning(coded, first, tmp_path):
    model_folder = tmp_path / "model"
    shutil.copytree(coded, model_folder)
    shutil.copyfile(first.out / MASTER_WEIGHTS_FILE, model_folder / MASTER_WEIGHTS_FILE)  # of the same shapes
    ctx = harness.make_context(tmp_path / "out", TASK)
    load_trainable(tiny.as_artifact(model_folder, TASK), ctx)
    assert ctx.details["latent_weights"] == "codes"
    (message,) = ctx.warnings
    assert message.code == "master-weights-outdated"
    shapes = {name: tuple(t.shape) for name, t in load_file(first.out / MASTER_WEIGHTS_FILE).items()}
    other = dict(shapes) | {"bert.pooler.dense": (32, 16)}
    master_weights, warning = read_master_weights(first.out, other)
    assert master_weights is None
    assert warning.code == "master-weights-mismatch"
    assert "'bert.pooler.dense'" in warning.message
    assert read_master_weights(first.out, shapes | {"more": (1, 1)})[0] is None


def test_invalid_master_weights_fall_back_to_float_parent(tmp_path):
    """What does not fit is as absent: the float weights of the step before are there as ever."""
    source = every_family.model_with_layers("bert", 2)
    quantized = harness.run_stage(Quantize(), QuantizeSettings(), source, tmp_path / "coded", TASK)
    write_master_weights({"strange": torch.zeros(2, 2)}, quantized.out)
    parent = tiny.as_artifact(source, TASK)
    manifest = Manifest(
        key="b" * 64, format="torch", task=TASK, stage="quantize", settings={}, seed=0, parent=parent.key,
        versions={},
    )  # fmt: skip
    ctx = replace(harness.make_context(tmp_path / "out", TASK), ancestors={"model": parent})
    load_trainable(Artifact(quantized.out, manifest), ctx)
    assert ctx.details["latent_weights"] == "model"
    assert message_codes(ctx.warnings) == ["master-weights-mismatch"]


@pytest.mark.parametrize("length", [0, -1])
def test_truncated_master_weights_are_rejected(first, tmp_path, length):
    model_folder = tmp_path / "model"
    shutil.copytree(first.out, model_folder)
    (model_folder / MASTER_WEIGHTS_FILE).write_bytes((first.out / MASTER_WEIGHTS_FILE).read_bytes()[:length])
    with raises_code("damaged-file", InputError) as caught:
        trained(model_folder, tmp_path / "out")
    assert caught.value.file == str(model_folder / MASTER_WEIGHTS_FILE)


def test_non_finite_master_weights_are_rejected_with_layer_name(first, tmp_path):
    model_folder = tmp_path / "model"
    shutil.copytree(first.out, model_folder)
    tensors = load_file(model_folder / MASTER_WEIGHTS_FILE)
    tensors["bert.pooler.dense"][3, 4] = torch.nan
    save_file(
        tensors,
        model_folder / MASTER_WEIGHTS_FILE,
        metadata={"model": sha256_of(model_folder / "model.safetensors")},
    )
    with raises_code("non-finite-weights", InputError) as caught:
        trained(model_folder, tmp_path / "out")
    assert caught.value.file == str(model_folder / MASTER_WEIGHTS_FILE)
    assert "bert.pooler.dense" in str(caught.value)
