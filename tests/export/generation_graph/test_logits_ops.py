"""The largest logit of each row, and what is added to logits, against numpy."""

import numpy as np
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from smelt.export.generation_graph.graph_builder import (
    GraphBuilder,
    add_to_logits,
    argmax,
    blocked_argmax,
    use_blocks,
    value_info,
)


def ran(b, output, dtype, feeds):
    """Run the graph; return its value `output` and the operators that it holds, those of branches too."""
    inputs = [value_info(name, array.dtype, [None] * array.ndim) for name, array in feeds.items()]
    graph = b.graph("logits", inputs, [value_info(output, dtype, [None, None])])
    versions = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=versions, ir_version=9).SerializeToString()
    return onnxruntime.InferenceSession(model).run(None, feeds)[0]


@pytest.mark.parametrize("vocabulary", [7919, 8000, 58_101])  # the first is a prime: it has no blocks
@pytest.mark.parametrize("rows", [1, 20])
def test_argmax_returns_first_maximum(rows, vocabulary):
    scores = np.random.default_rng(0).normal(size=(rows, vocabulary)).astype(np.float32)
    scores[0] = 0.0
    scores[-1, [5, 200, vocabulary - 1]] = 9.0
    for argmax_op in (argmax, lambda b, name: blocked_argmax(b, name, vocabulary)):
        b = GraphBuilder()
        indices = ran(b, argmax_op(b, "scores"), np.int64, {"scores": scores})
        np.testing.assert_array_equal(indices, scores.argmax(axis=1, keepdims=True))


@pytest.mark.parametrize(
    ("rows", "vocabulary", "blocks"),
    [(6, 8000, False), (7, 8000, True), (1, 58_101, True), (20, 7919, False)],
)
def test_blocked_argmax_is_used_for_many_logits(rows, vocabulary, blocks):
    b = GraphBuilder()
    is_blocked = use_blocks(b, b.row_count("scores"), vocabulary)
    b.nodes.append(helper.make_node("Reshape", [is_blocked, b.const([1, 1])], ["one"]))
    b.nodes.append(helper.make_node("Cast", ["one"], ["many"], to=7))
    assert bool(ran(b, "many", np.int64, {"scores": np.zeros((rows, 8), np.float32)})[0, 0]) == blocks


def head(b, biased, squeezed):
    """Append an int8 product of x and return its logits [R, V]."""
    codes = np.random.default_rng(0).integers(-127, 128, (8, 5)).astype(np.int8)
    constants = {
        "codes": codes,
        "scales": np.full(5, 0.1, np.float32),
        "bias": np.arange(5, dtype=np.float32),
    }
    b.initializers += [numpy_helper.from_array(array, name) for name, array in constants.items()]
    inputs = ["x", "codes", "scales", *(["", "bias"] if biased else [])]
    b.nodes.append(helper.make_node("DynamicQuantizeMatMul", inputs, ["y"], domain="com.microsoft"))
    return b.op("Squeeze", "y", b.const([1])) if squeezed else "y"


@pytest.mark.parametrize("squeezed", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_rule_biases_are_added_to_head_bias(biased, squeezed):
    x = np.random.default_rng(1).normal(size=(3, 1, 8) if squeezed else (3, 8)).astype(np.float32)
    row = np.array([0, -np.inf, 0, 0, -np.inf], np.float32)
    plain_builder = GraphBuilder()
    plain_logits = ran(plain_builder, head(plain_builder, biased, squeezed), np.float32, {"x": x})
    b = GraphBuilder()
    biased_logits = add_to_logits(b, head(b, biased, squeezed), "row")
    # of the logits there are more numbers than of the bias
    assert [node.op_type for node in b.nodes].count("Add") == biased
    np.testing.assert_allclose(
        ran(b, biased_logits, np.float32, {"x": x, "row": row}), plain_logits + row, rtol=1e-6
    )


def test_logits_of_other_operators_get_add_node():
    b = GraphBuilder()
    biased_logits = add_to_logits(b, b.op("Relu", "x"), "row")
    x, row = np.array([[-1.0, 2.0]], np.float32), np.array([0.0, -np.inf], np.float32)
    np.testing.assert_array_equal(ran(b, biased_logits, np.float32, {"x": x, "row": row}), [[0.0, -np.inf]])
