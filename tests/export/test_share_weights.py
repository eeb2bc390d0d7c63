"""One file of weights: each value once, wherever it is read, and the graphs compute what they computed."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from smelt.core.errors import RunError
from smelt.export.graph_files import SHARED_WEIGHTS_FILE, external_data_path, share_weights
from tests.support.expected_errors import raises_code

RANDOM = np.random.default_rng(0)
BOTH = RANDOM.normal(size=(32, 32)).astype(np.float32)
OWN = RANDOM.normal(size=(2, 32, 32)).astype(np.float32)


def write(path, *matrices, outside=False):
    """Write the graph of x times all matrices; where asked, its weights into a file of its own."""
    tensors = [numpy_helper.from_array(m, f"w{i}") for i, m in enumerate(matrices)]
    nodes, last = [], "x"
    for tensor in tensors:
        nodes.append(helper.make_node("MatMul", [last, tensor.name], [last := f"{tensor.name}.y"]))
    nodes.append(helper.make_node("Add", [last, "small"], ["y"]))
    tensors.append(numpy_helper.from_array(np.float32([0.5]), "small"))
    signature = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [None, 32]) for n in "xy"]
    graph = helper.make_graph(nodes, "g", signature[:1], signature[1:], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    external_options = {
        "save_as_external_data": True,
        "location": external_data_path(path).name,
        "size_threshold": 64,
    }
    onnx.save(model, path, **(external_options if outside else {}))
    return path


def outputs(path):
    x = np.arange(64, dtype=np.float32).reshape(2, 32) / 64
    return onnxruntime.InferenceSession(path).run(None, {"x": x})[0]


def places(path):
    graph = onnx.load(path, load_external_data=False).graph
    return {t.name: {e.key: e.value for e in t.external_data} for t in graph.initializer}


@pytest.mark.parametrize("outside", [False, True])
def test_graphs_share_common_weights_with_equal_outputs(tmp_path, outside):
    first = write(tmp_path / "a.onnx", BOTH, OWN[0], outside=outside)
    second = write(tmp_path / "b.onnx", OWN[1], BOTH)
    outputs_before = [outputs(path) for path in (first, second)]
    size = share_weights([first, second])
    assert {p.name for p in tmp_path.iterdir()} == {"a.onnx", "b.onnx", SHARED_WEIGHTS_FILE}
    assert size == (tmp_path / SHARED_WEIGHTS_FILE).stat().st_size == 3 * 32 * 32 * 4
    assert places(first)["w0"] == places(second)["w1"] != places(first)["w1"]
    assert places(first)["small"] == {}  # shapes and the like stay in the graph
    for path, expected in zip((first, second), outputs_before, strict=True):
        np.testing.assert_array_equal(outputs(path), expected)


def test_weights_of_subgraphs_are_shared(tmp_path):
    inner = helper.make_graph(
        [helper.make_node("Identity", ["w"], ["out"])], "then", [],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, [32, 32])],
        [numpy_helper.from_array(BOTH, "w")],
    )  # fmt: skip
    node = helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner)
    condition = helper.make_tensor_value_info("c", TensorProto.BOOL, [])
    output_info = helper.make_tensor_value_info("y", TensorProto.FLOAT, [32, 32])
    graph = helper.make_graph([node], "g", [condition], [output_info])
    path = tmp_path / "if.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), path)
    assert share_weights([path]) == BOTH.nbytes
    assert path.stat().st_size < 1000
    session = onnxruntime.InferenceSession(path)
    np.testing.assert_array_equal(session.run(None, {"c": np.array(True)})[0], BOTH)


def test_repeated_sharing_keeps_values(tmp_path):
    path = write(tmp_path / "a.onnx", BOTH, OWN[0])
    expected = outputs(path)
    share_weights([path])
    share_weights([path, write(tmp_path / "b.onnx", BOTH)])
    np.testing.assert_array_equal(outputs(path), expected)


def test_unreadable_graph_leaves_others_unchanged(tmp_path):
    valid_graph = write(tmp_path / "a.onnx", BOTH)
    valid_bytes = valid_graph.read_bytes()
    (tmp_path / "b.onnx").write_bytes(b"no graph")
    with raises_code("damaged-file", RunError) as excinfo:
        share_weights([valid_graph, tmp_path / "b.onnx"])
    assert excinfo.value.file == str(tmp_path / "b.onnx")
    assert valid_graph.read_bytes() == valid_bytes
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.onnx", "b.onnx"]
