"""Graphs of fixed shapes as CUDA graphs: on ONNX Runtime's CUDA provider over stubs, and on the CPU."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from smelt.export.onnx_stage import Onnx
from smelt.export.settings import OnnxSettings
from smelt.runtimes.cuda_graph import CapturedGraph
from tests.support.expected_errors import raises_setting_codes
from tests.support.graphs.fixed_artifacts import run_folder
from tests.support.processes import cuda_captures, cuda_rig

SETTINGS = "target: ort-cuda, dtype: fp16, cuda_graph: true"


def call_on_rig(kind, opens_only=False):
    cuda_rig.rig_environment()
    artifact = run_folder(kind, SETTINGS) / "artifacts" / "onnx"
    request = {"artifact": str(artifact), "opens_only": opens_only}
    return cuda_rig.run_in_rig(request, cuda_captures.__name__)


@pytest.mark.parametrize("kind", ["classifier", "embedder"])
def test_calls_from_several_threads_are_one_capture_that_is_launched(kind):
    """Only inputs and outputs cross the bus."""
    answer = call_on_rig(kind)
    assert answer["captures"] == 1
    assert answer["launches"] == cuda_captures.CALLS
    assert answer["copies"] == {"to device": answer["inputs"], "to host": answer["outputs"]}


@pytest.mark.parametrize("kind", ["vit", "resnet"])
def test_provider_accepts_all_nodes_of_image_graphs_for_a_capture(kind):
    """Without cuDNN their convolutions cannot be called."""
    assert call_on_rig(kind, opens_only=True)["captures"] == 0


def matrix_session():
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 2]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "double", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    onnx.checker.check_model(model)
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def test_each_shape_has_one_capture_and_later_calls_do_not_change_earlier_results():
    captured = CapturedGraph(matrix_session(), "cpu", 0)
    inputs = [np.full((rows, 2), value, np.float32) for rows, value in ((1, 3), (4, 5), (1, 7))]
    results = [captured({"x": values})["y"] for values in inputs]
    for values, result in zip(inputs, results, strict=True):
        np.testing.assert_array_equal(result, 2 * values)
    assert len(captured._captures) == 2


@pytest.mark.quick
@pytest.mark.parametrize(
    ("task", "sizes", "refused"),
    [
        ("text-classification", {"batch_size": 1, "sequence_length": 8}, False),
        ("text-classification", {"batch_size": 1}, True),
        ("text-classification", {}, True),
        ("image-classification", {"batch_size": 1}, False),
        ("image-classification", {}, True),
        ("translation", {}, True),
    ],
)
def test_setting_without_fixed_shapes_is_refused(task, sizes, refused):
    settings = OnnxSettings(target="ort-cuda", cuda_graph=True, **sizes)
    errors = [(error.code, error.setting) for error in Onnx.check_rows(settings, task, {})]
    assert errors == [("no-fixed-shapes", "cuda_graph")] * refused


@pytest.mark.quick
def test_setting_of_another_target_is_refused():
    with raises_setting_codes("unused-setting"):
        OnnxSettings(target="tensorrt", cuda_graph=True)
