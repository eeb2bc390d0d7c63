"""Equal matrices become one; what only looks alike stays."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from smelt.export.graph_files import deduplicate_matrices
from smelt.runtimes.onnx_session import open_onnx_session

pytestmark = pytest.mark.quick


def graph(second, output="y"):
    """Return a model of y = x a b, with a given `b`; a is 20 x 20."""
    rng = np.random.default_rng(0)
    first = rng.normal(size=(20, 20)).astype(np.float32)
    value = helper.make_tensor_value_info
    inner_graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "a"], ["h"]), helper.make_node("MatMul", ["h", "b"], ["y"])],
        "two",
        [value("x", TensorProto.FLOAT, [3, 20])],
        [value(output, TensorProto.FLOAT, [20, 20] if output == "b" else [3, 20])],
        [numpy_helper.from_array(first, "a"), numpy_helper.from_array(second(first), "b")],
    )
    return helper.make_model(inner_graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def changed(position):
    def change(first):
        other = first.copy()
        other[position] += 1
        return other

    return change


def run(model, path):
    onnx.save(model, path)
    x = np.random.default_rng(1).normal(size=(3, 20)).astype(np.float32)
    return open_onnx_session(path, threads=1).run(None, {"x": x})[0]


def test_equal_matrices_are_merged_with_equal_outputs(tmp_path):
    model = graph(np.copy)
    original_outputs = run(model, tmp_path / "before.onnx")
    assert deduplicate_matrices(model) == 1
    assert [t.name for t in model.graph.initializer] == ["a"]
    assert [list(node.input) for node in model.graph.node] == [["x", "a"], ["h", "a"]]
    np.testing.assert_array_equal(run(model, tmp_path / "after.onnx"), original_outputs)


@pytest.mark.parametrize("second", [
    changed((0, 0)), changed((10, 10)),  # beyond what is compared first
    changed((19, 19)), lambda first: first.reshape(10, 40), lambda first: first.view(np.int32),
], ids=["first", "middle", "last", "shape", "type"])  # fmt: skip
def test_different_matrices_are_kept(second):
    model = graph(second)
    assert deduplicate_matrices(model) == 0
    assert len(model.graph.initializer) == 2


def test_vectors_are_kept():
    model = graph(np.copy)
    for tensor in model.graph.initializer:
        del tensor.dims[:]
        tensor.dims.append(400)
    assert deduplicate_matrices(model) == 0


def test_matrix_that_is_an_output_keeps_its_name():
    model = graph(np.copy, output="b")
    assert deduplicate_matrices(model) == 0
