"""Whether a graph's answers depend on the other samples of a batch is read from its operators."""

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from smelt.core.artifact import read_artifact
from smelt.export.batch_dependence import depends_on_batch, graphs_depend_on_batch
from tests.support import harness
from tests.support.graphs import imported_graphs as graphs
from tests.support.graphs.exported_artifacts import exported_artifact
from tests.support.graphs.graph_exports import exported_graphs

DYNAMIC = [
    helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
    helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
]
COMPUTED_SCALE = [
    helper.make_node("ReduceMax", ["x"], ["scale"], keepdims=0),
    helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
    helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"]),
]
STATIC = [
    helper.make_node("QuantizeLinear", ["x", "step", "zero"], ["q"]),
    helper.make_node("DequantizeLinear", ["q", "step", "zero"], ["y"]),
]
CAST_SCALE = [
    helper.make_node("Mul", ["step", "step"], ["scale"]),
    *[helper.make_node(n.op_type, [n.input[0], "scale", "zero"], n.output) for n in STATIC],
]
CONSTANTS = {"step": np.float32(0.1), "zero": np.uint8(128)}


def make_model(nodes):
    weights = [numpy_helper.from_array(value, name) for name, value in CONSTANTS.items()]
    ends = [graphs.value_info("x", ["N", 8])], [graphs.value_info("y", ["N", 8])]
    return graphs.make_model(nodes, *ends, weights)


def inside_if(nodes):
    """Return an If whose branches are `nodes`; they read the constants of the graph around it."""
    branch = helper.make_graph(nodes, "branch", [], [graphs.value_info("y", ["N", 8])])
    return [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Cast", ["sum"], ["yes"], to=onnx.TensorProto.BOOL),
        helper.make_node("If", ["yes"], ["y"], then_branch=branch, else_branch=branch),
    ]


@pytest.mark.quick
@pytest.mark.parametrize("wrap", [list, inside_if])
@pytest.mark.parametrize(("nodes", "expected"), [
    (DYNAMIC, True), (COMPUTED_SCALE, True), (STATIC, False), (CAST_SCALE, False),
], ids=["dynamic", "computed scale", "static", "constant scale"])  # fmt: skip
def test_ranges_of_a_batch_are_found_by_structure(wrap, nodes, expected):
    model = make_model(wrap(nodes))
    onnx.checker.check_model(model)
    assert depends_on_batch(model) is expected


@pytest.mark.quick
def test_scale_that_a_caller_can_replace_is_no_constant():
    model = make_model(STATIC)
    model.graph.input.append(graphs.value_info("step", []))
    assert depends_on_batch(model)


@pytest.mark.quick
def test_range_in_function_is_found():
    function = helper.make_function("mine", "Rounded", ["x"], ["y"], DYNAMIC, [helper.make_opsetid("", 17)])
    model = make_model([helper.make_node("Rounded", ["x"], ["y"], domain="mine")])
    model.functions.append(function)
    assert depends_on_batch(model)


@pytest.mark.parametrize(("scheme", "expected"), [
    ("fp32", False), ("int8", True), ("static", False), ("groupwise", False), ("int4", False),
])  # fmt: skip
def test_only_dynamic_int8_export_depends_on_batch(scheme, expected):
    paths = list(exported_graphs("bert", scheme).folder.glob("*.onnx"))
    assert paths
    assert graphs_depend_on_batch(paths) is expected


@pytest.mark.parametrize("kind", ["translator", "int8-caches"])
def test_float_step_records_that_no_answer_depends_on_batch(kind):
    """The int8 caches' scales are calibrated."""
    assert read_artifact(exported_artifact(kind)).manifest.details["depends_on_batch"] is False


def test_int8_step_records_dependence(tmp_path):
    from tests.support.models import tiny

    tiny.write_bert(tmp_path / "m", num_hidden_layers=1)
    data = tiny.write_labeled(tmp_path / "data.jsonl", 6)
    (tmp_path / "r.yaml").write_text(
        f"model: m\ntask: text-classification\ndata: {{test: {data.name}}}\n"
        "stages: [quantize: {scheme: int8-dynamic}, onnx: {}]\nscore: {latency: false}\n"
    )
    harness.smelt("run", tmp_path / "r.yaml", "--out", tmp_path / "run")
    assert read_artifact(tmp_path / "run" / "artifacts" / "onnx").manifest.details["depends_on_batch"] is True
