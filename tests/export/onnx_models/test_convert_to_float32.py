"""Graphs of float16 and float64 weights compute in float32, with the values and the ends that they had."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from smelt.core.messages import message_codes
from smelt.export.onnx_models.normalize_graph import match_nodes, normalize_graph
from smelt.export.onnx_models.quantize_onnx import QuantizeOnnx
from smelt.export.onnx_models.settings import QuantizeOnnxSettings
from smelt.runtimes.graph_walk import all_nodes
from tests.support import harness
from tests.support.graphs import imported_graphs as graphs

pytestmark = pytest.mark.quick
NODE, HALF, DOUBLE = helper.make_node, TensorProto.FLOAT16, TensorProto.DOUBLE


def weight(name: str, dtype: Any, *shape: int) -> Any:
    values = np.random.default_rng(len(name)).normal(0, 0.3, shape).astype(np.float16)
    return numpy_helper.from_array(values.astype(dtype), name)


def constant(name: str, value: Any) -> Any:
    return numpy_helper.from_array(np.asarray(value), name)


def ends(kind: int) -> tuple[Any, Any]:
    return [graphs.value_info("x", ["N", 8], kind)], [graphs.value_info("y", ["N", 8], kind)]


def converted(folder: Path, model: Any) -> Any:
    result = normalize_graph(graphs.save_model(model, folder / "m.onnx"))
    onnx.checker.check_model(result, full_check=True)
    return result


def outputs(model: Any, dtype: Any, **feeds: Any) -> Any:
    x = np.random.default_rng(1).normal(size=(3, 8)).astype(np.float16).astype(dtype)
    return ReferenceEvaluator(model).run(None, {"x": x} | feeds)[0]


def test_float64_limits_become_finite_and_small_numbers_nonzero(tmp_path: Path) -> None:
    """(1 - mask) * minimum is 0 where the mask is 1, and 1 / (0 + epsilon) is finite."""
    nodes = [
        NODE("MatMul", ["x", "w"], ["h"]),
        NODE("Mul", ["zero", "minimum"], ["mask"]),
        NODE("Max", ["zero", "epsilon"], ["floor"]),
        NODE("Div", ["zero", "floor"], ["nothing"]),
        NODE("Add", ["mask", "nothing"], ["offset"]),
        NODE("Add", ["h", "offset"], ["y"]),
    ]
    limits = [
        constant("minimum", np.finfo(np.float64).min),
        constant("epsilon", 1e-60),
        constant("zero", 0.0),
    ]
    model = graphs.make_model(nodes, *ends(DOUBLE), [weight("w", np.float64, 8, 8), *limits])
    expected, actual = outputs(model, np.float64), outputs(converted(tmp_path, model), np.float64)
    assert actual.dtype == np.float64
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_float64_computation_of_float16_graph_is_unchanged(tmp_path: Path) -> None:
    nodes = [
        NODE("Cast", ["count"], ["wide"], to=DOUBLE),
        NODE("Div", ["wide", "two"], ["halved"]),
        NODE("Cast", ["halved"], ["index"], to=TensorProto.INT64),
        NODE("MatMul", ["x", "w"], ["y"]),
    ]
    inputs, outs = ends(HALF)
    inputs.append(graphs.value_info("count", [], TensorProto.INT64))
    outs.insert(0, graphs.value_info("index", [], TensorProto.INT64))
    model = graphs.make_model(nodes, inputs, outs, [weight("w", np.float16, 8, 8), constant("two", 2.0)])
    index = outputs(converted(tmp_path, model), np.float16, count=np.array(2_469_135_780))
    assert index == 1_234_567_890


def test_default_of_float16_input_is_kept(tmp_path: Path) -> None:
    nodes = [NODE("MatMul", ["x", "w"], ["h"]), NODE("Mul", ["h", "alpha"], ["y"])]
    inputs, outs = ends(HALF)
    inputs.append(graphs.value_info("alpha", [], HALF))
    weights = [weight("w", np.float16, 8, 8), constant("alpha", np.float16(0.5))]
    model = graphs.make_model(nodes, inputs, outs, weights)
    result = converted(tmp_path, model)
    assert [(t.name, t.data_type) for t in result.graph.initializer if t.name == "alpha"] == [("alpha", HALF)]
    np.testing.assert_allclose(outputs(result, np.float16), outputs(model, np.float16), rtol=0.01, atol=0.01)


def choice(dtype: Any, kind: int) -> Any:
    bodies = [
        helper.make_graph(
            [NODE("MatMul", ["h", f"w{letter}"], [f"z{letter}"], f"inner_{letter}")],
            letter,
            [],
            [helper.make_tensor_value_info(f"z{letter}", kind, None)],
            [weight(f"w{letter}", dtype, 8, 8)],
        )
        for letter in ("a", "bb")
    ]
    nodes = [
        NODE("MatMul", ["x", "w"], ["h"], "outer"),
        NODE("If", ["yes"], ["y"], "if", then_branch=bodies[0], else_branch=bodies[1]),
    ]
    return graphs.make_model(nodes, *ends(kind), [weight("w", dtype, 8, 8), constant("yes", True)])


def test_float16_weights_of_subgraphs_are_quantized(tmp_path: Path) -> None:
    source = graphs.make_artifact(tmp_path / "src", choice(np.float16, HALF))
    data = {"calibration": graphs.make_split()}
    ctx = harness.run_stage(QuantizeOnnx(), QuantizeOnnxSettings(), source, tmp_path / "out", data=data)
    operators = [node.op_type for node in all_nodes(onnx.load(tmp_path / "out/model.onnx").graph.node)]
    assert operators.count("MatMulInteger") == 3
    assert ctx.warnings == []


def test_excluding_every_node_leaves_no_data_file(tmp_path: Path) -> None:
    weights = [constant("w", np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32))]
    nodes = [NODE("MatMul", [x, "w"], [y], f"m{x}") for x, y in (("x", "h"), ("h", "y"))]
    model_ends = [graphs.value_info("x", ["N", 64])], [graphs.value_info("y", ["N", 64])]
    source = graphs.make_artifact(tmp_path / "src", graphs.make_model(nodes, *model_ends, weights))
    settings = QuantizeOnnxSettings(exclude=["m?"])
    ctx = harness.run_stage(QuantizeOnnx(), settings, source, tmp_path / "out", data={})
    assert "nothing-quantized" in message_codes(ctx.warnings)
    assert [file.name for file in (tmp_path / "out").glob("model.onnx*")] == ["model.onnx"]


def test_node_names_with_brackets_match_only_themselves() -> None:
    names = ["a[1]", "a1", "/layers[0]/x", "/layers0/x"]
    assert match_nodes(["a[1]"], names, "exclude") == ["a[1]"]
    assert match_nodes(["/layers[0]/*"], names, "exclude") == ["/layers[0]/x"]
