"""Outputs of a row that depend on the other rows of its call are named."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper, numpy_helper

from smelt.data.npz_arrays import SampleArrays
from smelt.export.onnx_models.output_comparison import batch_dependence_warnings
from smelt.runtimes.onnx_import.signature import GraphSignature
from smelt.runtimes.onnx_import.validate_graph import subprocess_main
from tests.support.graphs import imported_graphs as graphs

_X = np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32)


def codes(path: Path, model: Any, x: Any = _X) -> list[str]:
    answer = subprocess_main([str(graphs.save_model(model, path / "m.onnx"))])
    assert not answer["problems"]
    signature = GraphSignature.model_validate(answer["signature"]).with_batch_axes({})
    warnings_found = batch_dependence_warnings(
        path / "m.onnx", signature, SampleArrays({"x": x}, len(x)), answer["details"]
    )
    assert all("'y'" in message.message for message in warnings_found)
    return [message.code for message in warnings_found]


def branching() -> Any:
    """Return x [N, 8] -> y [N, 8]: x, or its negative where the sum over all rows is positive."""
    bodies = {
        name: helper.make_graph(
            [helper.make_node(kind, ["x"], [kind])], kind, [], [graphs.value_info(kind, ["N", 8])]
        )
        for name, kind in (("then_branch", "Neg"), ("else_branch", "Identity"))
    }
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["s"], keepdims=0),
        helper.make_node("Greater", ["s", "zero"], ["c"]),
        helper.make_node("If", ["c"], ["y"], **bodies),
    ]
    weights = [numpy_helper.from_array(np.float32(0), "zero")]
    return graphs.make_model(
        nodes, [graphs.value_info("x", ["N", 8])], [graphs.value_info("y", ["N", 8])], weights
    )


def normed(training: int) -> Any:
    ones = [numpy_helper.from_array(np.ones(8, np.float32), name) for name in ("s", "b", "m", "v")]
    inputs = ["x", "s", "b", "m", "v"]
    outputs = ["y", "mean", "var"] if training else ["y"]
    node = helper.make_node("BatchNormalization", inputs, outputs, training_mode=training)
    signature = [graphs.value_info("x", ["N", 8])], [graphs.value_info("y", ["N", 8])]
    return graphs.make_model([node], *signature, ones)


@pytest.mark.parametrize("model", [branching(), normed(1)], ids=["if", "batch norm that trains"])
def test_batch_dependent_outputs_are_reported(tmp_path: Path, model: Any) -> None:
    assert codes(tmp_path, model) == ["outputs-depend-on-batch"]


@pytest.mark.parametrize("size", ["N", 1], ids=["any", "one"])
def test_independent_rows_give_no_warning(tmp_path: Path, size: Any) -> None:
    assert codes(tmp_path, normed(0) if size == "N" else graphs.two_layer_classifier(size)) == []


def test_float16_rounding_of_large_mean_is_no_difference(tmp_path: Path) -> None:
    from smelt.export.onnx_models.output_comparison import _relative_difference

    large_values = 2000 + np.arange(8.0)
    assert _relative_difference(large_values, large_values + 1) is None
    assert _relative_difference(large_values - 2000, large_values - 1999) is not None


def test_random_and_dynamically_scaled_outputs_give_no_batch_warning(tmp_path: Path) -> None:
    ends = [graphs.value_info("x", ["N", 8])], [graphs.value_info("y", ["N", 8])]
    random_nodes = [
        helper.make_node("RandomNormalLike", ["x"], ["r"]),
        helper.make_node("Add", ["x", "r"], ["y"]),
    ]
    assert codes(tmp_path, graphs.make_model(random_nodes, *ends)) == []
    scaled = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
    ]
    # one row of a thousand times the others takes nearly all steps of 8 bits
    assert (
        codes(tmp_path, graphs.make_model(scaled, *ends), _X * np.where(np.arange(40)[:, None] == 3, 1e3, 1))
        == []
    )
