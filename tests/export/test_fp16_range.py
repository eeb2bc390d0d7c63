"""Nodes that need values which float16 does not have; compared with float32 on samples that need them."""

from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from smelt.export.convert_to_half import convert_to_half
from smelt.export.fp16_range import nodes_outside_fp16
from smelt.export.onnx_models.fp16 import float32_nodes
from tests.support.graphs import imported_graphs as graphs

pytestmark = pytest.mark.quick

N = helper.make_node
RANDOM = np.random.default_rng(0)
CONSTANTS = {
    "w": RANDOM.normal(size=(8, 8)), "tiny_w": RANDOM.normal(size=(8, 8)) * 1e-6, "million": 1e6, "one": 1.0,
    "two": 2.0, "half": 0.5, "minus_half": -0.5, "third": 1 / 3, "e-12": 1e-12, "e-10": 1e-10, "e-8": 1e-8,
    "lowest": float(np.finfo(np.float32).min), "zero": 0.0, "divisor": np.array([1e-8, 1e-5, *[1.0] * 6]),
    "e-12s": np.full(8, 1e-12), "filters": np.abs(RANDOM.normal(size=(8, 8))),
}  # fmt: skip
INTEGERS = {"last": [-1], "eight": [8]}
MEAN, CENTERED = N("ReduceMean", ["x"], ["mean"], axes=[-1]), N("Sub", ["x", "mean"], ["d"])
NORM = N("ReduceL2", ["x"], ["norm"], axes=[-1])
VARIANCE = [MEAN, CENTERED, N("Pow", ["d", "two"], ["d2"]), N("ReduceMean", ["d2"], ["var"], axes=[-1])]
SCORES = N("MatMul", ["x", "w"], ["s"])
# the nodes x float32 [N, 8] -> y; `x` has ordinary values, small ones, equal ones and zeros
PATTERNS: dict[str, list[Any]] = {
    "layer norm": [
        *VARIANCE, N("Add", ["var", "e-12"], ["v"]), N("Sqrt", ["v"], ["std"]), N("Div", ["d", "std"], ["y"]),
    ],
    "layer norm with the reciprocal": [
        *VARIANCE, N("Add", ["var", "e-12"], ["v"]), N("Sqrt", ["v"], ["std"]),
        N("Reciprocal", ["std"], ["r"]), N("Mul", ["d", "r"], ["y"]),
    ],
    "layer norm with 1 / std": [
        *VARIANCE, N("Add", ["var", "e-12s"], ["v"]), N("Pow", ["v", "half"], ["std"]),
        N("Div", ["one", "std"], ["r"]), N("Mul", ["d", "r"], ["y"]),
    ],
    "RMS norm by a power": [
        N("Mul", ["x", "x"], ["x2"]), N("ReduceMean", ["x2"], ["m"], axes=[-1]),
        N("Add", ["m", "e-12"], ["v"]), N("Pow", ["v", "minus_half"], ["r"]), N("Mul", ["x", "r"], ["y"]),
    ],
    "epsilon after the root": [
        *VARIANCE, N("Sqrt", ["var"], ["std"]), N("Add", ["std", "e-8"], ["v"]), N("Div", ["d", "v"], ["y"]),
    ],
    "unit length": [
        NORM, N("Clip", ["norm", "e-12"], ["c"]), N("Shape", ["x"], ["size"]),
        N("Expand", ["c", "size"], ["wide"]), N("Div", ["x", "wide"], ["y"]),
    ],
    "unit length by Max": [NORM, N("Max", ["norm", "e-12"], ["c"]), N("Div", ["x", "c"], ["y"])],
    "unit length by Where": [
        NORM, N("Greater", ["norm", "e-8"], ["g"]), N("Where", ["g", "norm", "e-8"], ["c"]),
        N("Div", ["x", "c"], ["y"]),
    ],
    "cosine": [
        N("Mul", ["x", "x"], ["x2"]), N("ReduceSum", ["x2", "last"], ["a"]), N("MatMul", ["x", "w"], ["z"]),
        N("Mul", ["x", "z"], ["xz"]), N("ReduceSum", ["xz", "last"], ["dot"]), N("Add", ["a", "e-12"], ["c"]),
        N("Div", ["dot", "c"], ["y"]),
    ],
    "log of a probability": [
        SCORES, N("Mul", ["s", "million"], ["t"]), N("Softmax", ["t"], ["p"]), N("Add", ["p", "e-10"], ["q"]),
        N("Log", ["q"], ["y"]),
    ],
    "log of a computed probability": [SCORES, N("Softmax", ["s"], ["p"]), N("Log", ["p"], ["y"])],
    "log of the powers of a spectrum": [
        N("Mul", ["x", "x"], ["x2"]), N("MatMul", ["x2", "filters"], ["m"]), N("Max", ["m", "e-10"], ["c"]),
        N("Log", ["c"], ["y"]),
    ],
    "unit length by Einsum": [
        N("Einsum", ["x", "x"], ["n"], equation="ni,ni->n"), N("Unsqueeze", ["n", "last"], ["u"]),
        N("Sqrt", ["u"], ["norm"]), N("Max", ["norm", "e-12"], ["c"]), N("Div", ["x", "c"], ["y"]),
    ],
    "length": [N("ReduceL2", ["x"], ["y"], axes=[-1])],
    "length and direction in one operator": [N("LpNormalization", ["x"], ["y"], axis=-1)],
    "root of a mean with a constant": [
        N("Mul", ["x", "x"], ["x2"]), N("Mean", ["x2", "e-12"], ["m"]), N("Sqrt", ["m"], ["y"]),
    ],
    "cube root": [N("Mul", ["x", "x"], ["x2"]), N("Pow", ["x2", "third"], ["y"])],
    "root of a mean square": [
        N("Mul", ["x", "x"], ["x2"]), N("ReduceMean", ["x2"], ["m"], axes=[-1]), N("Sqrt", ["m"], ["y"]),
    ],
    "a divisor with small elements": [N("Div", ["x", "divisor"], ["y"])],
    "a product with a small factor": [
        N("Mul", ["x", "e-8"], ["m"]), N("Identity", ["m"], ["i"]), N("Div", ["i", "e-8"], ["y"]),
    ],
    "weights that are all small": [
        N("MatMul", ["x", "tiny_w"], ["m"]), N("Relu", ["m"], ["r"]), N("Mul", ["r", "million"], ["y"]),
    ],
    "a mask": [  # of the first sample everything is masked
        SCORES, N("ReduceMax", ["x"], ["most"], axes=[-1]), N("Greater", ["most", "zero"], ["g"]),
        N("Cast", ["g"], ["f"], to=TensorProto.FLOAT), N("Sub", ["one", "f"], ["padding"]),
        N("Mul", ["padding", "lowest"], ["mask"]), N("Add", ["s", "mask"], ["t"]), N("Softmax", ["t"], ["y"]),
    ],
    "a mask by Where": [
        SCORES, N("ReduceMax", ["x"], ["most"], axes=[-1]), N("Greater", ["most", "zero"], ["g"]),
        N("Where", ["g", "s", "lowest"], ["t"]), N("Softmax", ["t"], ["y"]),
    ],
    "a division by a large number": [
        N("Div", ["x", "million"], ["m"]), N("Mul", ["m", "million"], ["y"]),
    ],
    "a bound that is a node": [
        N("Constant", [], ["small"], value_float=1e-12), N("Abs", ["x"], ["a"]),
        N("Max", ["a", "small"], ["c"]), N("Div", ["x", "c"], ["y"]),
    ],
}  # fmt: skip


def make_model(nodes: list[Any], opset: int = 17) -> Any:
    used_names = {name for node in nodes for name in node.input}
    arrays = {name: np.asarray(value, np.float32) for name, value in CONSTANTS.items()}
    arrays |= {name: np.asarray(value, np.int64) for name, value in INTEGERS.items()}
    weights = [numpy_helper.from_array(value, name) for name, value in arrays.items() if name in used_names]
    signature = [graphs.value_info("x", ["N", 8])], [graphs.value_info("y", None)]
    return graphs.make_model(nodes, *signature, weights, opset=opset)


def samples() -> Any:
    x = np.random.default_rng(1).normal(size=(6, 8))
    x[0], x[1], x[2], x[3] = 0, x[1] * 1e-4, 3.3, x[3] * 1e-2
    return x.astype(np.float16).astype(np.float32)


@pytest.mark.parametrize("name", PATTERNS)
def test_values_outside_float16_are_computed_in_float32(name: str) -> None:
    """The inputs are float16 values, so only the inside of the graph can differ.

    ONNX's reference rounds after each node; ONNX Runtime computes some chains of nodes in float32 on the CPU.
    """
    model, x = make_model(PATTERNS[name]), samples()
    with np.errstate(all="ignore"):
        (expected,) = ReferenceEvaluator(model).run(None, {"x": x})
    convert_to_half(model, "model", "fp16", float32_nodes(model) | nodes_outside_fp16(model), {"x", "y"})
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (actual,) = session.run(None, {"x": x})
    with np.errstate(all="ignore"):
        (rounded,) = ReferenceEvaluator(model).run(None, {"x": x})
    limits = {"rtol": 2e-2, "atol": 1e-6 * np.abs(expected[np.isfinite(expected)]).max()}
    np.testing.assert_allclose(rounded, expected, **limits)
    np.testing.assert_allclose(actual, expected, **limits)


@pytest.mark.parametrize(
    "nodes",
    [
        [SCORES, N("Mul", ["s", "half"], ["y"])],
        [SCORES, N("Div", ["s", "two"], ["t"]), N("Softmax", ["t"], ["p"]), N("MatMul", ["p", "w"], ["y"])],
        [N("Mul", ["x", "x"], ["y"])],
        [  # attention, divided by the root of a size, as torch exports it
            SCORES, N("Shape", ["s"], ["size"]), N("Cast", ["size"], ["f"], to=TensorProto.FLOAT),
            N("Gather", ["f", "last"], ["width"]), N("Sqrt", ["width"], ["root"]),
            N("Div", ["s", "root"], ["t"]), N("Div", ["one", "root"], ["scale"]),
            N("Mul", ["t", "scale"], ["y"]),
        ],
    ],
)  # fmt: skip
def test_other_nodes_become_float16(nodes: list[Any]) -> None:
    assert nodes_outside_fp16(make_model(nodes)) == set()


@pytest.mark.parametrize(("node", "float32"), [
    (N("Clip", ["x"], ["y"], min=1e-9), True),
    (N("Clip", ["x"], ["y"], min=0.0, max=float(np.finfo(np.float32).max)), False),
    (N("LeakyRelu", ["x"], ["y"], alpha=1e-6), True), (N("LeakyRelu", ["x"], ["y"], alpha=0.01), False),
    (N("InstanceNormalization", ["x", "one", "one"], ["y"], epsilon=1e-12), True),
    (N("InstanceNormalization", ["x", "one", "one"], ["y"], epsilon=1e-5), False),
    (N("LayerNormalization", ["x", "w"], ["y"], epsilon=1e-12), False),
])  # fmt: skip
def test_attributes_without_a_float16_value(node: Any, float32: bool) -> None:
    """LayerNormalization computes in float32 by definition (stash_type)."""
    opset = 6 if node.op_type == "Clip" else 17
    assert nodes_outside_fp16(make_model([node], opset)) == ({"y"} if float32 else set())


def test_small_elements_of_weights_and_biases_become_float16() -> None:
    """Next to the others they are negligible; nearly every matrix has some."""
    arrays = {
        "w": np.random.default_rng(0).normal(size=(8, 8)),
        "b": np.full(8, 1e-7),
        "c": np.linspace(1e-7, 1e-6, 8),
    }
    arrays["w"][0] = 1e-9
    weights = [numpy_helper.from_array(value.astype(np.float32), name) for name, value in arrays.items()]
    nodes = [N("Gemm", ["x", "w", "b"], ["h"]), N("Add", ["h", "c"], ["y"])]
    signature = [graphs.value_info("x", ["N", 8])], [graphs.value_info("y", ["N", 8])]
    assert nodes_outside_fp16(graphs.make_model(nodes, *signature, weights)) == set()


def test_trained_weights_before_a_norm_become_float16() -> None:
    nodes = [SCORES, N("ReduceL2", ["s"], ["n"], axes=[-1]), N("Div", ["s", "n"], ["y"])]
    assert nodes_outside_fp16(make_model(nodes)) == {"n", "y"}
