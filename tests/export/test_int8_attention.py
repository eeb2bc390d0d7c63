"""Int8 attention for OpenVINO: the rounded products are those of numpy, and who may ask for them."""

import json

import numpy as np
import onnx
import pytest

from smelt.compress.quantize.stage import Quantize, QuantizeSettings
from smelt.core.errors import InputError
from smelt.core.messages import message_codes
from smelt.data.splits import Split
from smelt.export.onnx_stage import Onnx
from smelt.export.parity.operator_checks import open_with_outputs
from smelt.export.parity.parity_samples import parity_samples
from smelt.export.settings import OnnxSettings
from smelt.runtimes.registry import open_folder
from tests.support import harness
from tests.support.expected_errors import raises_code, raises_setting_codes
from tests.support.graphs import graph_exports
from tests.support.models import classifiers, tiny
from tests.support.shared_folders import make_once

INT8 = OnnxSettings(target="openvino", attention="int8")
IDS = np.random.default_rng(0).integers(5, 40, (2, 11))


def exported(family="bert", settings=INT8):
    """Return the folder of a tiny encoder's graph with static int8 layers, and the details of the step."""
    make_model, task = graph_exports.FAMILIES[family]

    def make(home):
        home.mkdir()
        source = make_model(home / "m")
        ctx = graph_exports.make_context(home / "static", task)
        Quantize()(tiny.as_artifact(source, task), QuantizeSettings(scheme="int8-static"), ctx)
        ctx = graph_exports.make_context(home / "out", task)
        Onnx()(tiny.as_artifact(home / "static", task), settings, ctx)
        (home / "details.json").write_text(json.dumps(ctx.details))

    home = make_once(f"int8-attention-{family}-{settings.attention}", make)
    return home / "out", json.loads((home / "details.json").read_text())


def rounded(x, scale):
    return np.clip(np.rint(x / scale), -128, 127) * scale


@pytest.mark.parametrize("family", ["bert", "embedder"])
def test_products_equal_numpy_products_of_rounded_inputs(family):
    folder, details = exported(family)
    model = onnx.load(folder / "model.onnx")
    graph = model.graph
    constants = {value.name: onnx.numpy_helper.to_array(value) for value in graph.initializer}
    producers = {output: node for node in graph.node for output in node.output}
    products = [
        n for n in graph.node if n.op_type == "MatMul" and producers[n.input[0]].op_type == "DequantizeLinear"
        and ".dequantized" in n.input[0]
    ]  # fmt: skip
    softmax = producers[producers[products[0].input[0]].input[0]].input[0]
    split = next(n for n in graph.node if n.op_type == "Split")
    packed = split.input[0].removesuffix(".dequantized")
    scales = constants[f"{packed}.scale"]
    wanted = [packed, softmax, *split.output, products[0].output[0], *products[0].input]
    session = open_with_outputs(model, folder, "probe", wanted, optimized=False)
    feeds = {
        v.name: (IDS if v.name == "input_ids" else np.ones_like(IDS) if "mask" in v.name else 0 * IDS).astype(
            np.int32 if "int32" in v.type else np.int64
        )
        for v in session.get_inputs()
    }
    x, probabilities, *parts, product, left, right = session.run(wanted, feeds)
    np.testing.assert_allclose(np.concatenate(parts, -1), rounded(x, scales), atol=1e-6)
    steps = np.clip(np.rint(probabilities * 255), 0, 255) / 255
    np.testing.assert_allclose(left, steps, atol=1e-6)
    heads, width = left.shape[1], right.shape[-1]
    values = rounded(x, scales)[..., -heads * width :].reshape(*IDS.shape, heads, width).transpose(0, 2, 1, 3)
    np.testing.assert_allclose(product, steps @ values, atol=1e-5)
    assert len(set(scales.tolist())) == 3
    assert details["attention"]["products"] == 2 * details["graphs"]["model"]["operators"]["Softmax"]
    assert 0 < details["attention"]["against_float"]["mean"] < 0.2


def test_scales_are_largest_magnitudes_of_calibration_samples():
    folder, details = exported()
    model = onnx.load(folder / "model.onnx")
    split = next(n for n in model.graph.node if n.op_type == "Split")
    packed = split.input[0].removesuffix(".dequantized")
    scales = next(v for v in model.graph.initializer if v.name == f"{packed}.scale")
    with open_folder(folder.parent / "static", "torch", threads=1) as parent:
        context = graph_exports.make_context(folder.parent / "again", "text-classification")
        batch, _ = parity_samples(parent, folder, context.data, "text-classification", 64, 128)
    session = open_with_outputs(model, folder, "probe", [packed], optimized=False)
    types = {v.name: np.int32 if "int32" in v.type else np.int64 for v in session.get_inputs()}
    largest = np.zeros(3)
    for ids, mask in zip(batch.input_ids, batch.attention_mask, strict=True):
        values = {"input_ids": ids[mask == 1], "attention_mask": mask[mask == 1]}
        feeds = {n: values.get(n, 0 * values["input_ids"])[None].astype(kind) for n, kind in types.items()}
        [x] = session.run([packed], feeds)
        largest = np.maximum(largest, np.abs(x).reshape(len(values["input_ids"]), 3, -1).max((0, 2)))
    expected = np.repeat(largest / 127, len(onnx.numpy_helper.to_array(scales)) // 3)
    np.testing.assert_allclose(onnx.numpy_helper.to_array(scales), expected, rtol=1e-4)
    assert details["attention"]["samples"] == len(batch.input_ids)


@pytest.mark.quick
@pytest.mark.parametrize("settings", [{"target": "ort-cpu"}, {"target": "openvino", "dtype": "bf16"}])
def test_int8_attention_of_other_targets_is_rejected(settings):
    with raises_setting_codes("unused-setting"):
        OnnxSettings(attention="int8", **settings)


@pytest.mark.quick
def test_int8_attention_needs_encoder_and_samples():
    assert message_codes(Onnx.check_rows(INT8, "translation", {})) == ["unsupported-task"]
    assert Onnx.check_rows(INT8, "text-classification", {}) == []
    assert Onnx.needs_with(INT8, ["calibration"]) == {"calibration"}
    assert Onnx.needs_with(INT8) == {"train"}


def test_int8_attention_without_samples_is_rejected(tmp_path):
    source = tiny.as_artifact(classifiers.write_bert(tmp_path / "m"), "text-classification")
    ctx = harness.make_context(tmp_path / "out", "text-classification", {"validation": Split("none", ())})
    with raises_code("no-calibration-data", InputError):
        Onnx()(source, INT8, ctx)
