"""GPTQ as a part of the stage: blocks in turn, rows at a time, what is told."""

import json
import shutil
import weakref

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from smelt.calibration.samples import load_calibration_samples
from smelt.calibration.statistics import collect_statistics
from smelt.compress.quantize import gptq as module
from smelt.compress.quantize import plan_layers
from smelt.compress.quantize.gptq import column_updates, gptq_quantize
from smelt.compress.quantize.nested_settings import LowRankCorrection
from smelt.compress.quantize.plan_layers import round_to_nearest, scheme_grid
from smelt.compress.quantize.settings import QuantizeSettings
from smelt.compress.quantize.stage import Quantize
from smelt.compress.sparsify.stage import Sparsify, SparsifySettings
from smelt.data.splits import Columns
from smelt.models.checkpoint import load_model
from smelt.quantization.schemes.registry import find_scheme
from smelt.tasks.read_split import read_split
from tests.support import harness
from tests.support.expected_errors import raises_setting_codes
from tests.support.models import every_family, tiny


def of(codes, scheme, options, width):
    return scheme.dequantize(codes.q_weight, codes.qparams, options).flatten(1)[:, :width].double().numpy()


def stage(family, out, **settings):
    source = every_family.model_with_layers(family, 2)
    quantize_settings = QuantizeSettings(
        scheme="int4", method="gptq", group_size=16, calibration_samples=6, **settings
    )
    return source, every_family.run_stage(Quantize(), quantize_settings, source, family, out)


@pytest.mark.parametrize("family", ["bert", "bart", "gpt2"])
def test_each_layer_is_calibrated_on_quantized_previous_layers(family, tmp_path):
    source, ctx = stage(family, tmp_path / "out")
    model = harness.load_output_model(ctx)
    plain, _ = load_model(source)
    names = list(ctx.details["gptq_error"])
    last = [n for n in names if ".1." in n][-1]  # the last layer of the last block, in the order of calls
    with torch.no_grad():
        for name in names[: names.index(last)]:
            plain.get_submodule(name).weight.copy_(model.get_submodule(name).matrix.dequantized())
    artifact = tiny.as_artifact(source, ctx.task)
    rows = load_calibration_samples(plain, artifact, 6, ctx, "quantize", held_back=True)
    with collect_statistics(plain, rows, {last: [plain.get_submodule(last)]}, ctx) as statistics:
        scheme, matrix = find_scheme("int4"), model.get_submodule(last).matrix
        weight = plain.get_submodule(last).weight.detach()
        statistics_of_last = statistics[last]
        updates = column_updates(statistics_of_last, "static")
        codes = gptq_quantize(weight, updates, scheme, matrix.options, scheme_grid)
    values = of(codes, scheme, matrix.options, weight.shape[1])
    assert np.isclose(values, matrix.dequantized().double().numpy(), atol=1e-5).mean() > 0.99
    nearest = of(round_to_nearest(weight, scheme, matrix.options), scheme, matrix.options, weight.shape[1])
    assert not np.isclose(values, nearest, atol=1e-5).all()
    assert (statistics_of_last.held_back is None) == (family == "gpt2")  # which has two windows only
    moment = statistics_of_last.judged.second_moment.numpy()
    errors = [((w - weight.numpy()) @ moment * (w - weight.numpy())).sum() for w in (values, nearest)]
    assert ctx.details["gptq_error"][last] == pytest.approx(errors[0] / errors[1], rel=0.05)
    assert sum(ctx.details["gptq_error"].values()) / len(names) < 0.9
    linears = [n for n, m in plain.named_modules() if isinstance(m, torch.nn.Linear)]
    head = plain.get_output_embeddings()
    tied = head is not None and head.weight is plain.get_input_embeddings().weight
    assert set(names) == {n for n in linears if not (tied and plain.get_submodule(n) is head)}


@pytest.mark.parametrize("family", ["bart", "llama"])
def test_gptaq_gets_inputs_of_float_and_quantized_model(family, tmp_path, monkeypatch):
    """The cross moments that are used are those of two models, each run as it is, on the same samples."""
    used, real = [], module.column_updates

    def recorded(statistics, *args):
        used.append((statistics.cross_moment, statistics.second_moment))
        return real(statistics, *args)

    monkeypatch.setattr(module, "column_updates", recorded)
    source, ctx = stage(family, tmp_path / "out", gptaq_alpha=0.25)
    names = list(ctx.details["gptq_error"])
    plain, quantized = load_model(source)[0], harness.load_output_model(ctx)
    mixed = load_model(source)[0]  # quantized up to the block of the compared layer
    last = [n for n in names if ".1." in n][-1]
    prefix = last[: last.index(".1.") + 3]
    with torch.no_grad():
        for name in (n for n in names if not n.startswith(prefix)):
            if mixed.get_submodule(name) is not mixed.get_output_embeddings():
                mixed.get_submodule(name).weight.copy_(quantized.get_submodule(name).matrix.dequantized())
    artifact = tiny.as_artifact(source, ctx.task)
    rows = load_calibration_samples(plain, artifact, 6, ctx, "quantize", held_back=True)
    inputs = []
    for model in (plain, mixed):
        batches = []
        hook = model.get_submodule(last).register_forward_pre_hook(
            lambda _, args, batches=batches: batches.append(args[0].flatten(0, -2).double())
        )
        with torch.no_grad():
            for batch in rows.batches:
                model(**batch)
        hook.remove()
        inputs.append(torch.cat(batches))
    reference, x = inputs
    cross_moment, second_moment = used[names.index(last)]
    torch.testing.assert_close(second_moment, x.T @ x, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(cross_moment, (reference - x).T @ x, rtol=1e-2, atol=1e-3)
    assert float(cross_moment.abs().max()) > 0.1
    assert not bool(used[0][0].any())  # nothing is quantized before the first block


def test_gptq_keeps_sparsity_and_compensates_in_other_weights(tmp_path):
    """SparseGPT's published code, with quantization: masked weights are 0, and their error is passed on."""
    pattern = SparsifySettings(method="magnitude", pattern="2:4")
    sparse = every_family.run_stage(
        Sparsify(), pattern, every_family.model_with_layers("bert", 2), "bert", tmp_path / "s"
    )
    before = harness.load_output_model(sparse)
    settings = QuantizeSettings(scheme="int4", method="gptq", group_size=16, calibration_samples=8)
    ctx = every_family.run_stage(Quantize(), settings, sparse.out, "bert", tmp_path / "out")
    model = harness.load_output_model(ctx)
    for name in sparse.details["sparsity_by_layer"]:
        values = model.get_submodule(name).matrix.dequantized()
        zeros = before.get_submodule(name).weight == 0
        assert int(zeros.sum()) == zeros.numel() // 2
        assert not bool(values[zeros].any())
        assert not torch.equal(values, before.get_submodule(name).weight)
        assert ctx.details["gptq_error"][name] < 1


def test_row_chunks_give_same_quantized_weights(tmp_path, monkeypatch):
    scheme, options = "int4", {"group_size": 16, "symmetric": False}
    sizes, inverted = [], []
    real, invert, source = (
        module.gptq_quantize,
        module.inverse_cholesky,
        every_family.model_with_layers("llama", 2),
    )

    def run(name):
        settings = QuantizeSettings(scheme=scheme, method="gptq", calibration_samples=8, **options)
        return every_family.run_stage(Quantize(), settings, source, "llama", tmp_path / name)

    def seen(rows, *more):
        sizes.append(len(rows))
        return real(rows, *more)

    def once(*args):
        inverted.append(args)
        return invert(*args)

    full_ctx = run("whole")
    monkeypatch.setattr(plan_layers, "MAX_WEIGHTS_AT_ONCE", 7 * 64)  # seven rows of 64 inputs
    monkeypatch.setattr(module, "gptq_quantize", seen)
    monkeypatch.setattr(module, "inverse_cholesky", once)
    parts = run("parts")
    assert max(sizes) == 7
    assert len(inverted) == len(parts.details["gptq_error"])  # what a layer is fed is inverted once
    assert parts.details["gptq_error"] == pytest.approx(full_ctx.details["gptq_error"], rel=1e-2)
    a, b = load_file(full_ctx.out / "model.safetensors"), load_file(parts.out / "model.safetensors")
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_per_tensor_scale_disables_row_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(plan_layers, "MAX_WEIGHTS_AT_ONCE", 7 * 64)
    settings = QuantizeSettings(granularity="tensor", method="gptq", calibration_samples=8)
    ctx = every_family.run_stage(
        Quantize(), settings, every_family.model_with_layers("llama", 2), "llama", tmp_path / "out"
    )
    stored = load_file(ctx.out / "model.safetensors")
    scales = [tensor for name, tensor in stored.items() if name.endswith(".scales")]
    assert len(scales) > 7
    assert all(scale.unique().numel() == 1 for scale in scales)


def test_calibration_moments_are_freed_after_each_layer(tmp_path, monkeypatch):
    moments, alive, real = [], [], module.inverse_cholesky

    def counting(statistics, *args):
        moments.append(weakref.ref(statistics.second_moment))
        alive.append(sum(moment() is not None for moment in moments))
        return real(statistics, *args)

    monkeypatch.setattr(module, "inverse_cholesky", counting)
    stage("llama", tmp_path / "out")
    assert len(alive) > 10
    assert set(alive) == {1}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_gptq_error_on_gpu_matches_cpu(tmp_path):
    source, gptq_errors = every_family.model_with_layers("bert", 2), []
    data = read_split(
        str(tiny.write_labeled(tmp_path / "rows.jsonl")), "text-classification", Columns(), tmp_path
    )
    for device in ("cpu", "cuda"):
        settings = QuantizeSettings(scheme="int4", method="gptq", group_size=16, calibration_samples=8)
        ctx = harness.run_stage(
            Quantize(), settings, source, tmp_path / device, "text-classification", data, device=device
        )
        gptq_errors.append(ctx.details["gptq_error"])
    assert gptq_errors[0] == pytest.approx(gptq_errors[1], rel=0.1)


def test_tied_embedding_matrix_is_rounded_to_nearest(tmp_path):
    source, ctx = stage("gpt2", tmp_path / "out")
    model, plain = harness.load_output_model(ctx), load_model(source)[0]
    matrix, weight = model.get_output_embeddings().matrix, plain.get_output_embeddings().weight.detach()
    assert matrix is model.get_input_embeddings().matrix
    codes = round_to_nearest(weight, matrix.scheme, matrix.options)
    expected = of(codes, matrix.scheme, matrix.options, weight.shape[1])
    np.testing.assert_allclose(matrix.dequantized().double().numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_few_tokens_are_counted_per_side_of_encoder_decoder(method, tmp_path):
    """An encoder-decoder whose rows have more tokens than any layer inputs, and either side fewer."""
    ctx = every_family.run_stage(
        Quantize(), QuantizeSettings(scheme="int4", group_size=16, method=method, calibration_samples=4),
        every_family.model_with_layers("marian", 1), "marian", tmp_path / "out",
    )  # fmt: skip
    tokens = ctx.details["calibration"]["tokens"]
    (message,) = [warning.message for warning in ctx.warnings if warning.code == "few-calibration-tokens"]
    few, inputs, *_ = (int(number) for number in message.replace(",", "").split() if number.isdigit())
    assert few < inputs <= tokens


def test_dead_inputs_are_counted(tmp_path):
    """Behind a ReLU: neurons that no row wakes; their columns become 0."""
    folder = every_family.model_with_layers("bart", 1)
    shutil.copytree(folder, tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    config = json.loads((tmp_path / "m" / "config.json").read_text()) | {"activation_function": "relu"}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    tensors["model.encoder.layers.0.fc1.bias"][[1, 5]] = -1e4
    save_file(tensors, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    settings = QuantizeSettings(scheme="int4", method="gptq", calibration_samples=8)
    ctx = every_family.run_stage(Quantize(), settings, tmp_path / "m", "bart", tmp_path / "out")
    count = ctx.details["dead_inputs"]["model.encoder.layers.0.fc2"]
    values = harness.load_output_model(ctx).model.encoder.layers[0].fc2.matrix.dequantized()
    dead = (values == 0).all(dim=0)
    assert count == int(dead.sum())
    assert bool(dead[[1, 5]].all())


def test_gptq_needs_calibration_data_and_rejects_unused_settings():
    plain = QuantizeSettings(scheme="int4")
    assert Quantize.needs_with(plain, {"train"}) == frozenset()
    gptq = QuantizeSettings(scheme="int4", method="gptq", calibration_samples=16)
    assert gptq.model_dump()["method"] == "gptq"
    assert Quantize.needs_with(gptq, {"train"}) == {"train"}
    assert Quantize.needs_with(gptq, {"train", "calibration"}) == {"calibration"}
    with raises_setting_codes("unused-setting") as caught:
        QuantizeSettings(scheme="int4", method="gptq", sensitivity_samples=4)
    assert caught.value.errors()[0]["msg"].startswith("Value error, sensitivity_samples")
    with raises_setting_codes("settings-conflict"):
        QuantizeSettings(scheme="int4", method="gptq", gptaq_alpha=0.25, low_rank_correction={"rank": 2})
    with raises_setting_codes("unused-setting"):
        QuantizeSettings(scheme="int4", method="awq", gptaq_alpha=0.25)
    for method in ("rtn", "awq"):
        with raises_setting_codes("unused-setting"):
            QuantizeSettings(scheme="int4", method=method, act_order="none")
    assert "act_order" not in QuantizeSettings(scheme="int4", method="awq").to_report()
    assert QuantizeSettings(scheme="int4", method="awq-gptq").to_report()["act_order"] == "static"
    with raises_setting_codes("unused-setting") as caught:
        QuantizeSettings(scheme="int4", calibration_samples=4)
    assert caught.value.errors()[0]["msg"].startswith("Value error, calibration_samples")


def test_low_rank_correction_disables_row_chunks(tmp_path, monkeypatch):
    """The pair is of all rows: of some alone it would be another one."""

    def run(name):
        settings = QuantizeSettings(
            scheme="int4",
            method="gptq",
            group_size=16,
            calibration_samples=8,
            low_rank_correction=LowRankCorrection(rank=2),
        )
        return every_family.run_stage(
            Quantize(), settings, every_family.model_with_layers("llama", 1), "llama", tmp_path / name
        )

    full_ctx = run("whole")
    monkeypatch.setattr(plan_layers, "MAX_WEIGHTS_AT_ONCE", 7 * 64)
    parts = run("parts")
    assert parts.details["gptq_error"] == pytest.approx(full_ctx.details["gptq_error"], rel=1e-2)
    assert parts.details["low_rank_correction"] == full_ctx.details["low_rank_correction"]


def test_quantized_weights_compensate_correction_at_zero_weights(tmp_path):
    pattern = SparsifySettings(method="magnitude", pattern="2:4")
    sparse = every_family.run_stage(
        Sparsify(), pattern, every_family.model_with_layers("bert", 1), "bert", tmp_path / "s"
    )
    before = harness.load_output_model(sparse)
    correction = LowRankCorrection(rank=4, init="svd")
    settings = QuantizeSettings(
        scheme="int4", method="gptq", group_size=16, calibration_samples=8, low_rank_correction=correction
    )
    ctx = every_family.run_stage(Quantize(), settings, sparse.out, "bert", tmp_path / "out")
    model = harness.load_output_model(ctx)
    for name in sparse.details["sparsity_by_layer"]:
        layer, zeros = model.get_submodule(name), before.get_submodule(name).weight == 0
        codes = layer.coded.matrix.dequantized()
        assert bool(codes[zeros].any())
        pair = layer.adapter.up.weight @ layer.adapter.down.weight
        assert bool((codes + pair)[zeros].square().mean() < pair[zeros].square().mean())
