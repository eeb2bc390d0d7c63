"""Mistakes that an export could make, put into a finished graph: each must be found by the comparison.

A mutation takes an onnx.ModelProto, changes it in place, and raises `Nothing` where it has nothing to change.
`ALL` holds them by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from graph_edits import (
    ATTENTION,
    PRODUCTS,
    Nothing,
    change,
    constant,
    head_width,
    nodes,
    put_after,
    put_behind,
    residuals,
    rewire,
    scale_sizes,
    with_first,
)
from onnx import helper, numpy_helper

ALL: dict[str, Callable[[Any], None]] = {}


def mutation(change: Callable[[Any], None]) -> Callable[[Any], None]:
    """Keep a mutation under its name."""
    ALL[change.__name__] = change
    return change


# masks


@mutation
def drop_padding_mask(model: Any) -> None:
    """The first attention that has a mask, or a bias of padding, forgets it."""
    for node in nodes(model, *ATTENTION):
        place = 4 if node.op_type == "MultiHeadAttention" else 10
        if len(node.input) > place and node.input[place]:
            node.input[place] = ""
            return
    raise Nothing("mask")


@mutation
def mask_of_ones(model: Any) -> None:
    """All attentions take padding for text: what is made of the mask no longer depends on it."""
    name = next(i.name for i in model.graph.input if i.name.endswith("attention_mask"))
    put_behind(model, name, -1, "Clip", np.array(1, np.int64))


@mutation
def allow_the_future(model: Any) -> None:
    """Keys that lie ahead are no longer masked (graphs of standard operators)."""
    node = nodes(model, "Greater")[0]
    node.input[0] = node.input[1]


@mutation
def shift_the_mask(model: Any) -> None:
    """The mask is read one place too far."""
    name = next(i.name for i in model.graph.input if i.name.endswith("attention_mask"))
    model.graph.initializer.append(numpy_helper.from_array(np.array([0, 1, 0, 0]), "pads"))
    model.graph.initializer.append(numpy_helper.from_array(np.array([1]), "one"))
    model.graph.initializer.append(numpy_helper.from_array(np.array([2**31]), "end"))
    rewire(model, name, "mask.shifted")
    made = [
        helper.make_node("Slice", [name, "one", "end", "one"], ["mask.cut"]),
        helper.make_node("Pad", ["mask.cut", "pads.four"], ["mask.shifted"]),
    ]
    model.graph.initializer.append(numpy_helper.from_array(np.array([0, 0, 0, 1]), "pads.four"))
    rest = [*made, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(rest)


# biases, layers


@mutation
def bias_of_zeros(model: Any) -> None:
    """The first bias of a product is zero."""
    names = {name for node in nodes(model, *PRODUCTS, "Add") for name in node.input}
    tensor = next((t for t in model.graph.initializer if t.name in names and t.name.endswith("bias")), None)
    if tensor is None:
        raise Nothing("bias")
    change(tensor, np.zeros_like)


@mutation
def norm_bias_of_zeros(model: Any) -> None:
    """The bias of the last norm is zero."""
    node = nodes(model, "LayerNormalization")[-1]
    change(constant(model, node.input[2]), np.zeros_like)


@mutation
def drop_bias(model: Any) -> None:
    """A product is no longer followed by its bias."""
    constants = {t.name for t in model.graph.initializer}
    for node in model.graph.node:
        places = {"DynamicQuantizeMatMul": 4, "MatMulNBits": 5}
        if (place := places.get(node.op_type)) is not None and len(node.input) > place:
            del node.input[place]
            return
        biases = [n for n in node.input if n in constants and n.endswith("bias")]
        if node.op_type == "Add" and biases:
            rewire(model, node.output[0], next(n for n in node.input if n not in biases), node)
            return
    raise Nothing("bias")


@mutation
def drop_sublayer(model: Any) -> None:
    """The first attention adds nothing."""
    _drop(model, 1)


@mutation
def drop_layer(model: Any) -> None:
    """The first layer adds nothing."""
    attentions = sum(1 for n in model.graph.node if n.op_type in (*ATTENTION, "Softmax"))
    _drop(model, max(2, sum(1 for _ in residuals(model)) * 2 // max(attentions, 1)))


def _drop(model: Any, count: int) -> None:
    chosen = list(residuals(model))[:count]
    if len(chosen) < count:
        raise Nothing("residual")
    order = {name: at for at, n in enumerate(model.graph.node) for name in n.output}
    for node in chosen:
        before = min(node.input, key=lambda name: order.get(name, -1))
        rewire(model, node.output[0], before, node)


# heads, projections


@mutation
def swap_heads(model: Any) -> None:
    """The first two heads of the first attention change places."""
    node = nodes(model, *ATTENTION)[0]
    heads = next(a.i for a in node.attribute if a.name == "num_heads")
    width = head_width(model, node, heads)
    order = np.arange(heads * width).reshape(heads, width)
    order[[0, 1]] = order[[1, 0]]
    put_after(model, node, "Gather", order.flatten(), axis=2)


@mutation
def swap_query_and_key(model: Any) -> None:
    """Queries are taken for keys."""
    _swap_inputs(model, 0, 1)


@mutation
def swap_key_and_value(model: Any) -> None:
    """Keys are taken for values."""
    _swap_inputs(model, 1, 2)


def _swap_inputs(model: Any, a: int, b: int) -> None:
    for node in nodes(model, "MultiHeadAttention"):
        if node.input[a] and node.input[b] and "encoder" not in node.input[1]:
            node.input[a], node.input[b] = node.input[b], node.input[a]
            return
    raise Nothing("query, key and value")


@mutation
def swap_parts_of_the_packed_product(model: Any) -> None:
    """Of queries, keys and values in one tensor the first two change places (as many heads in each)."""
    node = nodes(model, "GroupQueryAttention")[0]
    heads = {a.name: a.i for a in node.attribute}
    if heads["num_heads"] != heads["kv_num_heads"]:
        raise Nothing("equal heads")
    maker = next(n for n in model.graph.node if node.input[0] in n.output)
    size = head_width(model, node, heads["num_heads"]) * heads["num_heads"]
    order = np.arange(3 * size).reshape(3, size)[[1, 0, 2]].flatten()
    put_after(model, maker, "Gather", order, axis=2)


@mutation
def swap_layers_caches(model: Any) -> None:
    """Two layers' keys of cross-attention change places."""
    crossed = [n for n in nodes(model, "MultiHeadAttention") if ".encoder." in n.input[1]]
    if len(crossed) < 2:
        raise Nothing("cross-attention")
    crossed[0].input[1], crossed[1].input[1] = crossed[1].input[1], crossed[0].input[1]


@mutation
def swap_outputs(model: Any) -> None:
    """Keys and values for the first cross-attention leave under each other's names."""
    names = [o.name for o in model.graph.output if ".encoder." in o.name][:2]
    if not names:
        raise Nothing("cross-attention")
    other = dict(zip(names, reversed(names), strict=True))
    for node in model.graph.node:
        for place, name in enumerate(node.output):
            node.output[place] = other.get(name, name)


@mutation
def other_softness(model: Any) -> None:
    """The products of queries and keys are scaled by another factor."""
    attribute = next(a for a in nodes(model, *ATTENTION)[0].attribute if a.name == "scale")
    attribute.f *= 1.05


@mutation
def other_gelu(model: Any) -> None:
    """GELU is approximated by tanh where it is exact, and the other way round."""
    for node in nodes(model, "Gelu"):
        kind = next((a for a in node.attribute if a.name == "approximate"), None)
        if kind is None:
            node.attribute.append(helper.make_attribute("approximate", "tanh"))
        else:
            kind.s = b"none" if kind.s == b"tanh" else b"tanh"


# codes, scales, zero points


@mutation
def change_one_scale(model: Any) -> None:
    """One scale of one quantized matrix is 1 % larger."""
    change(_scales(model), lambda v: with_first(v, v.flat[0] * v.dtype.type(1.01)))


@mutation
def swap_two_scales(model: Any) -> None:
    """Two scales of one quantized matrix change places."""

    def swapped(values: Any) -> Any:
        flat = values.reshape(-1)
        flat[[0, -1]] = flat[[-1, 0]]
        return values

    change(_scales(model), swapped)


@mutation
def take_another_layers_scales(model: Any) -> None:
    """A product reads the scales of another layer of its size."""
    from smelt.export.parity.operators import QUANTIZED

    products = nodes(model, *QUANTIZED)
    for first in products:
        for second in products:
            if first.input[2] != second.input[2] and scale_sizes(model, first) == scale_sizes(model, second):
                first.input[2] = second.input[2]
                return
    raise Nothing("scales")


def _scales(model: Any) -> Any:
    return constant(model, ".matrix.", "scales")


@mutation
def change_one_scale_of_the_lookup(model: Any) -> None:
    """The scale of one row of the embedding, of a word that no text holds, is twice as large."""
    words = ".matrix.lookup" if any(".matrix.lookup" in t.name for t in model.graph.initializer) else None
    if words is None:
        raise Nothing("lookup")

    def doubled(values: Any) -> Any:
        values[3] *= 2
        return values

    change(constant(model, words), doubled)


@mutation
def change_one_code(model: Any) -> None:
    """One code is another."""
    tensor = next((t for t in model.graph.initializer if t.name.endswith((".codes", ".columns"))), None)
    if tensor is None:
        raise Nothing("codes")
    change(tensor, lambda v: with_first(v, v.flat[0] ^ v.dtype.type(1)))


@mutation
def other_zero_point(model: Any) -> None:
    """One zero point is one higher; int8 codes, whose zero is 0, get one of 1."""
    for node in nodes(model, "DynamicQuantizeMatMul", "MatMulNBits"):
        if node.op_type == "DynamicQuantizeMatMul":
            model.graph.initializer.append(numpy_helper.from_array(np.array(1, np.int8), "zero.mutation"))
            inputs = [*node.input[:3], "zero.mutation", *node.input[4:]]
            del node.input[:]
            node.input.extend(inputs)
            return
        if len(node.input) > 3 and node.input[3]:
            change(constant(model, node.input[3]), lambda v: with_first(v, v.flat[0] ^ v.dtype.type(1)))
            return
    raise Nothing("zero point")


@mutation
def drop_zero_points(model: Any) -> None:
    """An asymmetric matrix is taken for a symmetric one."""
    for node in nodes(model, "MatMulNBits"):
        if len(node.input) > 3 and node.input[3]:
            node.input[3] = ""
            return
    raise Nothing("zero points")


# positions, embeddings

_TABLES = ("embed_positions", "position_embeddings", "wpe")


@mutation
def position_off_by_one(model: Any) -> None:
    """The table of positions is read one place too far."""
    for node in nodes(model, "Gather"):
        if any(word in node.input[0] for word in _TABLES):
            _add(model, node, 1)
            return
    raise Nothing("positions")


@mutation
def relative_position_off_by_one(model: Any) -> None:
    """T5's table of biases by distance is read one place too early."""
    for node in nodes(model, "Gather"):
        if "bias_by_distance" in node.input[0]:
            _add(model, node, -1)
            return
    raise Nothing("distances")


def _add(model: Any, node: Any, number: int) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.array(number, np.int64), "one.mutation"))
    at = list(model.graph.node).index(node)
    new = helper.make_node("Add", [node.input[1], "one.mutation"], ["places.mutation"])
    node.input[1] = "places.mutation"
    rest = [*list(model.graph.node)[:at], new, *list(model.graph.node)[at:]]
    del model.graph.node[:]
    model.graph.node.extend(rest)


@mutation
def shifted_table(model: Any) -> None:
    """The table of positions (of biases, of angles) begins one row later."""
    names = (*_TABLES, "bias_by_distance", "tables.cos")
    tensor = next((t for t in model.graph.initializer if any(w in t.name for w in names)), None)
    if tensor is None:
        raise Nothing("table")
    axis = 1 if "bias_by_distance" in tensor.name else 0
    change(tensor, lambda v: np.roll(v, 1, axis=axis))


@mutation
def shorter_table(model: Any) -> None:
    """The table of positions (of angles) lacks its last row, which no text that is compared reaches."""
    names = (*_TABLES, "bias_by_distance", "tables.cos", "tables.sin")
    tensors = [t for t in model.graph.initializer if any(w in t.name for w in names)]
    if not tensors:
        raise Nothing("table")
    for tensor in tensors:
        change(tensor, _without_last_column if "bias_by_distance" in tensor.name else _without_last_row)


def _without_last_row(values: Any) -> Any:
    return values[:-1]


def _without_last_column(values: Any) -> Any:
    return values[:, :-1]


@mutation
def count_padding(model: Any) -> None:
    """A language model with a table of positions counts them from the first place, padding included."""
    if not any("wpe" in name for node in nodes(model, "Gather") for name in node.input):
        raise Nothing("a table of positions")
    put_behind(model, _position_ids(model), -1, "Add", np.array(1, np.int64))


@mutation
def forget_positions(model: Any) -> None:
    """All tokens of a language model are at place 0."""
    put_behind(model, _position_ids(model), -1, "Mul", np.array(0, np.int64))


def _position_ids(model: Any) -> str:
    """Return the name of the positions, if the graph uses them: fused rotary attention counts on its own."""
    rotates = [a.i for n in model.graph.node for a in n.attribute if a.name == "do_rotary"]
    if any(rotates) or not any(i.name == "position_ids" for i in model.graph.input):
        raise Nothing("position_ids")
    return "position_ids"


@mutation
def forget_embed_scale(model: Any) -> None:
    """Embeddings are not multiplied by their factor."""
    from smelt.export.parity.operators import makers_of

    scalars = {t.name for t in model.graph.initializer if not t.dims and t.data_type == 1}
    for node in nodes(model, "Mul"):
        factors = [n for n in node.input if n in scalars]
        rest = [n for n in node.input if n not in scalars]
        if factors and rest:
            before, sources = makers_of(model, rest)
            kinds = [n.op_type for n in before]
            # 4-bit codes are taken apart by factors too: all of the lookup must lie before this one
            whole = kinds[-1:] in (["Gather"], ["Mul"], ["Reshape"]) and "Gather" in kinds
            if "input_ids" in sources and whole and not set(kinds) & set(PRODUCTS):
                rewire(model, node.output[0], rest[0], node)
                return
    raise Nothing("embed_scale")


@mutation
def forget_token_types(model: Any) -> None:
    """All tokens have type 0."""
    if not any(i.name == "token_type_ids" for i in model.graph.input):
        raise Nothing("token_type_ids")
    put_behind(model, "token_type_ids", -1, "Mul", np.array(0, np.int64))
