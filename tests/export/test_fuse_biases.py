"""Products with a bias in a step become Gemm and say the same; what is not of one token stays."""

from collections import Counter

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from smelt.export.fuse_biases import fuse_biases
from tests.support.graphs import graph_exports


def graph(nodes, shape=("r", 1, 4), outputs=("y",)):
    """Return a model whose input x has a shape, with the constants W, V, U, b, c and d."""
    random = np.random.default_rng(0)
    sizes = {"W": (4, 6), "V": (6, 4), "b": (6,), "c": (4,), "U": (4, 1), "d": (1,)}
    constants = [
        numpy_helper.from_array(random.normal(size=size).astype(np.float32), name)
        for name, size in sizes.items()
    ]
    inner_graph = helper.make_graph(
        [helper.make_node(kind, input_names, out, f"node_{out[0]}") for kind, input_names, out in nodes],
        "step",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        constants,
    )
    model = helper.make_model(inner_graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return onnx.shape_inference.infer_shapes(model)


def run_model(model, shape):
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return session.run(None, {"x": np.random.default_rng(1).normal(size=shape).astype(np.float32)})


FFN = [
    ("MatMul", ["x", "W"], ["h"]), ("Add", ["h", "b"], ["i"]), ("Relu", ["i"], ["j"]),
    ("MatMul", ["j", "V"], ["k"]), ("Add", ["c", "k"], ["l"]), ("Add", ["x", "l"], ["y"]),
]  # fmt: skip


@pytest.mark.parametrize(("nodes", "outputs", "left"), [
    (FFN, ("y",), {"Reshape": 2, "Gemm": 2, "Relu": 1, "Add": 1}),
    # what lies between is asked for itself: it gets its dimension back
    (FFN, ("y", "j"), {"Reshape": 3, "Gemm": 2, "Relu": 1, "Add": 1}),
    # two products of the same rows flatten them once
    ([*FFN[:2], ("MatMul", ["x", "W"], ["m"]), ("Add", ["m", "b"], ["n"]), ("Add", ["i", "n"], ["y"])],
     ("y",), {"Reshape": 2, "Gemm": 2, "Add": 1}),
    # rows stay flat through residual sums and norms
    ([("MatMul", ["x", "W"], ["h"]), ("Add", ["h", "b"], ["i"]),
      ("MatMul", ["i", "V"], ["k"]), ("Add", ["c", "k"], ["l"]), ("Add", ["l", "x"], ["m"]),
      ("LayerNormalization", ["m", "c", "c"], ["n"]), ("MatMul", ["n", "W"], ["o"]),
      ("Add", ["o", "b"], ["y"])],
     ("y",), {"Reshape": 2, "Gemm": 3, "Add": 1, "LayerNormalization": 1}),
    # a column is broadcast
    ([*FFN[:2], ("MatMul", ["x", "U"], ["m"]), ("Add", ["m", "d"], ["n"]), ("Add", ["n", "i"], ["y"])],
     ("y",), {"Reshape": 3, "Gemm": 2, "Add": 1}),
    (FFN[:2], ("i",), {"Reshape": 2, "Gemm": 1}),
], ids=["ffn", "asked", "twice", "residual", "column", "output"])  # fmt: skip
def test_matmul_with_bias_becomes_gemm_with_equal_outputs(nodes, outputs, left):
    model = graph(nodes, outputs=outputs)
    outputs_before = run_model(model, (3, 1, 4))
    assert fuse_biases(model) == left["Gemm"]
    onnx.checker.check_model(model, full_check=True)
    assert Counter(node.op_type for node in model.graph.node) == left
    for expected, actual in zip(outputs_before, run_model(model, (3, 1, 4)), strict=True):
        assert actual.shape == expected.shape
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("nodes", "shape", "outputs"),
    [
        (FFN[:2], ("r", "length", 4), ("i",)),
        (FFN[:2], ("r", 2, 4), ("i",)),
        (FFN[:2], ("r", 4), ("i",)),
        (FFN[:2], ("r", 1, 3, 4), ("i",)),
        (FFN[:2], ("r", 1, 4), ("i", "h")),
        ([*FFN[:2], ("Relu", ["h"], ["y"])], ("r", 1, 4), ("i", "y")),
        ([FFN[0], ("Add", ["h", "h"], ["y"])], ("r", 1, 4), ("y",)),
    ],
    ids=[
        "many tokens",
        "two tokens",
        "no tokens",
        "four dimensions",
        "product is an output",
        "read twice",
        "no bias",
    ],
)
def test_unsupported_patterns_are_unchanged(nodes, shape, outputs):
    model = graph(nodes, shape, outputs)
    model_bytes = model.SerializeToString()
    assert fuse_biases(model) == 0
    assert model.SerializeToString() == model_bytes


def test_broadcasting_bias_is_not_fused():
    node_specs = [("MatMul", ["x", "n"], ["h"]), ("Add", ["h", "b"], ["y"])]
    model = graph(node_specs)
    model.graph.initializer.append(numpy_helper.from_array(np.ones((4, 1), np.float32), "n"))
    model = onnx.shape_inference.infer_shapes(model)
    assert fuse_biases(model) == 0
    assert run_model(model, (3, 1, 4))[0].shape == (3, 1, 6)


@pytest.mark.parametrize(("read", "joined"), [("i", 1), ("h", 0)], ids=["the sum", "the product"])
def test_values_used_in_subgraphs_are_kept(read, joined):
    model = graph([*FFN[:2], ("Relu", ["i"], ["z"])], outputs=("z", "y"))
    branches = {
        key: helper.make_graph(
            [helper.make_node(kind, [read], [key])],
            key,
            [],
            [helper.make_tensor_value_info(key, TensorProto.FLOAT, None)],
        )
        for key, kind in (("then_branch", "Neg"), ("else_branch", "Abs"))
    }
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
    model.graph.node.append(helper.make_node("If", ["yes"], ["y"], "if", **branches))
    outputs_before = run_model(model, (3, 1, 4))
    assert fuse_biases(model) == joined
    for expected, actual in zip(outputs_before, run_model(model, (3, 1, 4)), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)


def test_translator_step_has_all_biases_fused():
    exported = graph_exports.exported_graphs("marian", "fp32")
    step = onnx.load(exported.folder / "decoder_with_past_model.onnx", load_external_data=False)
    op_counts = Counter(node.op_type for node in step.graph.node)
    assert op_counts["MatMul"] == 0
    assert op_counts["Gemm"] >= 7
