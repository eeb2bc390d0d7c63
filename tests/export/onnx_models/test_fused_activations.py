"""ReLU and Clip that the static quantizer removes, and convolutions whose values others read before them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper, numpy_helper

from smelt.core.messages import message_codes
from smelt.data.npz_arrays import SampleArrays
from smelt.data.splits import split_from_arrays
from smelt.export.onnx_models.ort_quantizers import QuantizeOnnxSettings
from smelt.export.onnx_models.prepare_for_quantizer import unfused_activations
from smelt.export.onnx_models.quantize_onnx import QuantizeOnnx
from smelt.runtimes.onnx_session import open_onnx_session
from tests.support import harness
from tests.support.graphs import imported_graphs as graphs

N = helper.make_node
RELU, CLIP = N("Relu", ["e"], ["r"], "activation"), N("Clip", ["e", "low", "high"], ["r"], "activation")
AFTER = N("Conv", ["r", "w2"], ["f"], "second", pads=[1, 1, 1, 1])
# the nodes after a convolution with the output `e`, outputs of the graph, mean of `e`
READ_BEFORE: dict[str, tuple[list[Any], list[str], float]] = {
    "an output of the graph": ([RELU], ["e", "r"], 1.5),
    "an output of the graph, mostly negative": ([RELU], ["e", "r"], -1.5),
    "an output of the graph, before a Clip": ([CLIP], ["e", "r"], 0.5),
    "a Sigmoid": ([RELU, N("Sigmoid", ["e"], ["s"]), N("Add", ["r", "s"], ["y"])], ["y"], 0.0),
    "a residual sum": ([RELU, AFTER, N("Add", ["e", "f"], ["y"])], ["y"], 0.0),
    "another ReLU": ([RELU, N("Neg", ["e"], ["n"]), N("Relu", ["n"], ["t"], "other")], ["r", "t"], 0.5),
}


def convolution(nodes: list[Any], outputs: list[str], mean: float) -> Any:
    """Return x float32 [N, 3, 8, 8] -> a convolution `e` of the mean `mean` -> nodes -> outputs."""
    random = np.random.default_rng(0)
    arrays = {
        "w": random.normal(size=(6, 3, 3, 3), scale=0.3), "b": np.full(6, mean),
        "w2": random.normal(size=(6, 6, 3, 3), scale=0.3), "low": np.float32(-1), "high": np.float32(6),
    }  # fmt: skip
    nodes = [N("Conv", ["x", "w", "b"], ["e"], "first", pads=[1, 1, 1, 1]), *nodes]
    used_names = {name for node in nodes for name in node.input}
    weights = [numpy_helper.from_array(v.astype(np.float32), k) for k, v in arrays.items() if k in used_names]
    signature = [graphs.value_info(name, ["N", 6, 8, 8]) for name in outputs]
    return graphs.make_model(nodes, [graphs.value_info("x", ["N", 3, 8, 8])], signature, weights)


def quantize(folder: Path, model: Any, **settings: Any) -> tuple[Any, list[Any], list[Any]]:
    """Return the stage's context, and the outputs of the source and of the quantized graph on new samples."""
    x = np.random.default_rng(1).normal(size=(60, 3, 8, 8)).astype(np.float32)
    source = graphs.make_artifact(folder / "src", model)
    data = {"calibration": split_from_arrays("x.npz", SampleArrays({"x": x[:40]}, 40))}
    settings = {"scheme": "int8-static", **settings}
    ctx = harness.run_stage(
        QuantizeOnnx(), QuantizeOnnxSettings(**settings), source, folder / "out", data=data
    )
    # by runtimes.onnx_backend, whose int8 products are exact on every processor
    sessions = [open_onnx_session(path / "model.onnx", 1) for path in (source.path, ctx.out)]
    float_outputs, int8_outputs = (
        [np.asarray(v) for v in session.run(None, {"x": x[40:]})] for session in sessions
    )
    return ctx, float_outputs, int8_outputs


@pytest.mark.parametrize("target", ["ort-cpu", "tensorrt"])
@pytest.mark.parametrize("reader", READ_BEFORE)
def test_convolution_read_before_its_activation_keeps_its_own_range(
    tmp_path: Path, reader: str, target: str
) -> None:
    """The quantizer gives it the range of the ReLU: negative values became 0 (onnxruntime 14501, 15093)."""
    ctx, float_outputs, int8_outputs = quantize(tmp_path, convolution(*READ_BEFORE[reader]), target=target)
    expected_codes = ["nodes-kept-float"] if reader.startswith("an output") else []
    assert message_codes(ctx.warnings) == expected_codes
    for expected, actual in zip(float_outputs, int8_outputs, strict=True):
        assert np.sqrt(((actual - expected) ** 2).mean()) < 0.05 * expected.std()
        assert abs(actual.min() - expected.min()) < 0.1 * expected.std()


@pytest.mark.parametrize("outputs", [["f"], ["f", "r"]])
def test_activation_is_fused_if_only_its_own_output_is_read(outputs: list[str]) -> None:
    assert unfused_activations(convolution([RELU, AFTER], outputs, 0.0).graph, ("Relu", "Clip")) == {}
