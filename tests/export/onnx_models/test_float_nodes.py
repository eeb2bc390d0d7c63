"""Which nodes stay float: masks of every kind, from the graph alone; and what a padded batch gives then."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from smelt.data.npz_arrays import SampleArrays
from smelt.data.splits import split_from_arrays
from smelt.export.onnx_models.ort_quantizers import QuantizeOnnxSettings
from smelt.export.onnx_models.prepare_for_quantizer import (
    float_only_nodes,
    masked_values,
    unfused_activations,
)
from smelt.export.onnx_models.quantize_onnx import QuantizeOnnx
from smelt.runtimes.onnx_session import open_onnx_session
from tests.support import harness
from tests.support.graphs import imported_graphs as graphs
from tests.support.pairs.matrix import matrix_cells

N = helper.make_node
LOWEST = float(np.finfo(np.float32).min)
# of a mask [N, 1, T] of ones and zeros: what is made of it, ending in the scores `z` for the Softmax
MASKS: dict[str, list[Any]] = {
    "added, as Hugging Face does": [
        N("Sub", ["one", "mask"], ["padding"]), N("Mul", ["padding", "lowest"], ["bias"]),
        N("Add", ["s", "bias"], ["z"], "masking"),
    ],
    "added, as BERT did": [
        N("Sub", ["one", "mask"], ["padding"]), N("Mul", ["padding", "ten_thousand"], ["bias"]),
        N("Add", ["s", "bias"], ["z"], "masking"),
    ],
    "chosen": [
        N("Cast", ["mask"], ["is"], to=TensorProto.BOOL),
        N("Where", ["is", "s", "lowest"], ["z"], "masking"),
    ],
    "as a logarithm": [N("Log", ["mask"], ["bias"]), N("Add", ["s", "bias"], ["z"], "masking")],
    "with a bound behind it": [
        N("Log", ["mask"], ["bias"]), N("Add", ["s", "bias"], ["low"], "masking"),
        N("Max", ["low", "lowest"], ["z"], "bound"),
    ],
}  # fmt: skip
OPERATORS = ("MatMul", "Add", "Where", "Max", "Mul", "Sub", "Softmax")


def attention(masking: list[Any]) -> Any:
    """Attention over x [N, T, 8] with a mask [N, 1, T] -> y [N, T, 4]."""
    random = np.random.default_rng(0)
    weights = {name: random.normal(size=(8, 8)) for name in ("q", "k", "v")} | {
        "o": random.normal(size=(8, 4))
    }
    weights |= {"one": np.float32(1), "lowest": np.float32(LOWEST), "ten_thousand": np.float32(-10_000)}
    nodes = [
        *(N("MatMul", ["x", name], [f"x{name}"], name) for name in ("q", "k", "v")),
        N("Transpose", ["xk"], ["xkt"], "turn", perm=[0, 2, 1]),
        N("MatMul", ["xq", "xkt"], ["s"], "scores"),
        *masking,
        N("Softmax", ["z"], ["p"], "softmax", axis=-1),
        N("MatMul", ["p", "xv"], ["c"], "context"),
        N("MatMul", ["c", "o"], ["y"], "out"),
    ]
    inputs = [graphs.value_info("x", ["N", "T", 8]), graphs.value_info("mask", ["N", 1, "T"])]
    tensors = [numpy_helper.from_array(np.asarray(w, np.float32), name) for name, w in weights.items()]
    return graphs.make_model(nodes, inputs, [graphs.value_info("y", ["N", "T", 4])], tensors)


def padded(seed: int, rows: int = 48) -> SampleArrays:
    """Rows of 12 places, of which 3 to 12 count; what stands in the others is as large as what counts."""
    random = np.random.default_rng(seed)
    lengths = random.integers(3, 13, size=rows)
    mask = (np.arange(12) < lengths[:, None]).astype(np.float32)[:, None]
    return SampleArrays({"x": random.normal(size=(rows, 12, 8)).astype(np.float32), "mask": mask}, rows)


def names_kept(model: Any) -> set[str]:
    return {model.graph.node[index].name for index in float_only_nodes(model, {}, OPERATORS)}


@pytest.mark.parametrize("kind", MASKS)
def test_nodes_between_mask_and_softmax_are_kept_float(kind: str) -> None:
    float_names = names_kept(attention(MASKS[kind]))
    assert {"masking", "softmax"} <= float_names
    assert not float_names & {"q", "k", "v", "scores", "context", "out"}


@pytest.mark.parametrize(("kind", "method"), matrix_cells(list(MASKS), ["minmax", "entropy", "percentile"]))
def test_int8_graph_ignores_padding(kind: str, method: Any, tmp_path: Path) -> None:
    source = graphs.make_artifact(tmp_path / "src", attention(MASKS[kind]))
    settings = QuantizeOnnxSettings(scheme="int8-static", calibration_method=method, op_types=OPERATORS)
    data = {"calibration": split_from_arrays("rows.npz", padded(1))}
    ctx = harness.run_stage(QuantizeOnnx(), settings, source, tmp_path / "out", data=data)
    arrays = padded(2).values
    float_session, int8_session = (
        open_onnx_session(folder / "model.onnx", 1) for folder in (source.path, ctx.out)
    )
    expected, actual = (session.run(None, arrays)[0] for session in (float_session, int8_session))
    assert np.sqrt(((actual - expected) ** 2).mean()) < 0.15 * expected.std()
    other = {**arrays, "x": np.where(arrays["mask"].transpose(0, 2, 1) == 1, arrays["x"], 3 * arrays["x"])}
    counts = np.broadcast_to(arrays["mask"].transpose(0, 2, 1) == 1, actual.shape)
    assert np.array_equal(int8_session.run(None, other)[0][counts], actual[counts])  # padding is not read


def test_bias_or_bound_is_not_treated_as_mask() -> None:
    """A linear model of large numbers, a clamp to the limits of float16, the bias of a classifier."""
    tensors = {
        "w": np.full((8, 4), -2e5), "b": np.array([-5e4, 3, 2e4, 1]), "low": -65504.0, "high": 65504.0,
    }  # fmt: skip
    nodes = [
        N("MatMul", ["x", "w"], ["h"], "product"), N("Add", ["h", "b"], ["a"], "bias"),
        N("Clip", ["a", "low", "high"], ["c"], "clamp"), N("Max", ["c", "low"], ["m"], "max"),
        N("Softmax", ["m"], ["y"], "softmax"),
    ]  # fmt: skip
    weights = [
        numpy_helper.from_array(np.asarray(value, np.float32), name) for name, value in tensors.items()
    ]
    model = graphs.make_model(
        nodes, [graphs.value_info("x", ["N", 8])], [graphs.value_info("y", ["N", 4])], weights
    )
    assert masked_values(model.graph) == set()
    assert names_kept(model) == set()


def test_unsupported_types_are_kept_float() -> None:
    nodes = [N("MatMul", ["x", "w"], ["h"], "stack"), N("MatMul", ["h", "d"], ["y"], "double")]
    weights = [numpy_helper.from_array(np.ones((3, 8, 8), np.float32), "w")]
    model = graphs.make_model(
        nodes, [graphs.value_info("x", [3, 2, 8])], [graphs.value_info("y", [3, 2, 8])], weights
    )
    float_nodes = float_only_nodes(model, {"d": TensorProto.DOUBLE}, ["MatMul"])
    assert set(float_nodes) == {1}


@pytest.mark.parametrize(
    ("bounds", "stays"),
    [({"low": 0, "high": 6}, False), ({"high": 6}, False), ({"low": 0.01}, True), ({"high": -0.01}, True)],
)
@pytest.mark.parametrize("computed", [False, True])
def test_clip_not_represented_by_output_range_is_kept_float(
    bounds: dict[str, float], stays: bool, computed: bool
) -> None:
    """The static quantizer removes a Clip behind a convolution; a range of int8 always has 0 inside."""
    end = "_" if computed else ""
    weights = [numpy_helper.from_array(np.float32(value), name + end) for name, value in bounds.items()]
    nodes = [N("Identity", [name + end], [name]) for name in bounds if computed]
    nodes.append(N("Clip", ["x", *(name if name in bounds else "" for name in ("low", "high"))], ["y"]))
    model = graphs.make_model(
        nodes, [graphs.value_info("x", ["N", 4])], [graphs.value_info("y", ["N", 4])], weights
    )
    float_nodes = unfused_activations(model.graph, ("Clip",))
    assert set(float_nodes) == ({len(nodes) - 1} if stays or computed else set())
    assert not unfused_activations(model.graph, ("Conv",))


@pytest.mark.parametrize("op_type", ["MatMul", "Gemm"])
def test_empty_reduction_is_kept_float(op_type: str) -> None:
    """ONNX Runtime 1.31 returns uninitialized memory for it in int8."""
    signature = [graphs.value_info("x", [1, 0])], [graphs.value_info("y", [1, 8])]
    weight = numpy_helper.from_array(np.zeros((0, 8), np.float32), "w")
    model = graphs.make_model([N(op_type, ["x", "w"], ["y"], "empty")], *signature, [weight])
    assert float_only_nodes(model, {}, ("MatMul", "Gemm")) == {0: "an empty weight"}
