"""Weights of 8 and 4 bits with float activations, against numpy and ONNX Runtime's own quantizer."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from pydantic import ValidationError

from smelt.core.errors import InputError
from smelt.core.messages import message_codes
from smelt.data.npz_arrays import SampleArrays
from smelt.data.splits import split_from_arrays
from smelt.export.onnx_models.quantize_onnx import QuantizeOnnx
from smelt.export.onnx_models.settings import QuantizeOnnxSettings
from smelt.export.tensorrt.preflight import load_graph, preflight
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.graphs import imported_graphs as graphs

WIDTH = 96
RANDOM = np.random.default_rng(0)
WEIGHTS = {
    "product": RANDOM.normal(0, 0.1, (WIDTH, WIDTH)).astype(np.float32),
    "rows": RANDOM.normal(0, 0.1, (40, WIDTH)).astype(np.float32),  # of a Gemm with transB
    "bias": RANDOM.normal(0, 0.1, 40).astype(np.float32),
    "filters": RANDOM.normal(0, 0.1, (32, 8, 3)).astype(np.float32),
    "first": RANDOM.normal(0, 0.1, (32, 8)).astype(np.float32),
}


def model(opset: int = 17) -> Any:
    """Return a graph of a Conv, a Gemm with alpha and transB, and a MatMul of one weight used twice."""
    nodes = [
        helper.make_node("Conv", ["signal", "filters"], ["features"], "conv", pads=[1, 1]),
        helper.make_node("MatMul", ["first", "signal"], ["left"], "left"),
        helper.make_node("Add", ["features", "left"], ["summed"], "sum"),
        helper.make_node("MatMul", ["summed", "product"], ["once"], "once"),
        helper.make_node("MatMul", ["once", "product"], ["twice"], "twice"),
        helper.make_node("Flatten", ["twice"], ["flat"], "flat", axis=2),
        helper.make_node("ReduceMean", ["twice"], ["mean"], "mean", axes=[1], keepdims=0),
        helper.make_node("Gemm", ["mean", "rows", "bias"], ["y"], "gemm", transB=1, alpha=0.5),
    ]
    ends = [graphs.value_info("signal", ["N", 8, WIDTH])], [graphs.value_info("y", ["N", 40])]
    tensors = [numpy_helper.from_array(value, name) for name, value in WEIGHTS.items()]
    return graphs.make_model(nodes, *ends, tensors, opset=opset)


def split(count: int = 12) -> Any:
    values = {"signal": np.random.default_rng(1).normal(size=(count, 8, WIDTH)).astype(np.float32)}
    return split_from_arrays("rows.npz", SampleArrays(values, count))


def quantize(folder: Path, **settings: Any) -> Any:
    source = graphs.make_artifact(folder / "src", settings.pop("model", model()))
    stage = QuantizeOnnx()
    data = {"calibration": split()}
    return harness.run_stage(stage, QuantizeOnnxSettings(**settings), source, folder / "out", data=data)


def read(folder: Path, part: str = "out") -> tuple[Any, dict[str, NDArray[Any]]]:
    graph = onnx.load(folder / part / "model.onnx").graph
    return graph, {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}


def dequantized_by_numpy(weight: NDArray[Any], bits: int, axis: int, block_size: int = 0) -> NDArray[Any]:
    """Return the weight after max |w| / (2^(b - 1) - 1) for each slice, or block of a column along `axis`."""
    rows = np.moveaxis(weight, axis, 0)
    result = np.empty_like(rows)
    largest = 2 ** (bits - 1) - 1
    if not block_size:
        for index, row in enumerate(rows):
            scale = np.abs(row).max() / largest
            result[index] = np.round(row / scale) * scale
        return np.moveaxis(result, 0, axis)
    for start in range(0, len(rows), block_size):
        for column in np.ndindex(rows.shape[1:]):
            block = rows[(slice(start, start + block_size), *column)]
            scale = np.abs(block).max() / largest
            result[(slice(start, start + block_size), *column)] = np.round(block / scale) * scale
    return np.moveaxis(result, 0, axis)


@pytest.mark.parametrize(("settings", "bits", "block_size", "quantized"), [
    ({"scheme": "int8-weight-only"}, 8, 0, {"product", "rows", "filters", "first"}),
    ({"scheme": "int8-weight-only", "group_size": 32}, 8, 32, {"product", "rows", "filters", "first"}),
    ({"scheme": "int4", "quant_format": "qdq", "group_size": 32}, 4, 32, {"product", "rows", "first"}),
])  # fmt: skip
def test_dequantized_weights_equal_numpy(
    tmp_path: Path, settings: dict[str, Any], bits: int, block_size: int, quantized: set[str]
) -> None:
    ctx = quantize(tmp_path, **settings, max_difference=1.0)
    graph, tensors = read(tmp_path)
    assert quantized.isdisjoint(tensors)
    assert ctx.details["parity"]["error"] < {8: 0.03, 4: 0.3}[bits]
    axes = {"product": (1, 0), "rows": (0, 1), "filters": (0, None), "first": (0, 1)}  # outputs, inputs
    by_output = {node.output[0]: node for node in graph.node}
    readers = {"conv": "filters", "once": "product", "gemm": "rows", "left": "first"}
    for node in graph.node:
        name = readers.get(node.name)
        if name is None or name not in quantized:
            continue
        weight, (outputs, inputs) = WEIGHTS[name] * (0.5 if name == "rows" else 1), axes[name]
        maker = by_output[node.input[0 if name == "first" else 1]]
        assert maker.op_type == "DequantizeLinear"
        session = helper.make_model(
            helper.make_graph(
                [maker], "part", [], [graphs.value_info(maker.output[0], weight.shape)],
                [tensor for tensor in graph.initializer if tensor.name in maker.input],
            ),
            opset_imports=[helper.make_opsetid("", 21)], ir_version=10,
        )  # fmt: skip
        [values] = ReferenceEvaluator(session).run(None, {})
        blocked = block_size and inputs is not None and weight.shape[inputs] > block_size
        axis = inputs if blocked else outputs
        expected = dequantized_by_numpy(weight, bits, int(axis or 0), block_size if blocked else 0)
        np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-7)
    assert readers.keys() <= {node.name for node in graph.node}


def test_int8_scales_equal_static_quantizer(tmp_path: Path) -> None:
    quantize(tmp_path / "weights", scheme="int8-weight-only")
    quantize(tmp_path / "static", scheme="int8-static", max_difference=1.0)
    ours, theirs = (read(tmp_path / side)[1] for side in ("weights", "static"))
    np.testing.assert_allclose(ours["product.scale.0"], theirs["product_scale"], rtol=1e-6)
    difference = ours["product.int8.0"].astype(int) - theirs["product_quantized"]
    assert np.abs(difference).max() <= 1
    assert np.mean(difference != 0) < 0.001


@pytest.mark.parametrize("symmetric", [True, False])
def test_int4_operators_equal_onnxruntimes_quantizer(tmp_path: Path, symmetric: bool) -> None:
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    quantize(tmp_path, scheme="int4", group_size=32, symmetric=symmetric, max_difference=1.0)
    stock = MatMulNBitsQuantizer(model(), block_size=32, is_symmetric=symmetric, accuracy_level=4)
    stock.process()
    theirs = {tensor.name: numpy_helper.to_array(tensor) for tensor in stock.model.model.graph.initializer}
    graph, ours = read(tmp_path)
    node = next(node for node in graph.node if node.op_type == "MatMulNBits" and node.output[0] == "once")
    expected = next(node for node in stock.model.model.graph.node if node.output[0] == "once")
    assert len(node.input) == (3 if symmetric else 4)
    for name, other in zip(node.input[1:], expected.input[1:], strict=True):
        np.testing.assert_array_equal(ours[name], theirs[other])
    # the stock quantizer skips Gemm
    assert sum(node.op_type == "MatMulNBits" for node in graph.node) == 3
    operators = [node.op_type for node in stock.model.model.graph.node]
    assert operators.count("MatMulNBits") == 2


@pytest.mark.parametrize(("settings", "share"), [
    ({"scheme": "int8-weight-only"}, 0.36), ({"scheme": "int4"}, 0.32),
    ({"scheme": "int4", "quant_format": "qdq"}, 0.32),
    ({"scheme": "int8-weight-only", "quant_format": "qoperator"}, 0.42),
])  # fmt: skip
def test_files_are_smaller_and_run_in_two_batch_sizes(
    tmp_path: Path, settings: dict[str, Any], share: float
) -> None:
    quantize(tmp_path, **settings, max_difference=1.0)
    sizes = [sum(p.stat().st_size for p in (tmp_path / side).glob("model.onnx*")) for side in ("out", "src")]
    assert sizes[0] < share * sizes[1]
    path = tmp_path / "out/model.onnx"
    signal = split().arrays.values["signal"]
    all_rows = graphs.run_directly(path, {"signal": signal})["y"]
    row = graphs.run_directly(path, {"signal": signal[:1]})["y"]
    np.testing.assert_allclose(row, all_rows[:1], atol=2e-3)


def test_opset_is_converted_and_refusal_names_node(tmp_path: Path) -> None:
    quantize(tmp_path / "a", scheme="int8-weight-only", opset=18)
    assert onnx.load(tmp_path / "a/out/model.onnx").opset_import[0].version == 18
    with_norm = model()
    scale = numpy_helper.from_array(np.ones(40, np.float32), "norm_scale")
    with_norm.graph.initializer.append(scale)
    with_norm.graph.node[-1].output[0] = "before"
    with_norm.graph.node.append(
        helper.make_node("LayerNormalization", ["before", "norm_scale"], ["y"], "my_norm")
    )
    with raises_code("opset-not-convertible", InputError) as caught:
        quantize(tmp_path / "b", scheme="int8-weight-only", opset=13, model=with_norm)
    assert "my_norm" in str(caught.value)
    assert not (tmp_path / "b/out/model.onnx").exists()


def test_weights_for_tensorrt_pass_its_rules(tmp_path: Path) -> None:
    """Blocks of 64 do not fill 96 inputs, which TensorRT rejects: that weight remains float."""
    ctx = quantize(tmp_path, scheme="int4", target="tensorrt", max_difference=1.0)
    path = tmp_path / "out/model.onnx"
    assert "nodes-kept-float" in message_codes(ctx.warnings)
    assert not [p for p in preflight(load_graph(path), path) if p.severity == "error"]


def test_nodes_in_bodies_and_excluded_nodes(tmp_path: Path) -> None:
    """The weights of a branch are dequantized outside of it; an excluded node keeps its weight."""
    weight = numpy_helper.from_array(WEIGHTS["product"], "w")
    other = numpy_helper.from_array(WEIGHTS["product"].T.copy(), "v")
    branches = {
        f"{kind}_branch": helper.make_graph(
            [helper.make_node("MatMul", ["x", name], [f"{kind}_out"], f"{kind}_product")],
            kind, [], [graphs.value_info(f"{kind}_out", ["N", WIDTH])], [tensor],
        )
        for kind, name, tensor in (("then", "w", weight), ("else", "v", other))
    }  # fmt: skip
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["sum"], "sum", keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["c"], "greater"),
        helper.make_node("If", ["c"], ["y"], "if", **branches),
    ]
    zero = numpy_helper.from_array(np.float32(0), "zero")
    ends = [graphs.value_info("x", ["N", WIDTH])], [graphs.value_info("y", ["N", WIDTH])]
    source = graphs.make_artifact(tmp_path / "src", graphs.make_model(nodes, *ends, [zero]))
    rows = np.random.default_rng(1).normal(size=(8, WIDTH)).astype(np.float32)
    data = {"calibration": split_from_arrays("rows.npz", SampleArrays({"x": rows}, 8))}
    for scheme in ("int8-weight-only", "int4"):
        settings = QuantizeOnnxSettings(scheme=scheme, exclude=("else_product",), max_difference=1.0)
        harness.run_stage(QuantizeOnnx(), settings, source, tmp_path / scheme, data=data)
        out = onnx.load(tmp_path / scheme / "model.onnx").graph
        bodies = {a.name: a.g for node in out.node if node.op_type == "If" for a in node.attribute}
        [then_node], [else_node] = (bodies[name].node for name in ("then_branch", "else_branch"))
        floats = {
            t.name for t in out.initializer if t.data_type == onnx.TensorProto.FLOAT and len(t.dims) == 2
        }
        assert else_node.op_type == "MatMul"
        assert else_node.input[1] in floats
        assert then_node.op_type == ("MatMul" if scheme == "int8-weight-only" else "MatMulNBits")
        assert then_node.input[1] not in floats


def test_matrix_that_is_also_an_embedding_remains_float(tmp_path: Path) -> None:
    """Its float values remain in the file, so integers would be added to it."""
    table = numpy_helper.from_array(
        np.random.default_rng(0).normal(size=(256, 64)).astype(np.float32), "table"
    )
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"], "lookup"),
        helper.make_node("MatMul", ["x", "w"], ["h"], "inner"),
        helper.make_node("Add", ["rows", "h"], ["sum"], "add"),
        helper.make_node("Gemm", ["sum", "table"], ["y"], "head", transB=1),
    ]
    weight = numpy_helper.from_array(np.random.default_rng(1).normal(size=(64, 64)).astype(np.float32), "w")
    inputs = [graphs.value_info("ids", ["N"], onnx.TensorProto.INT64), graphs.value_info("x", ["N", 64])]
    tied = graphs.make_model(nodes, inputs, [graphs.value_info("y", ["N", 256])], [table, weight])
    source = graphs.make_artifact(tmp_path / "src", tied)
    values = {"ids": np.arange(8), "x": np.ones((8, 64), np.float32)}
    data = {"calibration": split_from_arrays("rows.npz", SampleArrays(values, 8))}
    settings = QuantizeOnnxSettings(scheme="int8-weight-only")
    harness.run_stage(QuantizeOnnx(), settings, source, tmp_path / "out", data=data)
    before, after = ((tmp_path / part / "model.onnx").stat().st_size for part in ("src", "out"))
    assert after < before - 64 * 64 * 2  # the other matrix is smaller


@pytest.mark.parametrize("settings", [
    {"group_size": 32}, {"scheme": "int8-static", "symmetric": False},
    {"scheme": "int8-weight-only", "accuracy_level": 0}, {"scheme": "int4", "granularity": "tensor"},
    {"scheme": "int4", "target": "tensorrt", "symmetric": False},
    {"scheme": "int4", "quant_format": "qdq", "opset": 17}, {"scheme": "int4", "op_types": ["Conv"]},
    {"scheme": "int8-dynamic", "quant_format": "qdq"}, {"max_excluded": 2},
])  # fmt: skip
def test_ineffective_settings_are_rejected(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        QuantizeOnnxSettings(**settings)


@pytest.mark.parametrize("kind", ["Conv", "GRU"])
def test_convolutions_and_gru_in_bodies_are_stored_in_int8(tmp_path: Path, kind: str) -> None:
    """ONNX Runtime has no int8 operator for them there: int8-dynamic names the scheme that stores them."""
    random = np.random.default_rng(4)
    shapes = {"Conv": [(16, 8, 3)], "GRU": [(1, 96, WIDTH), (1, 96, 32)]}[kind]
    tensors = [
        numpy_helper.from_array(random.normal(0, 0.1, shape).astype(np.float32), f"w{index}")
        for index, shape in enumerate(shapes)
    ]
    names = ["signal", *(tensor.name for tensor in tensors)]
    options = {"hidden_size": 32} if kind == "GRU" else {"pads": [1, 1]}
    outputs = ["", "last"] if kind == "GRU" else ["last"]
    branches = {
        f"{branch}_branch": helper.make_graph(
            [
                helper.make_node(kind, names, [f"{branch}{o}" if o else "" for o in outputs], **options),
                helper.make_node("Tanh", [f"{branch}last"], [f"{branch}_out"]),
            ],
            branch, [], [helper.make_tensor_value_info(f"{branch}_out", onnx.TensorProto.FLOAT, None)],
        )
        for branch in ("then", "else")
    }  # fmt: skip
    nodes = [
        helper.make_node("ReduceSum", ["signal"], ["sum"], "sum", keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["c"], "greater"),
        helper.make_node("If", ["c"], ["y"], "if", **branches),
    ]
    zero = numpy_helper.from_array(np.float32(0), "zero")
    y = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    graph = graphs.make_model(nodes, [graphs.value_info("signal", ["N", 8, WIDTH])], [y], [*tensors, zero])
    ctx = quantize(tmp_path / "dynamic", model=graph)
    assert message_codes(ctx.warnings) == ["nothing-quantized"]
    assert "int8-weight-only" in ctx.warnings[0].message
    quantize(tmp_path / "weights", model=graph, scheme="int8-weight-only")
    floats = {t.name for t in onnx.load(tmp_path / "weights/out/model.onnx").graph.initializer}
    assert floats.isdisjoint({tensor.name for tensor in tensors})
    signal = {"signal": split().arrays.values["signal"]}
    paths = [tmp_path / "weights" / side / "model.onnx" for side in ("out", "src")]
    actual, expected = (graphs.run_directly(path, signal)["y"] for path in paths)
    assert 0 < np.abs(actual - expected).max() < 0.02


def _qoperator_model(kind: str) -> Any:
    """Return x [N, 64] -> y with a product that QLinear operators do not have, and one that they have."""
    product = helper.make_node("MatMul", ["x", "w"], ["h"], "plain")
    weights = [numpy_helper.from_array(np.ones((64, 64), np.float32), "w")]
    shape: list[Any] = ["N", 64]
    if kind == "stack":
        weights.append(numpy_helper.from_array(np.full((3, 64, 64), 0.1, np.float32), "stack"))
        nodes, shape = [product, helper.make_node("MatMul", ["h", "stack"], ["y"], "batched")], [3, "N", 64]
    elif kind == "vector":
        weights.append(numpy_helper.from_array(np.full(64, 0.1, np.float32), "vector"))
        nodes, shape = [product, helper.make_node("MatMul", ["h", "vector"], ["y"], "dot")], ["N"]
    else:
        bodies = {
            f"{name}_branch": helper.make_graph(
                [helper.make_node("Relu", ["h"], [f"{name}_y"])], name, [],
                [graphs.value_info(f"{name}_y", ["N", 64])],
            )
            for name in ("then", "else")
        }  # fmt: skip
        weights.append(numpy_helper.from_array(np.array(True), "always"))
        second = helper.make_node("MatMul", ["x", "w"], ["z"], "other")
        nodes = [product, second, helper.make_node("If", ["always"], ["inner"], "if", **bodies)]
        nodes.append(helper.make_node("Add", ["inner", "z"], ["y"], "add"))
    return graphs.make_model(
        nodes, [graphs.value_info("x", ["N", 64])], [graphs.value_info("y", shape)], weights
    )


@pytest.mark.parametrize("kind", ["stack", "vector", "read inside If"])
def test_products_without_qlinear_operator_remain_float(tmp_path: Path, kind: str) -> None:
    source = graphs.make_artifact(tmp_path / "src", _qoperator_model(kind))
    x = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
    data = {"calibration": split_from_arrays("rows.npz", SampleArrays({"x": x}, 8))}
    settings = QuantizeOnnxSettings(scheme="int8-static", quant_format="qoperator", max_difference=1.0)
    harness.run_stage(QuantizeOnnx(), settings, source, tmp_path / "out", data=data)
    operators = [node.op_type for node in onnx.load(tmp_path / "out/model.onnx").graph.node]
    assert operators.count("QLinearMatMul") == 1
    assert operators.count("MatMul") == 1
