"""`exclude: auto` keeps as few nodes float as the limit needs, the worst ones first."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from smelt.core.errors import ParityError
from smelt.core.messages import message_codes
from smelt.data.npz_arrays import SampleArrays
from smelt.data.splits import split_from_arrays
from smelt.export.onnx_models.quantize_onnx import QuantizeOnnx
from smelt.export.onnx_models.settings import QuantizeOnnxSettings
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.graphs import imported_graphs as graphs

WIDTH, LAYERS, WORST = 64, 6, 3


def model() -> Any:
    """Return a chain of linear layers; the input of one has a column a thousand times as large as others.

    One scale for all activations makes the others 0 in int8.
    """
    random = np.random.default_rng(0)
    nodes, tensors, name = [], [], "x"
    for layer in range(LAYERS):
        weight = random.normal(0, WIDTH**-0.5, (WIDTH, WIDTH)).astype(np.float32)
        if layer == WORST - 1:
            weight[:, 0] *= 1000
        if layer == WORST:
            weight[0] /= 1000
        tensors.append(numpy_helper.from_array(weight, f"w{layer}"))
        nodes.append(helper.make_node("MatMul", [name, f"w{layer}"], [f"h{layer}"], f"layer{layer}"))
        name = f"h{layer}"
    ends = [graphs.value_info("x", ["N", WIDTH])], [graphs.value_info(name, ["N", WIDTH])]
    return graphs.make_model(nodes, *ends, tensors)


def run(folder: Path, graph: Any = None, **settings: Any) -> Any:
    source = graphs.make_artifact(folder / "src", graph or model())
    rows = np.random.default_rng(1).normal(size=(24, WIDTH)).astype(np.float32)
    data = {"calibration": split_from_arrays("rows.npz", SampleArrays({"x": rows}, 24))}
    return harness.run_stage(
        QuantizeOnnx(), QuantizeOnnxSettings(**settings), source, folder / "out", data=data
    )


def float_layers(folder: Path) -> set[str]:
    """Return the layers whose weight is float32."""
    graph = onnx.load(folder / "out/model.onnx").graph
    floats = {t.name for t in graph.initializer if t.data_type == onnx.TensorProto.FLOAT and len(t.dims) == 2}
    return {node.name for node in graph.node if node.op_type == "MatMul" and node.input[1] in floats}


@pytest.mark.parametrize("scheme", ["int8-static", "int8-dynamic"])
def test_worst_node_is_excluded_until_difference_is_small(tmp_path: Path, scheme: str) -> None:
    with raises_code("quantization-error", ParityError):
        run(tmp_path / "all", scheme=scheme, max_difference=0.1)
    ctx = run(tmp_path, scheme=scheme, max_difference=0.1, exclude="auto", sensitivity_samples=4)
    assert float_layers(tmp_path) == {f"layer{WORST}"}
    assert ctx.details["excluded"] == [f"layer{WORST}"]
    assert ctx.details["parity"]["error"] < 0.1
    assert ctx.details["sensitivity_samples"] == 4
    sensitivities = ctx.details["sensitivity"]
    assert len(sensitivities) == LAYERS
    assert max(sensitivities, key=sensitivities.__getitem__) == f"layer{WORST}"
    assert "nodes-excluded" in message_codes(ctx.warnings)


def test_random_output_is_not_judged(tmp_path: Path) -> None:
    """It differs between two calls of the float graph, so no excluded node makes it equal."""
    graph = model()
    graph.graph.node.append(helper.make_node("RandomNormalLike", ["x"], ["noise"], "noise"))
    graph.graph.output.append(graphs.value_info("noise", ["N", WIDTH]))
    ctx = run(tmp_path, graph, max_difference=0.1, exclude="auto", sensitivity_samples=4)
    assert ctx.details["excluded"] == [f"layer{WORST}"]
    assert "random-outputs" in message_codes(ctx.warnings)


def test_sensitivity_equals_error_of_node_quantized_alone(tmp_path: Path) -> None:
    """The same number as of a run that excludes all others by name, on the same samples."""
    ctx = run(tmp_path / "auto", max_difference=0.1, exclude="auto", sensitivity_samples=24)
    others = [f"layer{layer}" for layer in range(LAYERS) if layer != 1]
    alone = run(tmp_path / "alone", max_difference=1.0, exclude=others)
    assert ctx.details["sensitivity"]["layer1"] == pytest.approx(alone.details["parity"]["error"], rel=0.01)


def test_nothing_is_excluded_from_accurate_graph(tmp_path: Path) -> None:
    ctx = run(tmp_path, scheme="int8-weight-only", max_difference=0.3, exclude="auto")
    assert float_layers(tmp_path) == set()
    assert "excluded" not in ctx.details
    assert ctx.warnings == []


def test_weight_only_search_adds_to_named_nodes(tmp_path: Path) -> None:
    """4-bit errors of all layers are alike: about half of their sum is left where half are excluded."""
    ctx = run(tmp_path, scheme="int4", max_difference=0.25, exclude=["layer0", "auto"])
    excluded = float_layers(tmp_path)
    assert "layer0" in excluded
    assert {*ctx.details["excluded"], "layer0"} == excluded
    assert 1 < len(excluded) < LAYERS
    assert 0.1 < ctx.details["parity"]["error"] <= 0.25


def test_too_small_max_excluded_is_an_error(tmp_path: Path) -> None:
    with raises_code("quantization-error", ParityError):
        run(tmp_path, scheme="int4", max_difference=0.05, exclude="auto", max_excluded=1)
