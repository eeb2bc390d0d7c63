"""Biases, layers, heads and projections that are lost or change places. See mutations.py."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import helper, numpy_helper

from tests.support.graphs.graph_edits import (
    ATTENTION_OPERATORS,
    MATRIX_OPERATORS,
    NotApplicable,
    find_constant,
    find_nodes,
    has_attention_operator,
    head_width,
    insert_after_node,
    mutation,
    replace_values,
    residual_additions,
    rewire,
    split_attention,
)


@mutation
def bias_of_zeros(model: Any) -> None:
    """The first bias of a product is zero."""
    names = {name for node in find_nodes(model, *MATRIX_OPERATORS, "Add") for name in node.input}
    tensor = next((t for t in model.graph.initializer if t.name in names and t.name.endswith("bias")), None)
    if tensor is None:
        raise NotApplicable("bias")
    replace_values(tensor, np.zeros_like)


@mutation
def norm_bias_of_zeros(model: Any) -> None:
    """The bias of the last norm is zero."""
    node = find_nodes(model, "LayerNormalization")[-1]
    replace_values(find_constant(model, node.input[2]), np.zeros_like)


@mutation
def drop_bias(model: Any) -> None:
    """A product is no longer followed by its bias."""
    constants = {t.name for t in model.graph.initializer}
    for node in model.graph.node:
        bias_inputs = {"DynamicQuantizeMatMul": 4, "MatMulIntegerToFloat": 6, "MatMulNBits": 5, "Gemm": 2}
        if (bias_index := bias_inputs.get(node.op_type)) is not None and len(node.input) > bias_index:
            del node.input[bias_index]
            return
        biases = [n for n in node.input if n in constants and n.endswith("bias")]
        if node.op_type == "Add" and biases:
            rewire(model, node.output[0], next(n for n in node.input if n not in biases), node)
            return
    raise NotApplicable("bias")


@mutation
def drop_sublayer(model: Any) -> None:
    """The first attention adds nothing."""
    _drop(model, 1)


@mutation
def drop_layer(model: Any) -> None:
    """The first layer adds nothing."""
    attentions = sum(1 for n in model.graph.node if n.op_type in (*ATTENTION_OPERATORS, "Softmax"))
    _drop(model, max(2, sum(1 for _ in residual_additions(model)) * 2 // max(attentions, 1)))


def _drop(model: Any, count: int) -> None:
    chosen = list(residual_additions(model))[:count]
    if len(chosen) < count:
        raise NotApplicable("residual")
    order = {name: order_index for order_index, n in enumerate(model.graph.node) for name in n.output}
    for node in chosen:
        before = min(node.input, key=lambda name: order.get(name, -1))
        rewire(model, node.output[0], before, node)


# heads, projections


@mutation
def swap_heads(model: Any) -> None:
    """The first two heads of the first attention change places."""
    if not has_attention_operator(model):
        scores, context = split_attention(model)
        producer = next(n for n in model.graph.node if scores.input[0] in n.output)
        shape = next(n for n in model.graph.node if producer.input[1] in n.output)
        heads = int(numpy_helper.to_array(shape.attribute[0].t)[2])
        insert_after_node(model, context, "Gather", np.array([1, 0, *range(2, heads)]), axis=1)
        return
    node = find_nodes(model, *ATTENTION_OPERATORS)[0]
    heads = next(a.i for a in node.attribute if a.name == "num_heads")
    width = head_width(model, node, heads)
    order = np.arange(heads * width).reshape(heads, width)
    order[[0, 1]] = order[[1, 0]]
    insert_after_node(model, node, "Gather", order.flatten(), axis=2)


@mutation
def swap_query_and_key(model: Any) -> None:
    """Queries are taken for keys."""
    _swap_inputs(model, 0, 1)


@mutation
def swap_key_and_value(model: Any) -> None:
    """Keys are taken for values."""
    _swap_inputs(model, 1, 2)


def _swap_inputs(model: Any, a: int, b: int) -> None:
    if not has_attention_operator(model):
        scores, context = split_attention(model)
        places = [(scores, 0), (scores, 1), (context, 1)]
        (node, i), (other, j) = places[a], places[b]
        node.input[i], other.input[j] = other.input[j], node.input[i]
        return
    for node in find_nodes(model, "MultiHeadAttention"):
        if node.input[a] and node.input[b] and "encoder" not in node.input[1]:
            node.input[a], node.input[b] = node.input[b], node.input[a]
            return
    raise NotApplicable("query, key and value")


@mutation
def swap_parts_of_the_packed_product(model: Any) -> None:
    """Of queries, keys and values in one tensor the first two change places (as many heads in each)."""
    node = find_nodes(model, "GroupQueryAttention")[0]
    heads = {a.name: a.i for a in node.attribute}
    if heads["num_heads"] != heads["kv_num_heads"]:
        raise NotApplicable("equal heads")
    producer = next(n for n in model.graph.node if node.input[0] in n.output)
    size = head_width(model, node, heads["num_heads"]) * heads["num_heads"]
    order = np.arange(3 * size).reshape(3, size)[[1, 0, 2]].flatten()
    insert_after_node(model, producer, "Gather", order, axis=2)


@mutation
def swap_layers_caches(model: Any) -> None:
    """Two layers' keys of cross-attention change places."""
    crossed = [n for n in find_nodes(model, "MultiHeadAttention") if ".encoder." in n.input[1]]
    if len(crossed) < 2:
        raise NotApplicable("cross-attention")
    crossed[0].input[1], crossed[1].input[1] = crossed[1].input[1], crossed[0].input[1]


@mutation
def swap_outputs(model: Any) -> None:
    """Keys and values for the first cross-attention leave under each other's names."""
    names = [o.name for o in model.graph.output if ".encoder." in o.name][:2]
    if not names:
        raise NotApplicable("cross-attention")
    other = dict(zip(names, reversed(names), strict=True))
    for node in model.graph.node:
        for index, name in enumerate(node.output):
            node.output[index] = other.get(name, name)


@mutation
def other_softness(model: Any) -> None:
    """The products of queries and keys are scaled by another factor."""
    is_fused = has_attention_operator(model)
    node = find_nodes(model, *ATTENTION_OPERATORS)[0] if is_fused else split_attention(model)[0]
    attribute = next(a for a in node.attribute if a.name == ("scale" if is_fused else "alpha"))
    attribute.f *= 1.05


@mutation
def other_gelu(model: Any) -> None:
    """GELU is approximated by tanh where it is exact, and the other way round."""
    for node in find_nodes(model, "Gelu"):
        kind = next((a for a in node.attribute if a.name == "approximate"), None)
        if kind is None:
            node.attribute.append(helper.make_attribute("approximate", "tanh"))
        else:
            kind.s = b"none" if kind.s == b"tanh" else b"tanh"
