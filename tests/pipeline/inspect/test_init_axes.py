"""A first recipe names the axes that a run needs, found by a call where names do not say."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper, numpy_helper

from smelt.core.errors import InputError
from smelt.pipeline.inspect.model_info import OnnxModel, infer_batch_axes
from smelt.runtimes.onnx_import.signature import GraphSignature
from smelt.runtimes.onnx_import.validate_graph import subprocess_main
from tests.support.expected_errors import raises_code
from tests.support.graphs import imported_graphs as graphs


def found(folder: Path, model: Any, **arrays: Any) -> tuple[dict[str, int | None], list[str]]:
    path = graphs.save_model(model, folder / "m.onnx")
    np.savez(folder / "r.npz", allow_pickle=False, **arrays)
    response = subprocess_main([str(path)])
    onnx_model = OnnxModel(
        path, GraphSignature.model_validate(response["signature"]), (), None, response["details"]
    )
    return infer_batch_axes(onnx_model, folder / "r.npz")


def layered(x: list[Any], state: list[Any], new: list[Any], order: tuple[str, str] = ("x", "state")) -> Any:
    """Return x [N, T, 8] and state [2, N, 8] -> new_state [2, N, 8]: of each layer another share."""
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["m"], axes=[1], keepdims=0),
        helper.make_node("Mul", ["state", "k"], ["s"]),
        helper.make_node("Add", ["s", "m"], ["new_state"]),
    ]
    weights = [numpy_helper.from_array(np.array([0.5, 3], np.float32).reshape(2, 1, 1), "k")]
    sizes = {"x": x, "state": state}
    inputs = [graphs.value_info(name, sizes[name]) for name in order]
    return graphs.make_model(nodes, inputs, [graphs.value_info("new_state", new)], weights)


def arrays(rows: int) -> dict[str, Any]:
    x = np.random.default_rng(0).normal(size=(rows, 5, 8)).astype(np.float32)
    return {"x": x, "state": np.zeros((2, rows, 8), np.float32)}


@pytest.mark.parametrize("rows", [2, 7])
@pytest.mark.parametrize("order", [("x", "state"), ("state", "x")], ids="-".join)
@pytest.mark.parametrize("shapes", [
    ([3, 5, 8], [2, 3, 8], [2, 3, 8]), ([None, None, 8], [2, None, 8], [2, None, 8]),
    ([None, None, None], [None, None, None], [None, None, None]),
], ids=["batches of 3", "open", "nameless"])  # fmt: skip
def test_state_batch_axis_is_inferred_by_running_graph(
    tmp_path: Path, shapes: tuple[list[Any], ...], order: tuple[str, str], rows: int
) -> None:
    axes, without = found(tmp_path, layered(*shapes, order), **arrays(rows))
    signature = GraphSignature.model_validate(
        subprocess_main([str(tmp_path / "m.onnx")])["signature"]
    ).with_batch_axes(axes)
    assert signature.input_batch_axes == {"x": 0, "state": 1}
    assert [value.axis for value in signature.outputs] == [1]
    assert not list(signature.ambiguous_axes(axes))
    assert without == []


def test_fixed_batch_output_without_batch_axis_is_rejected(tmp_path: Path) -> None:
    model = graphs.two_layer_classifier(batch=4)
    model.graph.node.append(helper.make_node("ReduceMean", ["logits"], ["loss"], keepdims=0))
    model.graph.output.append(graphs.value_info("loss", []))
    x = np.random.default_rng(0).normal(size=(9, 8)).astype(np.float32)
    with raises_code("unclear-rows", InputError):
        found(tmp_path, model, x=x)


def test_dynamic_batch_output_without_batch_axis_is_named(tmp_path: Path) -> None:
    model = graphs.two_layer_classifier()
    model.graph.node.append(helper.make_node("ReduceMean", ["logits"], ["mean"], axes=[0], keepdims=1))
    model.graph.output.append(graphs.value_info("mean", [None, 4]))
    x = np.random.default_rng(0).normal(size=(9, 8)).astype(np.float32)
    assert found(tmp_path, model, x=x) == ({}, ["mean"])


def test_axis_of_other_length_than_fixed_size_holds_samples(tmp_path: Path) -> None:
    """[1, 16] and 18 states [2, 1, n]: 2 is the most frequent first length, but 6 samples are given."""
    states = {f"state{n}": [2, 1, 8 + n] for n in range(18)}
    nodes = [helper.make_node("Relu", [name], [f"new_{name}"]) for name in ["x", *states]]
    shapes = {"x": [1, 16], **states}
    inputs = [graphs.value_info(name, shape) for name, shape in shapes.items()]
    outputs = [graphs.value_info(f"new_{name}", shape) for name, shape in shapes.items()]
    samples = {
        name: np.ones([6 if size == 1 else size for size in shape], np.float32)
        for name, shape in shapes.items()
    }
    axes, without = found(tmp_path, graphs.make_model(nodes, inputs, outputs), **samples)
    assert axes == dict.fromkeys(states, 1)
    assert without == []


def test_output_declared_without_axes_has_axis_found_by_call(tmp_path: Path) -> None:
    nodes = [helper.make_node("ReduceSum", ["x"], ["y"], keepdims=0, axes=[1])]
    model = graphs.make_model(
        nodes, [graphs.value_info("x", ["N", 4])], [graphs.value_info("y", [])], opset=11
    )
    axes, without = found(tmp_path, model, x=np.ones((5, 4), np.float32))
    assert (axes, without) == ({"y": 0}, [])
    signature = GraphSignature.model_validate(subprocess_main([str(tmp_path / "m.onnx")])["signature"])
    assert list(signature.invalid_axes(axes)) == []
