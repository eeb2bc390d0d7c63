"""What ONNX Runtime's quantizers get wrong or leave out unless a graph is prepared for them."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from smelt.core.errors import RunError
from smelt.data.npz_arrays import SampleArrays
from smelt.data.splits import split_from_arrays
from smelt.export.onnx_models.prepare_for_quantizer import prepare_for_quantizer
from smelt.export.onnx_models.quantize_onnx import QuantizeOnnx
from smelt.export.onnx_models.settings import QuantizeOnnxSettings
from smelt.runtimes.onnx_session import open_onnx_session
from tests.support import harness
from tests.support.graphs import imported_graphs as graphs


def tied() -> Any:
    """Words [N] to the scores [N, 40] of all words: one matrix [40, 8] at both ends."""
    random = np.random.default_rng(0)
    weights = [numpy_helper.from_array(random.normal(size=(40, 8)).astype(np.float32), "words")]
    nodes = [
        helper.make_node("Gather", ["words", "ids"], ["h"], "embedding"),
        helper.make_node("Gemm", ["h", "words"], ["logits"], "head", transB=1),
    ]
    ids, logits = graphs.value_info("ids", ["N"], TensorProto.INT64), graphs.value_info("logits", ["N", 40])
    return graphs.make_model(nodes, [ids], [logits], weights)


@pytest.mark.parametrize("scheme", ["int8-dynamic", "int8-static"])
def test_embedding_is_not_quantized_per_column(scheme: str, tmp_path: Path) -> None:
    source = graphs.make_artifact(tmp_path / "src", tied())
    ids = np.arange(24)
    ctx = harness.run_stage(
        QuantizeOnnx(), QuantizeOnnxSettings(scheme=scheme), source, tmp_path / "out",
        data={"calibration": split_from_arrays("rows.npz", SampleArrays({"ids": ids}, len(ids)))},
    )  # fmt: skip
    actual, expected = (
        open_onnx_session(folder / "model.onnx", 1).run(None, {"ids": ids})[0]
        for folder in (tmp_path / "out", source.path)
    )
    assert np.abs(actual - expected).max() < 0.05 * expected.std()
    assert ctx.details["parity"]["relative"] < 0.05


def test_graph_without_changes_is_not_rewritten(tmp_path: Path) -> None:
    path = graphs.save_model(graphs.two_layer_classifier(), tmp_path / "m.onnx")
    assert prepare_for_quantizer(path, tmp_path / "new") == (path, 17)
    other = graphs.save_model(tied(), tmp_path / "t.onnx")
    (tmp_path / "new").mkdir()
    assert len(onnx.load(prepare_for_quantizer(other, tmp_path / "new")[0]).graph.initializer) == 2


def constants(opset: int) -> Any:
    """Images [N, 3, 8, 8] to [N, 10], with all weights in Constant nodes, as paddle2onnx writes them."""
    random = np.random.default_rng(0)

    def held(name: str, *shape: int) -> Any:
        tensor = numpy_helper.from_array(random.normal(0, 0.3, shape).astype(np.float32), name)
        return helper.make_node("Constant", [], [name], f"of_{name}", value=tensor)

    nodes = [held("w", 16, 3, 3, 3), held("b", 16), held("m", 16, 10)]
    nodes.append(helper.make_node("Constant", [], ["half"], "of_half", value_float=0.5))
    nodes += [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], "conv", pads=[1] * 4),
        helper.make_node("Mul", ["c", "half"], ["s"], "mul"),
        helper.make_node("Relu", ["s"], ["r"], "relu"),
        helper.make_node("GlobalAveragePool", ["r"], ["p"], "pool"),
        helper.make_node("Flatten", ["p"], ["f"], "flat"),
        helper.make_node("MatMul", ["f", "m"], ["l"], "head"),
        helper.make_node("Softmax", ["l"], ["y"], "soft", axis=1),
    ]
    x, y = graphs.value_info("x", ["N", 3, 8, 8]), graphs.value_info("y", ["N", 10])
    return graphs.make_model(nodes, [x], [y], opset=opset)


def shared_bias() -> Any:
    """Two Conv read the bias `conv`, and a value has the name that ONNX Runtime's copy of it would get."""
    random = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(random.normal(0, 0.3, shape).astype(np.float32), name)
        for name, shape in (("w1", (4, 1, 3, 3)), ("w2", (4, 1, 3, 3)), ("conv", (4,)))
    ]
    nodes = [
        helper.make_node("Conv", ["x", "w1", "conv"], ["a"], "c1", pads=[1] * 4),
        helper.make_node("Conv", ["x", "w2", "conv"], ["conv0"], "c2", pads=[1] * 4),
        helper.make_node("Add", ["a", "conv0"], ["z"], "add"),
    ]
    return graphs.make_model(
        nodes, [graphs.value_info("x", ["N", 1, 8, 8])], [graphs.value_info("z", ["N", 4, 8, 8])], weights
    )


def quantized(model: Any, rows: Any, folder: Path, **settings: Any) -> tuple[Any, Any]:
    """Return the context of the stage, and the graph that it wrote, checked and opened."""
    source = graphs.make_artifact(folder / "src", model)
    data = {"calibration": split_from_arrays("rows.npz", SampleArrays({"x": rows}, len(rows)))}
    stage_settings = QuantizeOnnxSettings(scheme="int8-static", **settings)
    ctx = harness.run_stage(QuantizeOnnx(), stage_settings, source, folder / "out", data=data)
    onnx.checker.check_model(folder / "out" / "model.onnx", full_check=True)
    open_onnx_session(folder / "out" / "model.onnx", 2)
    return ctx, onnx.load(folder / "out" / "model.onnx").graph


@pytest.mark.parametrize("opset", [12, 17])
def test_weights_in_constant_nodes_are_quantized_per_output(opset: int, tmp_path: Path) -> None:
    samples = np.random.default_rng(1).normal(size=(16, 3, 8, 8)).astype(np.float32)
    ctx, graph = quantized(constants(opset), samples, tmp_path)
    sizes = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    assert (sizes["w_scale"], sizes["m_scale"]) == ([16], [10])
    assert ctx.details["parity"]["relative"] < 0.1
    assert ctx.warnings == []


def test_static_quantization_quantizes_only_products(tmp_path: Path) -> None:
    samples = np.random.default_rng(1).normal(size=(16, 3, 8, 8)).astype(np.float32)
    _, graph = quantized(constants(17), samples, tmp_path)
    quantized_inputs = {node.input[0] for node in graph.node if node.op_type == "QuantizeLinear"}
    assert quantized_inputs == {"x", "c", "f"}  # what Conv and MatMul read, and what Conv gives
    _, graph = quantized(constants(17), samples, tmp_path / "b", op_types=["Conv", "Mul"])
    assert "s" in {node.input[0] for node in graph.node if node.op_type == "QuantizeLinear"}


@pytest.mark.parametrize("target", ["ort-cpu", "tensorrt"])
def test_shared_bias_copies_get_unique_names(target: str, tmp_path: Path) -> None:
    samples = np.random.default_rng(1).normal(size=(16, 1, 8, 8)).astype(np.float32)
    ctx, _ = quantized(shared_bias(), samples, tmp_path, target=target)
    assert ctx.details["parity"]["relative"] < 0.1


def test_biases_are_kept_float_for_tensorrt(tmp_path: Path) -> None:
    samples = np.random.default_rng(1).normal(size=(16, 1, 8, 8)).astype(np.float32)
    _, graph = quantized(shared_bias(), samples, tmp_path, target="tensorrt")
    assert TensorProto.INT32 not in {tensor.data_type for tensor in graph.initializer}
    _, graph = quantized(shared_bias(), samples, tmp_path / "cpu")
    assert TensorProto.INT32 in {tensor.data_type for tensor in graph.initializer}


def empty_product() -> Any:
    """A constant of no elements is multiplied, and joined to what the network gives."""
    random = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(random.normal(0, 0.3, (4, 1, 3)).astype(np.float32), "w"),
        numpy_helper.from_array(np.float32(-1), "minus"),
        numpy_helper.from_array(np.int64(0), "first"),
        numpy_helper.from_array(np.array([0]), "axis"),
        numpy_helper.from_array(np.array([4, 0]), "tail"),
    ]
    unit_tensor = numpy_helper.from_array(np.ones(1, np.float32))
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["y"], "conv", pads=[1, 1]),
        helper.make_node("Shape", ["y"], ["shape"], "shape"),
        helper.make_node("Gather", ["shape", "first"], ["b"], "gather"),
        helper.make_node("Unsqueeze", ["b", "axis"], ["b1"], "unsqueeze"),
        helper.make_node("Concat", ["b1", "tail"], ["dims"], "dims", axis=0),
        helper.make_node("ConstantOfShape", ["dims"], ["ones"], "ones", value=unit_tensor),
        helper.make_node("Mul", ["ones", "minus"], ["nothing"], "mul"),
        helper.make_node("Concat", ["y", "nothing"], ["z"], "out", axis=2),
    ]
    x, z = graphs.value_info("x", ["N", 1, 8]), graphs.value_info("z", ["N", 4, 8])
    return graphs.make_model(nodes, [x], [z], weights)


def test_graph_that_crashes_onnx_runtime_is_rejected(tmp_path: Path) -> None:
    """An int8 product of nothing kills ONNX Runtime 1.31 with two threads, and whoever called it."""
    samples = np.random.default_rng(1).normal(size=(4, 1, 8)).astype(np.float32)
    ctx, _ = quantized(empty_product(), samples, tmp_path)
    assert ctx.details["parity"]["relative"] < 0.1
    with pytest.raises(RunError) as raised:
        quantized(empty_product(), samples, tmp_path / "all", op_types=["Conv", "Mul", "Concat"])
    assert raised.value.code == "graph-crashes"


def stack(side: str) -> Any:
    """x and a stack of matrices, or a matrix that is no second operand: [4, 3, 16] times [4, 16, 8]."""
    random = np.random.default_rng(0)
    shape, out = ((4, 16, 8), [4, 3, 8]) if side == "right" else ((5, 3), [4, 5, 16])
    inputs = ["x", "w"] if side == "right" else ["w", "x"]
    weight = numpy_helper.from_array(random.normal(size=shape).astype(np.float32), "w")
    sizes = np.array([0.1, 1, 10, 1, 1, 1, 1, 1])[: shape[-1]]  # columns of unlike sizes
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * sizes.astype(np.float32), "w"))
    nodes = [helper.make_node("MatMul", inputs, ["y"], "product")]
    x, y = graphs.value_info("x", ["N", 4, 3, 16]), graphs.value_info("y", ["N", *out])
    return graphs.make_model(nodes, [x], [y], [weight])


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("scheme", ["int8-dynamic", "int8-static"])
def test_stacked_matrices_have_supported_scales(scheme: str, side: str, tmp_path: Path) -> None:
    source = graphs.make_artifact(tmp_path / "src", stack(side))
    samples = np.random.default_rng(1).normal(size=(16, 4, 3, 16)).astype(np.float32)
    data = {"calibration": split_from_arrays("rows.npz", SampleArrays({"x": samples}, len(samples)))}
    harness.run_stage(
        QuantizeOnnx(), QuantizeOnnxSettings(scheme=scheme), source, tmp_path / "out", data=data
    )
    actual, expected = (
        open_onnx_session(folder / "model.onnx", 1).run(None, {"x": samples})[0]
        for folder in (tmp_path / "out", source.path)
    )
    assert np.abs(actual - expected).max() < 0.03 * np.abs(expected).max()
    graph = onnx.load(tmp_path / "out/model.onnx").graph
    sizes = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    quantized = scheme == "int8-static" or side == "right"  # MatMulInteger is made of second operands alone
    assert ("w_quantized" in sizes) == quantized
    if quantized:
        assert sizes["w_scale"] == ([4, 1, 8] if scheme == "int8-dynamic" else [])


def test_onnx_attention_is_not_treated_as_runtime_attention(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Attention", ["x", "x", "v"], ["a"], "attention", q_num_heads=2, kv_num_heads=2),
        helper.make_node("MatMul", ["a", "w"], ["y"], "product"),
    ]
    random = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(random.normal(size=shape).astype(np.float32), name)
        for name, shape in (("v", (2, 5, 16)), ("w", (16, 4)))
    ]
    x, y = graphs.value_info("x", [2, 5, 16]), graphs.value_info("y", [2, 5, 4])
    model = graphs.make_model(nodes, [x], [y], weights, opset=23)
    model.ir_version = 11
    source = graphs.make_artifact(tmp_path / "src", model)
    samples = random.normal(size=(16, 5, 16)).astype(np.float32)
    data = {"calibration": split_from_arrays("rows.npz", SampleArrays({"x": samples}, len(samples)))}
    ctx = harness.run_stage(QuantizeOnnx(), QuantizeOnnxSettings(), source, tmp_path / "out", data=data)
    operators = [node.op_type for node in onnx.load(tmp_path / "out/model.onnx").graph.node]
    assert ("Attention" in operators, "QAttention" in operators) == (True, False)
    assert "MatMulInteger" in operators
    assert len(ctx.warnings) == 2  # and the float matrix that it reads


@pytest.mark.parametrize("scheme", ["int8-dynamic", "int8-static"])
def test_matrix_with_declared_shape_can_be_transposed(scheme: str, tmp_path: Path) -> None:
    """torch.onnx.export tells the shapes of weights too; the quantizer transposes that of a Gemm."""
    weight = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)
    nodes = [helper.make_node("Gemm", ["x", "w"], ["y"], "head", transB=1)]
    x, y = graphs.value_info("x", ["N", 8]), graphs.value_info("y", ["N", 5])
    model = graphs.make_model(nodes, [x], [y], [numpy_helper.from_array(weight, "w")])
    model.graph.value_info.append(graphs.value_info("w", [5, 8]))
    source = graphs.make_artifact(tmp_path / "src", model)
    ctx = harness.run_stage(
        QuantizeOnnx(), QuantizeOnnxSettings(scheme=scheme), source, tmp_path / "out",
        data={"calibration": graphs.make_split()},
    )  # fmt: skip
    assert ctx.details["parity"]["error"] < 0.05


def test_two_lstms_can_share_weights(tmp_path: Path) -> None:
    """The dynamic quantizer transposes the matrices of an LSTM in place, once for each LSTM."""
    random = np.random.default_rng(0)
    weights = {"w": random.normal(size=(1, 16, 4)), "r": random.normal(size=(1, 16, 4))}
    tensors = [numpy_helper.from_array((v / 2).astype(np.float32), name) for name, v in weights.items()]
    tensors.append(numpy_helper.from_array(np.array([2, -1, 4]), "steps"))
    tensors.append(numpy_helper.from_array(np.array([-1, 4]), "rows"))
    nodes = [
        helper.make_node("Reshape", ["x", "steps"], ["s"]),
        helper.make_node("LSTM", ["s", "w", "r"], ["", "one"], "first", hidden_size=4),
        helper.make_node("LSTM", ["one", "w", "r"], ["", "two"], "second", hidden_size=4),
        helper.make_node("Reshape", ["two", "rows"], ["logits"]),
    ]
    model = graphs.make_model(
        nodes, [graphs.value_info("x", ["N", 8])], [graphs.value_info("logits", ["N", 4])], tensors
    )
    source = graphs.make_artifact(tmp_path / "src", model)
    data = {"calibration": graphs.make_split()}
    stage_settings = QuantizeOnnxSettings(scheme="int8-dynamic")
    ctx = harness.run_stage(QuantizeOnnx(), stage_settings, source, tmp_path / "out", data=data)
    assert ctx.details["parity"]["error"] < 0.1


@pytest.mark.parametrize("size", [5, 8])
@pytest.mark.parametrize("scheme", ["int8-dynamic", "int8-static"])
def test_matrix_that_is_graph_output_is_not_transposed(scheme: str, size: int, tmp_path: Path) -> None:
    """The dynamic quantizer transposes the matrix of a Gemm in its place."""
    weight = np.random.default_rng(0).normal(size=(size, 8)).astype(np.float32)
    nodes = [helper.make_node("Gemm", ["x", "w"], ["y"], "head", transB=1)]
    x, ends = (
        graphs.value_info("x", ["N", 8]),
        [graphs.value_info("y", ["N", size]), graphs.value_info("w", [size, 8])],
    )
    model = graphs.make_model(nodes, [x], ends, [numpy_helper.from_array(weight, "w")])
    source, data = graphs.make_artifact(tmp_path / "src", model), {"calibration": graphs.make_split()}
    ctx = harness.run_stage(
        QuantizeOnnx(), QuantizeOnnxSettings(scheme=scheme), source, tmp_path / "out", data=data
    )
    assert 0 < ctx.details["parity"]["error"] < 0.05
    outputs = open_onnx_session(tmp_path / "out/model.onnx", 1).run(
        ["w"], dict(graphs.make_split().arrays.values)
    )[0]
    assert np.array_equal(outputs, weight)


def test_static_ranges_cover_nodes_after_custom_operators(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    weights = {"w1": random.normal(size=(8, 16)), "w2": random.normal(size=(16, 4)), "b": np.ones(4)}
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["h"], "first"),
        helper.make_node("Gelu", ["h"], ["g"], "gelu", domain="com.microsoft"),
        helper.make_node("Gemm", ["g", "w2", "b"], ["y"], "second"),
    ]
    tensors = [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()]
    model = graphs.make_model(
        nodes, [graphs.value_info("x", ["N", 8])], [graphs.value_info("y", ["N", 4])], tensors
    )
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    source, data = graphs.make_artifact(tmp_path / "src", model), {"calibration": graphs.make_split()}
    settings = QuantizeOnnxSettings(scheme="int8-static")
    ctx = harness.run_stage(QuantizeOnnx(), settings, source, tmp_path / "out", data=data)
    names = {tensor.name for tensor in onnx.load(tmp_path / "out/model.onnx").graph.initializer}
    assert {"w1_quantized", "w2_quantized"} <= names
    assert ctx.details["parity"]["error"] < 0.05
