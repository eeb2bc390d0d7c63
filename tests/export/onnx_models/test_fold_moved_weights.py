"""Weights that operators of inner graphs move are folded, as torch writes the LSTM of an If."""

from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from smelt.export.onnx_models.fold_moved_weights import fold_moved_weights
from smelt.runtimes.graph_walk import subgraphs
from tests.support.graphs import imported_graphs as graphs

WIDTH = 4
_N = helper.make_node


def _tensor(name: str, value: Any) -> Any:
    return numpy_helper.from_array(np.asarray(value), name)


def cell(has_constants: bool) -> tuple[list[Any], list[Any]]:
    """Return nodes of an LSTM over one step, its gates in torch's order, and its weights."""
    random = np.random.default_rng(0)
    weights = {name: random.normal(size=(4 * WIDTH, WIDTH)).astype(np.float32) for name in ("w", "r")}
    tensors = [_tensor(name, value) for name, value in weights.items()]
    tensors += [_tensor(f"at{k}", np.array([k * WIDTH])) for k in range(5)]
    tensors += [_tensor("axis0", np.array([0]))]
    nodes = [_N("Constant", [], [t.name], value=t) for t in tensors] if has_constants else []
    for name in weights:
        for gate in range(4):
            nodes.append(_N("Slice", [name, f"at{gate}", f"at{gate + 1}", "axis0"], [f"{name}{gate}"]))
        nodes.append(_N("Concat", [f"{name}{gate}" for gate in (0, 3, 1, 2)], [f"{name}_gates"], axis=0))
        nodes.append(_N("Unsqueeze", [f"{name}_gates", "axis0"], [f"{name}_matrix"]))
    nodes.append(_N("Unsqueeze", ["x", "axis0"], ["steps"]))
    nodes.append(_N("LSTM", ["steps", "w_matrix", "r_matrix"], ["all", "last"], hidden_size=WIDTH))
    nodes.append(_N("Squeeze", ["last", "axis0"], ["y_branch"]))
    return nodes, [] if has_constants else tensors


def model(weights_in: str) -> Any:
    """Return x [N, 4] -> y [N, 4], the LSTM in both branches of an If; weights: inner, outer, constants."""
    nodes, tensors = cell(weights_in == "constants")
    inner = tensors if weights_in == "inner" else []
    branches = {
        key: helper.make_graph(nodes, key, [], [graphs.value_info("y_branch", ["N", WIDTH])], inner)
        for key in ("then_branch", "else_branch")
    }
    outermost = [
        _N("ReduceMean", ["x"], ["mean"], keepdims=0),
        _N("Less", ["mean", "zero"], ["is_low"]),
        _N("If", ["is_low"], ["y"], **branches),
    ]
    weights = [_tensor("zero", np.float32(0)), *(tensors if weights_in == "outer" else [])]
    shape = ["N", WIDTH]
    return graphs.make_model(
        outermost, [graphs.value_info("x", shape)], [graphs.value_info("y", shape)], weights
    )


@pytest.mark.parametrize("weights_in", ["inner", "outer", "constants"])
def test_reordered_gates_are_stored_once_and_outputs_are_equal(weights_in: str) -> None:
    before, after = model(weights_in), model(weights_in)
    fold_moved_weights(after)
    stored = [tensor for tensor in after.graph.initializer if list(tensor.dims) == [1, 4 * WIDTH, WIDTH]]
    assert len(stored) == 2
    bodies = [body for node in after.graph.node for body in subgraphs(node)]
    assert [[node.op_type for node in body.node if node.op_type != "Constant"] for body in bodies] == [
        ["Unsqueeze", "LSTM", "Squeeze"]
    ] * 2
    matrices = {tensor.name for tensor in stored}
    assert all(
        {*node.input[1:3]} == matrices for body in bodies for node in body.node if node.op_type == "LSTM"
    )
    names = {tensor.name for owner in (after.graph, *bodies) for tensor in owner.initializer}
    names |= {
        name for body in bodies for node in body.node if node.op_type == "Constant" for name in node.output
    }
    assert not names & {"w", "r"}
    x = np.random.default_rng(1).normal(size=(3, WIDTH)).astype(np.float32)
    for feeds in ({"x": x - 9}, {"x": x + 9}):
        outputs = [
            onnxruntime.InferenceSession(m.SerializeToString()).run(None, feeds)[0] for m in (before, after)
        ]
        np.testing.assert_array_equal(*outputs)


def test_value_of_other_graph_with_same_name_is_not_folded() -> None:
    """The input of a Loop's body hides a weight of the same name."""
    weight = _tensor("h", np.ones((2, 2), np.float32))
    flag = graphs.value_info("go", [], 9)
    body = helper.make_graph(
        [
            _N("Transpose", ["h"], ["turned"]),
            _N("Add", ["turned", "turned"], ["out"]),
            _N("Identity", ["go"], ["on"]),
        ],
        "body",
        [graphs.value_info("i", [], 7), flag, graphs.value_info("h", [2, 2])],
        [graphs.value_info("on", [], 9), graphs.value_info("out", [2, 2])],
    )
    nodes = [_N("Add", ["x", "h"], ["start"]), _N("Loop", ["trips", "", "start"], ["y"], body=body)]
    weights = [weight, _tensor("trips", np.array(2))]
    shape = [2, 2]
    loop_model = graphs.make_model(
        nodes, [graphs.value_info("x", shape)], [graphs.value_info("y", shape)], weights
    )
    before = loop_model.SerializeToString()
    fold_moved_weights(loop_model)
    assert loop_model.SerializeToString() == before
