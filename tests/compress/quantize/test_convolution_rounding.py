"""Convolutions of int8 qat: what torch computes, what is stored, trained and exported."""

from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from smelt.compress.factorize.settings import FactorizeSettings
from smelt.compress.factorize.stage import Factorize
from smelt.compress.finetune import Finetune, FinetuneSettings
from smelt.compress.quantize.qat import QatConv2d, load_trainable
from smelt.compress.quantize.settings import QuantizeSettings
from smelt.compress.quantize.stage import Quantize
from smelt.core.messages import message_codes
from smelt.export.onnx_stage import Onnx
from smelt.export.settings import OnnxSettings
from smelt.models.checkpoint import load_model
from smelt.models.edits import fold_batch_norms
from smelt.models.weight_files import weight_files_size
from smelt.quantization.layers import QuantizedActivation, QuantizedConv2d
from smelt.runtimes.registry import open_folder
from tests.support import harness
from tests.support.models import images, tiny

BASIC = {"embedding_size": 16, "hidden_sizes": [16, 24], "depths": [2, 1]}
KINDS = {"basic": BASIC, "bottleneck": BASIC | {"hidden_sizes": [64, 96], "layer_type": "bottleneck"}}
STATIC = {"scheme": "int8-static", "calibration_samples": 8, "sensitivity_samples": 2}


@pytest.fixture(scope="module", params=KINDS)
def source(request, tmp_path_factory):
    return images.write_model(
        tmp_path_factory.mktemp(request.param) / "model", "resnet", **KINDS[request.param]
    )


@pytest.fixture(scope="module")
def basic(tmp_path_factory):
    return images.write_model(tmp_path_factory.mktemp("basic") / "model", "resnet", **BASIC)


def run(source, out, **settings):
    rows = images.read_rows(images.write_rows(out.parent / "rows.jsonl"))
    chosen = QuantizeSettings.model_validate(STATIC | settings)
    return harness.run_stage(Quantize(), chosen, source, out, images.TASK, {"train": rows})


def pixels(count=4):
    pictures = [np.asarray(images.make_image(n), np.float32) / 127.5 - 1 for n in range(count)]
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).contiguous()


def logits(model, x=None):
    with torch.no_grad():
        return model(pixels() if x is None else x).logits


def test_quantized_convolutions_are_close_and_a_quarter_of_the_size(source, tmp_path):
    ctx = run(source, tmp_path / "out")
    float_logits, quantized_logits = logits(load_model(source)[0]), logits(load_model(ctx.out)[0])
    assert float((float_logits - quantized_logits).std() / float_logits.std()) < 0.1
    model = harness.load_output_model(ctx)
    convs = [m for m in load_model(source)[0].modules() if isinstance(m, nn.Conv2d)]
    assert ctx.details["convolutions"] == len(convs)
    assert not any(isinstance(m, nn.BatchNorm2d | nn.Conv2d) for m in model.modules())
    weights = sum(conv.weight.numel() for conv in convs)
    assert weight_files_size(ctx.out) < weight_files_size(source) - 2.5 * weights
    assert ctx.details["bits_per_weight"] < 9


@pytest.mark.parametrize("symmetric", [False, True])
def test_quantized_convolution_equals_formula(basic, tmp_path, symmetric):
    """By hand: codes of what comes in, products of codes, scales behind them."""
    ctx = run(basic, tmp_path / "out", calibration_method="minmax", activations_symmetric=symmetric)
    float_model, _ = load_model(basic)
    fold_batch_norms(float_model)
    model = harness.load_output_model(ctx)
    layer_inputs = {}
    for name, module in float_model.named_modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_pre_hook(lambda m, x, name=name: layer_inputs.setdefault(name, x[0]))
    logits(float_model, pixels(8))
    assert len(layer_inputs) > 5
    for name, x in layer_inputs.items():
        layer, conv = model.get_submodule(name), float_model.get_submodule(name)
        assert isinstance(layer, QuantizedConv2d)
        low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
        assert (low < 0) == (name == "resnet.embedder.embedder.convolution")  # others are after a ReLU
        step = max(-low, high) / 127 if symmetric else (high - low) / 255
        zero = 0 if symmetric else round(-128 - low / step)
        codes = ((x / step).round() + zero).clamp(-128, 127) - zero
        scales = conv.weight.abs().amax(dim=(1, 2, 3), keepdim=True) / 127
        kernel = (conv.weight / scales).round()
        expected = nn.functional.conv2d(codes, kernel, None, conv.stride, conv.padding)
        expected = expected * step * scales.view(-1, 1, 1) + conv.bias[:, None, None]
        with torch.no_grad():
            assert torch.allclose(layer(x), expected, atol=1e-4 * float(expected.abs().max()))


def test_additions_and_pools_are_quantized_and_share_input_scale(source, tmp_path):
    model = harness.load_output_model(run(source, tmp_path / "out"))
    encoder = model.resnet.encoder
    for stage in encoder.stages:
        for block in stage.layers:
            first = block.layer[0].convolution
            assert isinstance(block.layer[-1].normalization, QuantizedActivation)
            assert int(block.layer[-1].normalization.zero_point) > 0  # it may be negative
            if isinstance(block.shortcut, QuantizedActivation):
                assert float(block.shortcut.scale) == float(first.matrix.tensor("input_scale"))
                assert int(block.shortcut.zero_point) == 0  # after a ReLU
            else:
                assert isinstance(block.shortcut.normalization, QuantizedActivation)
    pool = model.resnet.embedder.pooler
    assert isinstance(pool, QuantizedActivation)
    first = encoder.stages[0].layers[0].layer[0].convolution
    assert float(pool.scale) == float(first.matrix.tensor("input_scale"))


def test_onnx_runtime_keeps_int8_between_convolutions(basic, tmp_path):
    out = run(basic, tmp_path / "out").out
    rows = {"train": images.read_rows(images.write_rows(tmp_path / "more.jsonl"))}
    ctx = harness.run_stage(Onnx(), OnnxSettings(), out, tmp_path / "onnx", images.TASK, rows)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    onnxruntime.InferenceSession(ctx.out / "model.onnx", options, providers=["CPUExecutionProvider"])
    op_types = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    convolutions = sum(isinstance(m, QuantizedConv2d) for m in load_model(out)[0].modules())
    assert op_types.count("QLinearConv") == convolutions
    assert not {"Conv", "FusedConv"} & set(op_types)
    assert op_types.count("QLinearAdd") == 2  # the last sum is read by the mean of all places, in floats
    assert ctx.details["parity"]["model"]["exact"]["largest"] < 1e-3
    x = pixels(8)
    with open_folder(ctx.out, "onnx", "ort-cpu", 1, "cpu") as runner:
        [got] = runner.backend.call("model", {"pixel_values": x.numpy()}).values()
    expected = logits(load_model(out)[0], x)
    assert float((torch.from_numpy(got) - expected).abs().mean() / expected.std()) < 0.02


def test_bottleneck_graph_matches_torch(tmp_path):
    source = images.write_model(tmp_path / "model", "resnet", **KINDS["bottleneck"])
    out = run(source, tmp_path / "out").out
    rows = {"train": images.read_rows(images.write_rows(tmp_path / "more.jsonl"))}
    onnx = harness.run_stage(Onnx(), OnnxSettings(), out, tmp_path / "onnx", images.TASK, rows)
    assert onnx.details["parity"]


@pytest.mark.parametrize("codes", [{}, {"qat": {"scales": "lsq"}}])
def test_quantized_convolutions_can_be_trained(codes, basic, tmp_path):
    rows = {"train": images.read_rows(images.write_rows(tmp_path / "more.jsonl", 32))}
    coded = run(basic, tmp_path / "out").out
    settings = {"epochs": 3, "batch_size": 8, "num_evals": 0, "precision": "fp32", "learning_rate": 1e-3}
    chosen = FinetuneSettings.model_validate(settings | codes)
    ctx = harness.run_stage(Finetune(), chosen, coded, tmp_path / "tuned", images.TASK, rows)
    before, model = load_model(coded)[0], harness.load_output_model(ctx)
    name = "resnet.encoder.stages.0.layers.0.layer.0.convolution"
    assert isinstance(model.get_submodule(name), QuantizedConv2d)
    changed = model.get_submodule(name).matrix.codes != before.get_submodule(name).matrix.codes
    assert changed.any()
    assert torch.isfinite(logits(model)).all()


def test_qat_starts_from_folded_float_weights(basic, tmp_path):
    coded = run(basic, tmp_path / "out").out
    quantized = tiny.as_artifact(coded, images.TASK)
    float_artifact = tiny.as_artifact(basic, images.TASK)
    float_artifact = replace(
        float_artifact, manifest=float_artifact.manifest.model_copy(update={"key": "1" * 64})
    )
    fields = {"stage": "quantize", "parent": float_artifact.key}
    ctx = harness.make_context(tmp_path / "tuned", images.TASK, ancestors={"model": float_artifact})
    quantized = replace(quantized, manifest=quantized.manifest.model_copy(update=fields))
    model, _ = load_trainable(quantized, ctx)
    assert ctx.details["latent_weights"] == "model"
    folded, _ = load_model(basic)
    fold_batch_norms(folded)
    for name, layer in model.named_modules():
        if isinstance(layer, QatConv2d):
            assert torch.equal(layer.weight, folded.get_submodule(name).weight.flatten(1))


@pytest.mark.parametrize("skip", [["*embedder*", "*.shortcut.*", "classifier.*"], ["*.layer.1.*", "auto"]])
def test_excluded_float_layers_are_exported(skip, basic, tmp_path):
    ctx = run(basic, tmp_path / "out", exclude=skip)
    model = harness.load_output_model(ctx)
    assert any(isinstance(m, nn.Conv2d | nn.Linear) for m in model.modules())
    assert harness.run_stage(Onnx(), OnnxSettings(), ctx.out, tmp_path / "onnx", images.TASK).details[
        "parity"
    ]


@pytest.mark.parametrize(("method", "floats"), [("tucker", 0), ("cp", 32)])
def test_factorized_convolutions_are_quantized_except_cp(method, floats, basic, tmp_path):
    settings = FactorizeSettings(method=method, keep_ratio=0.6)
    thin = harness.run_stage(Factorize(), settings, basic, tmp_path / "thin", images.TASK).out
    ctx = run(thin, tmp_path / "out")
    model = harness.load_output_model(ctx)
    assert sum(isinstance(m, nn.Conv2d) for m in model.modules()) == floats
    assert ("convolutions-kept-float" in message_codes(ctx.warnings)) == bool(floats)
    rows = {"train": images.read_rows(images.write_rows(tmp_path / "more.jsonl"))}
    assert harness.run_stage(Onnx(), OnnxSettings(), ctx.out, tmp_path / "onnx", images.TASK, rows).details[
        "parity"
    ]


@pytest.mark.parametrize(("wrong", "setting"), [
    ({"scheme": "int8-dynamic"}, "scheme"), ({"scheme": "int4"}, "scheme"),
    ({"mixed_precision": {"target_bits": 5}}, "mixed_precision"),
    ({"scheme": "int8-static", "method": "gptq"}, "method"),
    ({"scheme": "int8-static", "smoothquant_alpha": 0.5}, "smoothquant_alpha"),
    ({"scheme": "int8-static", "low_rank_correction": {"rank": 4}}, "low_rank_correction"),
])  # fmt: skip
def test_plan_rejects_linear_only_settings_for_convolutions(wrong, setting):
    [error], _ = Quantize.check_model(QuantizeSettings.model_validate(wrong), {"model_type": "resnet"})
    code = "unsupported-scheme" if setting == "scheme" else "does-not-fit-model"
    assert (error.setting, error.code) == (setting, code)


def test_plan_rejects_targets_without_quantized_convolutions():
    settings = QuantizeSettings(scheme="int8-static")
    _, config = Quantize.check_model(settings, {"model_type": "resnet"})
    for target, wrong in {"ort-cpu": [], "openvino": [], "tensorrt": ["target"]}.items():
        errors, _ = Onnx.check_model(OnnxSettings.model_validate({"target": target}), config)
        assert [error.setting for error in errors] == wrong
        assert set(message_codes(errors)) <= {"unsupported-target"}
