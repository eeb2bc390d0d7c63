"""Whole recipes with zero points of int8 weights: torch and graphs give the same, or the plan refuses."""

import json

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import smelt
from tests.support import harness
from tests.support.expected_errors import command_error
from tests.support.graphs.ort_sessions import needs_vnni
from tests.support.models import images, tiny


def write_recipe(folder, quantize, target="ort-cpu", task="text-classification"):
    (folder / "recipe.yaml").write_text(
        f"model: m\ntask: {task}\ndata: {{train: data.jsonl, validation: data.jsonl, test: data.jsonl}}\n"
        f"stages: [{{quantize: {{{quantize}, symmetric: false}}}}, {{onnx: {{target: {target}}}}}]\n"
        "score: {latency: false}\n"
    )
    return folder / "recipe.yaml"


def write_texts(folder):
    tiny.write_bert(folder / "m", labels=3)
    tiny.write_labeled(folder / "data.jsonl", 8)
    return folder


def write_images(folder):
    images.write_model(folder / "m", "resnet")
    images.write_rows(folder / "data.jsonl")
    return folder


def run(folder, recipe):
    report = smelt.run(recipe, out=folder / "run").report
    assert [step["status"] for step in report["steps"]] == ["done"] * 3, report["steps"][-1]["error"]
    return [folder / "run/artifacts" / name for name in ("quantize", "onnx")]


def zero_points(path):
    """The values of int8 constants that are zero points, by the operator of their weights."""
    [file] = path.glob("*.onnx")
    graph = onnx.load(file).graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    index = {"DynamicQuantizeMatMul": 3, "MatMulIntegerToFloat": 5, "DequantizeLinear": 2}
    return {
        node.op_type: numpy_helper.to_array(constants[node.input[index[node.op_type]]])
        for node in graph.node
        if node.op_type in index and node.input[index[node.op_type]] in constants
        and node.input[0 if node.op_type == "DequantizeLinear" else 1] in constants
    }  # fmt: skip


@needs_vnni
@pytest.mark.parametrize(("quantize", "target", "operator"), [
    ("scheme: int8-dynamic", "ort-cpu", "DynamicQuantizeMatMul"),
    ("scheme: int8-dynamic, granularity: tensor", "ort-cpu", "DynamicQuantizeMatMul"),
    ("scheme: int8-static, calibration_samples: 8", "ort-cpu", "MatMulIntegerToFloat"),
    ("scheme: int8-static, calibration_samples: 8, granularity: tensor", "openvino", "DequantizeLinear"),
])  # fmt: skip
def test_graph_of_texts_equals_torch(quantize, target, operator, tmp_path):
    if target == "openvino":
        pytest.importorskip("openvino")
    folders = run(tmp_path, write_recipe(write_texts(tmp_path), quantize, target))
    edits = json.loads((folders[0] / "structure.json").read_text())
    assert '"symmetric": false' in json.dumps(edits)
    zeros = zero_points(folders[1])[operator]
    assert zeros.dtype == np.int8
    assert np.abs(zeros.astype(int)).max() > 0
    probabilities = []
    for folder in folders:
        with smelt.load(folder) as model:
            # one by one: a range belongs to a batch, and the two runtimes pad theirs differently
            predictions = [model.predict([text])[0] for text in tiny.SENTENCES]
        probabilities.append(
            [[p.probabilities[name] for name in sorted(p.probabilities)] for p in predictions]
        )
    assert np.abs(np.subtract(*probabilities)).max() < 1e-4


@needs_vnni
def test_convolutions_with_one_zero_point_per_kernel_tensor_equal_torch(tmp_path):
    quantize = "scheme: int8-static, calibration_samples: 8, granularity: tensor"
    recipe = write_recipe(write_images(tmp_path), quantize, task="image-classification")
    folders = run(tmp_path, recipe)
    assert np.abs(zero_points(folders[1])["DequantizeLinear"].astype(int)).max() > 0


def test_plan_rejects_zero_points_by_channel_of_convolutions(tmp_path):
    recipe = write_recipe(write_images(tmp_path), "scheme: int8-static", task="image-classification")
    error = command_error(harness.smelt("plan", recipe, code=2))
    assert [(message.code, message.setting) for message in error.messages] == [
        ("channel-zero-points", "stages[0].quantize.symmetric")
    ]


def test_plan_rejects_zero_points_of_weights_for_tensorrt(tmp_path):
    quantize = "scheme: int8-static, activations_symmetric: true"
    error = command_error(
        harness.smelt("plan", write_recipe(write_texts(tmp_path), quantize, "tensorrt"), code=2)
    )
    assert [message.code for message in error.messages] == ["unsupported-options"]
    assert "`symmetric: true`" in str(error)
