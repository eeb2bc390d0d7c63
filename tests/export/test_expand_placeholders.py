import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from smelt.export.simplify_graph import expand_placeholders, expand_placeholders_in_file
from smelt.quantization.emit import LOAD_TIME_DOMAIN

pytestmark = pytest.mark.quick


def test_shared_constant_is_expanded_once():
    value = helper.make_tensor_value_info
    nodes = [helper.make_node("TwoBitCodes", ["bits"], [f"c{i}"], domain=LOAD_TIME_DOMAIN) for i in "ab"]
    nodes.append(helper.make_node("Concat", ["ca", "cb"], ["y"], axis=0))
    bits = numpy_helper.from_array(np.array([[[0b10000001]]], dtype=np.uint8), "bits")
    graph = helper.make_graph(nodes, "g", [], [value("y", TensorProto.UINT8, [2, 1, 2])], [bits])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    assert expand_placeholders(model) == 2
    assert [n.op_type for n in model.graph.node] == ["Cast", "Gather", "Reshape", "Concat"]
    import onnxruntime

    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    assert session.run(None, {})[0].tolist() == 2 * [[[0b01010111, 0b11010101]]]
    assert expand_placeholders(model) == 0


def test_scales_become_float32_where_they_are_read(tmp_path):
    import onnxruntime

    value = helper.make_tensor_value_info
    node = helper.make_node("FloatScales", ["half"], ["y"], domain=LOAD_TIME_DOMAIN)
    half = numpy_helper.from_array(np.array([0.5, -3.0], dtype=np.float16), "half")
    graph = helper.make_graph([node], "g", [], [value("y", TensorProto.FLOAT, [2])], [half])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(LOAD_TIME_DOMAIN, 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), tmp_path / "g.onnx")
    expand_placeholders_in_file(tmp_path / "g.onnx")
    model = onnx.load(tmp_path / "g.onnx")
    onnx.checker.check_model(model)
    assert [o.domain for o in model.opset_import] == [""]
    session = onnxruntime.InferenceSession(str(tmp_path / "g.onnx"), providers=["CPUExecutionProvider"])
    assert session.run(None, {})[0].tolist() == [0.5, -3.0]


def test_matrix_is_transposed_for_row_lookup(tmp_path):
    import onnxruntime

    value = helper.make_tensor_value_info
    nodes = [
        helper.make_node("Transposed", ["columns"], ["rows"], domain=LOAD_TIME_DOMAIN),
        helper.make_node("Gather", ["rows", "ids"], ["y"], axis=0),
    ]
    matrix = np.arange(6, dtype=np.int8).reshape(2, 3)
    ids, out = value("ids", TensorProto.INT64, [1]), value("y", TensorProto.INT8, [1, 2])
    graph = helper.make_graph(nodes, "g", [ids], [out], [numpy_helper.from_array(matrix, "columns")])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(LOAD_TIME_DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    assert expand_placeholders(model) == 1
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "loaded.onnx")
    providers = ["CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=providers)
    assert session.run(None, {"ids": np.array([2])})[0].tolist() == [[2, 5]]
    loaded = onnx.load(tmp_path / "loaded.onnx")
    assert [n.op_type for n in loaded.graph.node] == ["Gather"]  # turned once, while loading


def test_graph_without_placeholders_is_unchanged(tmp_path):
    value = helper.make_tensor_value_info
    node = helper.make_node("Identity", ["x"], ["y"])
    graph = helper.make_graph(
        [node], "g", [value("x", TensorProto.FLOAT, [2])], [value("y", TensorProto.FLOAT, [2])]
    )
    path = tmp_path / "g.onnx"
    onnx.save(helper.make_model(graph), path)
    file_bytes = path.read_bytes()
    expand_placeholders_in_file(path)
    assert path.read_bytes() == file_bytes


@pytest.mark.parametrize(("op_type", "axis"), [("DequantizedRows", 0), ("DequantizedColumns", 1)])
def test_int8_matrix_is_used_for_exact_matmuls(op_type: str, axis: int) -> None:
    """As on processors without VNNI; without zero points ONNX Runtime 1.31 refuses a scale for each row."""
    import onnxruntime

    codes = np.arange(-6, 6, dtype=np.int8).reshape(4, 3)
    scales = np.array([0.5, 1, 2, 4][: codes.shape[axis]], np.float32)
    nodes = [
        helper.make_node(op_type, ["codes", "scales"], ["table"], domain=LOAD_TIME_DOMAIN),
        helper.make_node("Gather", ["table", "ids"], ["out"]),
    ]
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["n"])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, ["n", 3])],
        [numpy_helper.from_array(codes, "codes"), numpy_helper.from_array(scales, "scales")],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(LOAD_TIME_DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    assert expand_placeholders(model) == 1
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.x64quantprecision", "1")
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    (out,) = session.run(None, {"ids": np.array([2, 0], np.int64)})
    assert out.tolist() == (codes * np.expand_dims(scales, 1 - axis))[[2, 0]].tolist()
