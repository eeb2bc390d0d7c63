"""Which outputs of a graph are scores of classes."""

from typing import Any

import numpy as np
import pytest
from onnx import helper, numpy_helper

from smelt.runtimes.onnx_import.class_outputs import class_outputs
from tests.support.graphs import imported_graphs as graphs

pytestmark = pytest.mark.quick

N = helper.make_node
CONV = N("Conv", ["image", "kernel"], ["c"], pads=[1, 1, 1, 1])
LINEAR = N("MatMul", ["x", "w"], ["h"])
SHAPES: dict[str, list[Any]] = {
    "vector": ["N", 4],
    "number": ["N", 1],
    "map": ["N", 5, 8, 8],
    "tokens": ["N", "T", 4],
    "none": None,
}
CASES: dict[str, tuple[list[Any], str, str, int | None]] = {
    "linear layer": ([LINEAR, N("Add", ["h", "b"], ["y"])], "y", "vector", -1),
    "weight that a node transposes": (
        [N("Transpose", ["w"], ["t"]), N("MatMul", ["x", "t"], ["y"])],
        "y",
        "vector",
        -1,
    ),
    "bias of a node": ([LINEAR, N("Identity", ["b"], ["c"]), N("Add", ["h", "c"], ["y"])], "y", "vector", -1),
    "Gemm": ([N("Gemm", ["x", "w", "b"], ["y"])], "y", "vector", -1),
    "Gemm of one output": ([N("Gemm", ["x", "w", "b"], ["y"])], "y", "number", None),
    "linear layer of tokens": ([LINEAR, N("Add", ["h", "b"], ["y"])], "y", "tokens", None),
    "Softmax": ([LINEAR, N("Softmax", ["h"], ["y"])], "y", "vector", -1),
    "LogSoftmax, then other type": (
        [LINEAR, N("LogSoftmax", ["h"], ["p"]), N("Cast", ["p"], ["y"], to=1)],
        "y",
        "none",
        -1,
    ),
    "Softmax of channels": ([CONV, N("Softmax", ["c"], ["y"], axis=1)], "y", "map", -3),
    "Softmax, then Reshape": (
        [CONV, N("Softmax", ["c"], ["p"], axis=1), N("Reshape", ["p", "to"], ["y"])],
        "y",
        "vector",
        -1,
    ),
    "pooled convolution": (
        [CONV, N("GlobalAveragePool", ["c"], ["p"]), N("Flatten", ["p"], ["y"])],
        "y",
        "vector",
        -1,
    ),
    "classifier of ai.onnx.ml": (
        [N("LinearClassifier", ["x"], ["label", "y"], domain="ai.onnx.ml", coefficients=[1.0])],
        "y",
        "vector",
        -1,
    ),
    "heat map": ([CONV, N("Sigmoid", ["c"], ["y"])], "y", "map", None),
    "map of a convolution": ([N("Conv", ["image", "kernel"], ["y"], pads=[1, 1, 1, 1])], "y", "map", None),
    "several labels": ([LINEAR, N("Sigmoid", ["h"], ["y"])], "y", "vector", None),
    "unit vector": ([LINEAR, N("LpNormalization", ["h"], ["y"])], "y", "vector", None),
    "embedding": ([N("MatMul", ["x", "w"], ["image_embeds"])], "image_embeds", "vector", None),
    "boxes": ([N("MatMul", ["x", "w"], ["pred_boxes"])], "pred_boxes", "vector", None),
    "similarities": ([N("MatMul", ["x", "x2"], ["y"])], "y", "vector", None),
    "attention probabilities": (
        [LINEAR, N("Softmax", ["h"], ["y"]), N("MatMul", ["y", "w"], ["z"])],
        "y",
        "vector",
        None,
    ),
    "values by name": ([N("Neg", ["x"], ["logits"])], "logits", "vector", -1),
}


@pytest.mark.parametrize("case", CASES)
def test_class_outputs_of_a_graph_are_recognized(case: str) -> None:
    nodes, output, shape, axis = CASES[case]
    weights = {"w": np.zeros((4, 4)), "b": np.zeros(4), "kernel": np.zeros((5, 3, 3, 3))}
    tensors = [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()]
    tensors.append(numpy_helper.from_array(np.array([-1, 4]), "to"))
    inputs = [graphs.value_info(name, SHAPES["vector"]) for name in ("x", "x2")]
    inputs.append(graphs.value_info("image", ["N", 3, 8, 8]))
    model = graphs.make_model(nodes, inputs, [graphs.value_info(output, SHAPES[shape])], tensors)
    assert class_outputs(model) == ({} if axis is None else {output: axis})


def test_softmax_of_all_axes_before_opset_13_is_not_a_class_output() -> None:
    """It normalizes all axes from its axis on together, by default the second."""
    signature = [graphs.value_info("x", ["N", 3, 4])], [graphs.value_info("y", ["N", 3, 4])]
    for opset, axis in ((11, {}), (13, {"y": -1})):
        assert class_outputs(graphs.make_model([N("Softmax", ["x"], ["y"])], *signature, opset=opset)) == axis
