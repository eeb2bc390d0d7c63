"""If, Loop and Scan, functions of a model, and weights that are inputs: narrowed, quantized, simplified."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from smelt.core.messages import message_codes
from smelt.data.npz_arrays import SampleArrays
from smelt.data.splits import split_from_arrays
from smelt.export.onnx_models import simplify
from smelt.export.onnx_models.fp16 import Fp16, Fp16Settings
from smelt.export.onnx_models.normalize_graph import normalize_graph
from smelt.export.onnx_models.quantize_onnx import QuantizeOnnx
from smelt.export.onnx_models.settings import QuantizeOnnxSettings
from smelt.export.onnx_models.simplify import Simplify, SimplifySettings
from smelt.runtimes.graph_walk import all_nodes
from tests.support import harness
from tests.support.graphs import imported_graphs as graphs

NODE, BOOL, INT64 = helper.make_node, TensorProto.BOOL, TensorProto.INT64
STAGES = {
    "fp16": (Fp16(), Fp16Settings(), 0.01),
    "int8-dynamic": (QuantizeOnnx(), QuantizeOnnxSettings(scheme="int8-dynamic"), 0.1),
    "int8-static": (QuantizeOnnx(), QuantizeOnnxSettings(scheme="int8-static"), 0.2),
}


def tensor(name: str, *shape: int, scale: float = 0.3) -> Any:
    values = np.random.default_rng(sum(map(ord, name))).normal(0, scale, shape)
    return numpy_helper.from_array(values.astype(np.float32), name)


def constant(name: str, value: Any) -> Any:
    return numpy_helper.from_array(np.asarray(value), name)


def body(nodes: Any, inputs: Any = (), outputs: Any = (), weights: Any = ()) -> Any:
    return helper.make_graph(list(nodes), "body", list(inputs), list(outputs), list(weights))


def unshaped(name: str, kind: int = TensorProto.FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, None if kind == TensorProto.FLOAT else [])


def ends(width: int) -> tuple[Any, Any]:
    return [graphs.value_info("x", ["N", 8])], [graphs.value_info("y", ["N", width])]


def branches(name: str = "if", scales: tuple[float, float] = (0.2, 0.5)) -> Any:
    """A choice by the data whose branches use the same names, each for its own values."""
    branch_bodies = [
        body(
            [NODE("MatMul", ["h", "w"], ["t"], "inside"), NODE(activation, ["t"], ["z"])],
            (),
            [unshaped("z")],
            [tensor("w", 8, 4, scale=scale)],
        )
        for activation, scale in zip(("Tanh", "Relu"), scales, strict=True)
    ]
    return NODE("If", ["c"], ["y"], name, then_branch=branch_bodies[0], else_branch=branch_bodies[1])


def choice(scales: tuple[float, float] = (0.2, 0.5)) -> Any:
    nodes = [
        NODE("MatMul", ["x", "w0"], ["h"], "before"),
        NODE("ReduceSum", ["x"], ["s"], "sum", keepdims=0),
        NODE("Greater", ["s", "zero"], ["c"], "greater"),
        branches(scales=scales),
    ]
    return graphs.make_model(nodes, *ends(4), [tensor("w0", 8, 8), constant("zero", np.float32(0))])


def loop(scale: float = 0.3, trips: int = 3) -> Any:
    """A state that is multiplied again and again; of each round its largest value comes out too."""
    loop_body = body(
        [
            NODE("Constant", [], ["half"], "half", value_float=0.5),
            NODE("Mul", ["state", "half"], ["less"], "less"),
            NODE("MatMul", ["less", "w"], ["m"], "product"),
            NODE("Mul", ["m", "up"], ["larger"], "larger"),
            NODE("Mul", ["larger", "up"], ["largest"], "largest"),
            NODE("Div", ["largest", "up"], ["smaller"], "smaller"),
            NODE("Div", ["smaller", "up"], ["small"], "small"),
            NODE("Tanh", ["small"], ["next"], "tanh"),
            NODE("ReduceMax", ["next"], ["most"], "most", keepdims=0),
        ],
        [graphs.value_info("i", [], INT64), graphs.value_info("go_on", [], BOOL), unshaped("state")],
        [graphs.value_info("go_on", [], BOOL), unshaped("next"), graphs.value_info("most", [])],
    )
    node = NODE("Loop", ["trips", "go", "x"], ["y", "each"], "loop", body=loop_body)
    weights = [tensor("w", 8, 8), constant("up", np.float32(scale))]
    weights += [constant("trips", trips), constant("go", True)]
    return graphs.make_model(
        [node], ends(8)[0], [graphs.value_info("y", ["N", 8]), graphs.value_info("each", ["T"])], weights
    )


def scan() -> Any:
    scan_body = body(
        [
            NODE("MatMul", ["state", "u"], ["a"], "turned"),
            NODE("Add", ["a", "part"], ["b"], "sum"),
            NODE("Tanh", ["b"], ["state_out"], "tanh"),
            NODE("Identity", ["state_out"], ["given"], "given"),
        ],
        [unshaped("state"), unshaped("part")],
        [unshaped("state_out"), unshaped("given")],
    )
    nodes = [
        NODE("MatMul", ["x", "w"], ["h"], "first"),
        NODE("Transpose", ["h"], ["parts"], "columns", perm=[1, 0]),
        NODE("Unsqueeze", ["parts", "last"], ["steps"], "steps"),
        NODE("Slice", ["h", "zero", "four", "last_axis"], ["start"], "start"),
        NODE("Scan", ["start", "steps"], ["end", "y"], "scan", body=scan_body, num_scan_inputs=1),
    ]
    weights = [tensor("w", 8, 8), tensor("u", 4, 4), constant("last", [2])]
    weights += [constant("zero", [0]), constant("four", [4]), constant("last_axis", [1])]
    return graphs.make_model(nodes, ends(4)[0], [graphs.value_info("end", ["N", 4])], weights)


def nested() -> Any:
    """A Loop whose body chooses by the round."""
    branch_bodies = [
        body([NODE(name, ["state", "v"], ["z"], f"in_{name}")], (), [unshaped("z")])
        for name in ("MatMul", "Add")
    ]
    loop_body = body(
        [
            NODE("Equal", ["i", "one"], ["c"], "second"),
            NODE("If", ["c"], ["chosen"], "if", then_branch=branch_bodies[0], else_branch=branch_bodies[1]),
            NODE("Tanh", ["chosen"], ["next"], "tanh"),
        ],
        [graphs.value_info("i", [], INT64), graphs.value_info("go_on", [], BOOL), unshaped("state")],
        [graphs.value_info("go_on", [], BOOL), unshaped("next")],
    )
    node = NODE("Loop", ["trips", "go", "x"], ["y"], "loop", body=loop_body)
    weights = [tensor("v", 8, 8), constant("one", 1), constant("trips", 3), constant("go", True)]
    return graphs.make_model(
        [node], [graphs.value_info("x", [8, 8])], [graphs.value_info("y", [8, 8])], weights
    )


def functions() -> Any:
    """Two calls of a function, which calls another."""
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("mine", 1)]
    inner = helper.make_function(
        "mine", "Product", ["a", "w"], ["o"], [NODE("MatMul", ["a", "w"], ["o"])], opsets[:1]
    )
    outer = helper.make_function(
        "mine", "Layer", ["a", "w"], ["o"],
        [NODE("Product", ["a", "w"], ["t"], domain="mine"), NODE("Tanh", ["t"], ["o"])], opsets,
    )  # fmt: skip
    nodes = [
        NODE("Layer", ["x", "w"], ["h"], domain="mine"),
        NODE("Layer", ["h", "w2"], ["y"], domain="mine"),
    ]
    model = graphs.make_model(
        nodes, *ends(4), [tensor("w", 8, 8), tensor("w2", 8, 4)], functions=[inner, outer]
    )
    model.opset_import.append(opsets[1])
    return model


def listed(ir_version: int) -> Any:
    """Weights that are inputs too, as each had to be before IR version 4."""
    nodes = [NODE("MatMul", ["x", "w"], ["h"], "first"), NODE("Gemm", ["h", "w2", "b"], ["y"], "second")]
    weights = [tensor("w", 8, 8), tensor("w2", 8, 4), tensor("b", 4)]
    model = graphs.make_model(nodes, *ends(4), weights, opset=13)
    model.graph.input.extend(graphs.value_info(one.name, list(one.dims)) for one in weights)
    model.ir_version = ir_version
    return model


MODELS = {
    "if": choice, "loop": loop, "scan": scan, "nested": nested, "functions": functions,
    "ir3": lambda: listed(3), "ir8": lambda: listed(8),
}  # fmt: skip


def rows(count: int = 16) -> Any:
    return np.random.default_rng(5).normal(size=(count, 8)).astype(np.float32)


def run(stage: Any, settings: Any, model: Any, folder: Path) -> Any:
    source = graphs.make_artifact(folder / "src", model)
    data = {"calibration": split_from_arrays("rows.npz", SampleArrays({"x": rows()}, 16))}
    return harness.run_stage(stage, settings, source, folder / "out", data=data)


def outputs(path: Path, x: Any) -> Any:
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.x64quantprecision", "1")
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", MODELS)
def test_subgraphs_are_converted_with_equal_outputs(name: str, stage: str, tmp_path: Path) -> None:
    model, (source_model, settings, allowed) = MODELS[name](), STAGES[stage]
    ctx = run(source_model, settings, model, tmp_path)
    onnx.checker.check_model(tmp_path / "out/model.onnx", full_check=True)
    x = rows(8)
    reference = ReferenceEvaluator(model).run(None, {"x": x})
    float_outputs, stage_outputs = (outputs(tmp_path / side / "model.onnx", x) for side in ("src", "out"))
    for right, float_output, other in zip(reference, float_outputs, stage_outputs, strict=True):
        np.testing.assert_allclose(float_output, right.reshape(float_output.shape), atol=1e-5)
        assert other.dtype == float_output.dtype
        assert np.abs(other - float_output).max() < allowed * np.abs(float_output).max()
    converted = onnx.load(tmp_path / "out/model.onnx")
    dtype_by_name = {t.name: t.data_type for t in converted.graph.initializer if len(t.dims) == 2}
    if stage == "fp16":
        assert set(dtype_by_name.values()) == {TensorProto.FLOAT16}
        assert {v.name for v in converted.graph.input} <= {"x", "b"}
    if stage == "int8-dynamic":
        floats = {name for name, kind in dtype_by_name.items() if kind == TensorProto.FLOAT}
        assert floats == ({"v"} if name == "nested" else set())  # an Add reads it too
        assert "MatMulInteger" in {node.op_type for node in all_nodes(converted.graph.node)}
    assert len(converted.functions) == 0
    # in the nested one an Add reads the float matrix too, which is told
    assert ctx.warnings == [] or stage == "int8-static" or name == "nested"


def test_static_quantization_reports_float_weights_of_subgraphs(tmp_path: Path) -> None:
    ctx = run(*STAGES["int8-static"][:2], choice(), tmp_path)
    (warning,) = [candidate for candidate in ctx.warnings if candidate.code == "weights-kept-float"]
    assert {"2", "(0.00026"} <= {*warning.message.split()}
    quantized = onnx.load(tmp_path / "out/model.onnx")
    dtype_by_name = {t.name: t.data_type for t in quantized.graph.initializer}
    assert (dtype_by_name["w0_quantized"], dtype_by_name["w"], dtype_by_name["w.1"]) == (
        TensorProto.INT8,
        *[TensorProto.FLOAT] * 2,
    )


def test_float_weight_of_two_branches_is_counted_once(tmp_path: Path) -> None:
    ctx = run(*STAGES["int8-static"][:2], choice(scales=(0.2, 0.2)), tmp_path)
    (warning,) = [candidate for candidate in ctx.warnings if candidate.code == "weights-kept-float"]
    assert {"1", "(0.00013"} <= {*warning.message.split()}  # 8 times 4 floats


@pytest.mark.parametrize(("scale", "num_float32"), [(0.3, 0), (1e3, 2)])
def test_overflowing_loop_nodes_are_kept_float32(scale: float, num_float32: int, tmp_path: Path) -> None:
    ctx = run(Fp16(), Fp16Settings(), loop(scale), tmp_path)
    assert ctx.details["kept_float32"] == num_float32
    assert bool(ctx.warnings) == bool(num_float32)
    expected, actual = (outputs(tmp_path / side / "model.onnx", rows(4)) for side in ("src", "out"))
    assert np.abs(actual[0] - expected[0]).max() < 0.01 * np.abs(expected[0]).max()


def test_loop_with_zero_iterations_returns_its_inputs(tmp_path: Path) -> None:
    run(Fp16(), Fp16Settings(), loop(trips=0), tmp_path)
    np.testing.assert_array_equal(outputs(tmp_path / "out/model.onnx", rows(4))[0], rows(4))


def test_functions_are_inlined_before_simplifying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        simplify,
        "run_isolated",
        lambda module, arguments, limits: simplify.subprocess_main(arguments),
    )
    ctx = run(Simplify(), SimplifySettings(), functions(), tmp_path)
    simplified = onnx.load(tmp_path / "out/model.onnx")
    assert ([node.op_type for node in simplified.graph.node], len(simplified.functions)) == (
        ["MatMul", "Tanh"] * 2,
        0,
    )
    assert ctx.warnings == []


def test_normalized_graph_has_unique_value_names(tmp_path: Path) -> None:
    normalized = normalize_graph(graphs.save_model(choice(), tmp_path / "m.onnx"))
    names = [name for node in all_nodes(normalized.graph.node) for name in node.output]
    assert len(names) == len(set(names))
    assert {t.name for t in normalized.graph.initializer} == {"w0", "zero", "w", "w.1"}
    assert [list(t.dims) for t in normalized.graph.initializer if t.name.startswith("w.")] == [[8, 4]]


def test_small_input_with_default_is_kept_as_float32_input(tmp_path: Path) -> None:
    nodes = [NODE("MatMul", ["x", "w"], ["h"], "first"), NODE("Mul", ["h", "k"], ["y"], "times")]
    model = graphs.make_model(nodes, *ends(4), [tensor("w", 8, 4), constant("k", np.array([2], np.float32))])
    model.graph.input.append(graphs.value_info("k", [1]))
    run(Fp16(), Fp16Settings(), model, tmp_path)
    path = str(tmp_path / "out/model.onnx")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    base_output, tripled = (
        session.run(None, {"x": rows(4), "k": np.array([k], np.float32)})[0] for k in (1, 3)
    )
    np.testing.assert_allclose(tripled, 3 * base_output, rtol=2e-3)


@pytest.mark.parametrize("read", ["c", "r"])
def test_relu_used_by_a_branch_is_not_fused(read: str, tmp_path: Path) -> None:
    """The static quantizer removes a ReLU behind a convolution, whoever reads it in another graph."""
    branch_bodies = [
        body([NODE(name, [read], [f"z{name}"])], (), [unshaped(f"z{name}")]) for name in ("Identity", "Neg")
    ]
    nodes = [
        NODE("Conv", ["x", "w", "b"], ["c"], "conv"),
        NODE("Relu", ["c"], ["r"], "relu"),
        NODE("If", ["yes"], ["z"], "if", then_branch=branch_bodies[0], else_branch=branch_bodies[1]),
        NODE("Add", ["z", "r"], ["y"], "sum"),
    ]
    x, y = graphs.value_info("x", ["N", 2, 8]), graphs.value_info("y", ["N", 4, 6])
    weights = [tensor("w", 4, 2, 3), tensor("b", 4), constant("yes", True)]
    samples = np.random.default_rng(1).normal(size=(16, 2, 8)).astype(np.float32)
    source = graphs.make_artifact(tmp_path / "src", graphs.make_model(nodes, [x], [y], weights))
    data = {"calibration": split_from_arrays("rows.npz", SampleArrays({"x": samples}, len(samples)))}
    ctx = harness.run_stage(*STAGES["int8-static"][:2], source, tmp_path / "out", data=data)
    actual, expected = (
        graphs.run_directly(folder / "model.onnx", {"x": samples})["y"]
        for folder in (tmp_path / "out", source.path)
    )
    assert np.abs(actual - expected).max() < 0.1 * expected.std()
    assert len(ctx.warnings) == 1


@pytest.mark.parametrize("name", ["", "product"])
@pytest.mark.parametrize("kind", list(STAGES))
def test_duplicate_or_missing_node_names_around_branch_are_supported(
    kind: str, name: str, tmp_path: Path
) -> None:
    """The dynamic quantizer calls the product of scales after the node, else after what it reads."""
    branch_bodies = [body([NODE("MatMul", [x, "w"], [f"z{x}"], name)], (), [unshaped(f"z{x}")]) for x in "hx"]
    nodes = [
        NODE("MatMul", ["x", "w"], ["h"], name),
        NODE("If", ["yes"], ["y"], "if", then_branch=branch_bodies[0], else_branch=branch_bodies[1]),
    ]
    model = graphs.make_model(nodes, *ends(8), [tensor("w", 8, 8), constant("yes", True)])
    stage, settings, allowed = STAGES[kind]
    ctx = run(stage, settings, model, tmp_path)
    assert ctx.details["parity"]["relative"] < allowed


def test_lstms_that_share_weights_across_branches_are_quantized(tmp_path: Path) -> None:
    branch_bodies = [
        body(
            [NODE("LSTM", ["steps", "v", "u"], [f"all{name}"], f"lstm{name}", hidden_size=4)],
            (),
            [unshaped(f"all{name}")],
        )
        for name in "ab"
    ]
    nodes = [
        NODE("Unsqueeze", ["x", "axis"], ["steps"], "steps"),
        NODE("If", ["yes"], ["all"], "if", then_branch=branch_bodies[0], else_branch=branch_bodies[1]),
        NODE("Reshape", ["all", "shape"], ["flat"], "flat"),
        NODE("MatMul", ["flat", "w"], ["y"], "last"),
    ]
    weights = [tensor("v", 1, 16, 8), tensor("u", 1, 16, 4), tensor("w", 4, 4), constant("axis", [0])]
    weights += [constant("yes", True), constant("shape", [-1, 4])]
    ctx = run(*STAGES["int8-dynamic"][:2], graphs.make_model(nodes, *ends(4), weights), tmp_path)
    quantized = onnx.load(tmp_path / "out/model.onnx")
    operators = [node.op_type for node in all_nodes(quantized.graph.node)]
    assert (operators.count("DynamicQuantizeLSTM"), operators.count("MatMulInteger")) == (2, 1)
    assert {t.data_type for t in quantized.graph.initializer if len(t.dims) == 3} == {TensorProto.INT8}
    assert 0 < ctx.details["parity"]["error"] < 0.1


def recurrent_choice(operator: str = "LSTM", gates: int = 4) -> Any:
    """A choice between recurrent layers of two sizes of weights, as in Silero's voice activity detector."""
    bodies = []
    for letter, scale in (("a", 0.2), ("b", 0.4)):
        nodes = [
            NODE("Unsqueeze", ["x", "first"], [f"u{letter}"]),
            NODE(operator, [f"u{letter}", f"W{letter}", f"R{letter}"], ["", f"h{letter}"], hidden_size=6),
            NODE("Squeeze", [f"h{letter}", "first"], [f"y{letter}"]),
        ]
        weights = [
            tensor(f"{name}{letter}", 1, gates * 6, size, scale=scale) for name, size in (("W", 8), ("R", 6))
        ]
        bodies.append(body(nodes, (), [unshaped(f"y{letter}")], weights))
    nodes = [
        NODE("ReduceSum", ["x"], ["s"], "sum", keepdims=0),
        NODE("Greater", ["s", "zero"], ["c"], "greater"),
        NODE("If", ["c"], ["y"], "if", then_branch=bodies[0], else_branch=bodies[1]),
    ]
    constants = [constant("zero", np.float32(0)), constant("first", np.array([0]))]
    return graphs.make_model(nodes, *ends(6), constants)


def test_lstm_of_subgraph_is_quantized_by_row(tmp_path: Path) -> None:
    ctx = run(*STAGES["int8-dynamic"][:2], recurrent_choice(), tmp_path)
    assert ctx.warnings == []
    quantized = onnx.load(tmp_path / "out/model.onnx")
    onnx.checker.check_model(quantized)
    layers = [node for node in all_nodes(quantized.graph.node) if node.op_type == "DynamicQuantizeLSTM"]
    assert len(layers) == 2
    tensors = {t.name: numpy_helper.to_array(t) for t in quantized.graph.initializer}
    for layer in layers:
        for weight, scale, zero_point in ((1, 8, 9), (2, 10, 11)):
            values = tensors[layer.input[weight]].astype(np.float32) * tensors[layer.input[scale]][:, None]
            expected = numpy_helper.to_array(tensor_of_layer(layer.input[weight].split(".")[0]))
            assert np.abs(values.transpose(0, 2, 1) - expected).max() <= tensors[layer.input[scale]].max() / 2
            assert not tensors[layer.input[zero_point]].any()
    assert not {"Wa", "Ra", "Wb", "Rb"} & set(tensors)
    for x in (rows(5), -np.abs(rows(5)), np.abs(rows(5))):
        expected, actual = (outputs(tmp_path / side / "model.onnx", x)[0] for side in ("src", "out"))
        assert 0 < np.abs(actual - expected).max() < 0.05


def tensor_of_layer(name: str) -> Any:
    return tensor(name, 1, 24, 8 if name[0] == "W" else 6, scale=0.2 if name[1] == "a" else 0.4)


@pytest.mark.parametrize("scheme", ["int8-dynamic", "int8-static"])
def test_graph_without_quantizable_operators_is_unchanged(tmp_path: Path, scheme: str) -> None:
    ctx = run(*STAGES[scheme][:2], recurrent_choice("GRU", 3), tmp_path)
    assert "nothing-quantized" in message_codes(ctx.warnings)
    source, result = ((tmp_path / side / "model.onnx").read_bytes() for side in ("src", "out"))
    assert source == result
