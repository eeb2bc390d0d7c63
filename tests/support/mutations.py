"""Mistakes that an export could make, put into a finished graph: each must be found by the comparison.

A mutation takes an onnx.ModelProto, changes it in place, and raises `Nothing` where it has nothing to change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from onnx import helper, numpy_helper

PRODUCTS = ("DynamicQuantizeMatMul", "MatMulNBits", "MatMul", "Gemm")
ATTENTION = ("MultiHeadAttention", "GroupQueryAttention")


class Nothing(Exception):  # noqa: N818
    """The graph has nothing that this mutation could change."""


def nodes(model: Any, *kinds: str) -> list[Any]:
    """Return the nodes of these kinds, of which there must be one."""
    found = [node for node in model.graph.node if node.op_type in kinds]
    if not found:
        raise Nothing(", ".join(kinds))
    return found


def constant(model: Any, *words: str) -> Any:
    """Return the first constant whose name holds all `words`."""
    found = (t for t in model.graph.initializer if all(word in t.name for word in words))
    if (tensor := next(found, None)) is None:
        raise Nothing(" ".join(words))
    return tensor


def change(tensor: Any, how: Callable[[Any], Any]) -> None:
    """Replace the values of a constant by `how(values)`."""
    values = numpy_helper.to_array(tensor)
    tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(how(values.copy())), tensor.name))


def rewire(model: Any, old: str, new: str, after: Any = None) -> None:
    """Let every node (and output) that reads `old` read `new`; `after` keeps what it reads."""
    for node in model.graph.node:
        if node is not after:
            for place, name in enumerate(node.input):
                if name == old:
                    node.input[place] = new
    if any(output.name == old for output in model.graph.output):
        maker = next(n for n in model.graph.node if old in n.output)
        maker.output[list(maker.output).index(old)] = f"{old}.before"
        for node in model.graph.node:
            for place, name in enumerate(node.input):
                if name == old:
                    node.input[place] = f"{old}.before"
        model.graph.node.append(helper.make_node("Identity", [new], [old]))


def put_after(model: Any, node: Any, kind: str, *more: Any, out: int = 0, **attributes: Any) -> None:
    """Let `kind` (with constants `more` as further inputs) change what `node` gives, before all who read it."""
    put_behind(model, node.output[out], list(model.graph.node).index(node), kind, *more, **attributes)


def put_behind(model: Any, value: str, at: int, kind: str, *more: Any, **attributes: Any) -> None:
    """Let `kind` change the value `value` for all who read it; `at` is the place of who makes it, or -1."""
    names = []
    for number, array in enumerate(more):
        name = f"{value}.mutation.{number}"
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
        names.append(name)
    changed = f"{value}.mutated"
    if any(output.name == value for output in model.graph.output):
        model.graph.node[at].output[list(model.graph.node[at].output).index(value)] = changed
        model.graph.node.append(helper.make_node(kind, [changed, *names], [value], **attributes))
        return
    rewire(model, value, changed)
    new = helper.make_node(kind, [value, *names], [changed], name=f"mutation.{value}", **attributes)
    rest = [*list(model.graph.node)[: at + 1], new, *list(model.graph.node)[at + 1 :]]
    del model.graph.node[:]
    model.graph.node.extend(rest)


# masks

def drop_padding_mask(model: Any) -> None:
    """The first attention that has a mask, or a bias of padding, forgets it."""
    for node in nodes(model, *ATTENTION):
        place = 4 if node.op_type == "MultiHeadAttention" else 10
        if len(node.input) > place and node.input[place]:
            node.input[place] = ""
            return
    raise Nothing("mask")


def mask_of_ones(model: Any) -> None:
    """All attentions take padding for text: what is made of the mask no longer depends on it."""
    name = next(i.name for i in model.graph.input if i.name.endswith("attention_mask"))
    put_behind(model, name, -1, "Clip", np.array(1, np.int64))


def allow_the_future(model: Any) -> None:
    """Keys that lie ahead are no longer masked (graphs of standard operators)."""
    node = nodes(model, "Greater")[0]
    node.input[0] = node.input[1]


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

def bias_of_zeros(model: Any) -> None:
    """The first bias of a product is zero."""
    names = {name for node in nodes(model, *PRODUCTS, "Add") for name in node.input}
    tensor = next((t for t in model.graph.initializer if t.name in names and t.name.endswith("bias")), None)
    if tensor is None:
        raise Nothing("bias")
    change(tensor, np.zeros_like)


def norm_bias_of_zeros(model: Any) -> None:
    """The bias of the last norm is zero."""
    node = nodes(model, "LayerNormalization")[-1]
    change(constant(model, node.input[2]), np.zeros_like)


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


def residuals(model: Any) -> Iterator[Any]:
    """Yield the additions of a sublayer to what went into it."""
    constants = {t.name for t in model.graph.initializer}
    makers = {name: n for n in model.graph.node for name in n.output}
    kinds = [n for n in model.graph.node if n.op_type in PRODUCTS]
    products = {n.output[0] for n in kinds if n.input[1] in constants or n.op_type == "MatMulNBits"}
    for node in model.graph.node:
        if node.op_type == "Add" and not constants & set(node.input):
            made = [makers[n] for n in node.input if n in makers]
            biased = [n for m in made if m.op_type == "Add" for n in m.input]
            if products & {*node.input, *biased}:
                yield node


def drop_sublayer(model: Any) -> None:
    """The first attention adds nothing."""
    _drop(model, 1)


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

def swap_heads(model: Any) -> None:
    """The first two heads of the first attention change places."""
    node = nodes(model, *ATTENTION)[0]
    heads = next(a.i for a in node.attribute if a.name == "num_heads")
    width = _width(model, node, heads)
    order = np.arange(heads * width).reshape(heads, width)
    order[[0, 1]] = order[[1, 0]]
    put_after(model, node, "Gather", order.flatten(), axis=2)


def _width(model: Any, node: Any, heads: int) -> int:
    """Return d, from the product that follows the attention."""
    reader = next(n for n in model.graph.node if node.output[0] in n.input)
    sizes = {t.name: list(t.dims) for t in model.graph.initializer}
    if reader.op_type == "MatMulNBits":
        return int(next(a.i for a in reader.attribute if a.name == "K")) // heads
    return sizes[reader.input[1]][0] // heads


def swap_query_and_key(model: Any) -> None:
    """Queries are taken for keys."""
    _swap_inputs(model, 0, 1)


def swap_key_and_value(model: Any) -> None:
    """Keys are taken for values."""
    _swap_inputs(model, 1, 2)


def _swap_inputs(model: Any, a: int, b: int) -> None:
    for node in nodes(model, "MultiHeadAttention"):
        if node.input[a] and node.input[b] and "encoder" not in node.input[1]:
            node.input[a], node.input[b] = node.input[b], node.input[a]
            return
    raise Nothing("query, key and value")


def swap_parts_of_the_packed_product(model: Any) -> None:
    """Of queries, keys and values in one tensor the first two change places (as many heads in each)."""
    node = nodes(model, "GroupQueryAttention")[0]
    heads = {a.name: a.i for a in node.attribute}
    if heads["num_heads"] != heads["kv_num_heads"]:
        raise Nothing("equal heads")
    maker = next(n for n in model.graph.node if node.input[0] in n.output)
    size = _width(model, node, heads["num_heads"]) * heads["num_heads"]
    order = np.arange(3 * size).reshape(3, size)[[1, 0, 2]].flatten()
    put_after(model, maker, "Gather", order, axis=2)


def swap_layers_caches(model: Any) -> None:
    """Two layers' keys of cross-attention change places."""
    crossed = [n for n in nodes(model, "MultiHeadAttention") if ".encoder." in n.input[1]]
    if len(crossed) < 2:
        raise Nothing("cross-attention")
    crossed[0].input[1], crossed[1].input[1] = crossed[1].input[1], crossed[0].input[1]


def swap_outputs(model: Any) -> None:
    """Keys and values for the first cross-attention leave under each other's names."""
    names = [o.name for o in model.graph.output if ".encoder." in o.name][:2]
    if not names:
        raise Nothing("cross-attention")
    other = dict(zip(names, reversed(names), strict=True))
    for node in model.graph.node:
        for place, name in enumerate(node.output):
            node.output[place] = other.get(name, name)


def other_softness(model: Any) -> None:
    """The products of queries and keys are scaled by another factor."""
    attribute = next(a for a in nodes(model, *ATTENTION)[0].attribute if a.name == "scale")
    attribute.f *= 1.05


# codes, scales, zero points

def change_one_scale(model: Any) -> None:
    """One scale of one quantized matrix is 1 % larger."""
    change(_scales(model), lambda v: _with_first(v, v.flat[0] * v.dtype.type(1.01)))


def swap_two_scales(model: Any) -> None:
    """Two scales of one quantized matrix change places."""

    def swapped(values: Any) -> Any:
        flat = values.reshape(-1)
        flat[[0, -1]] = flat[[-1, 0]]
        return values

    change(_scales(model), swapped)


def take_another_layers_scales(model: Any) -> None:
    """A product reads the scales of another layer of its size."""
    from smelt.export.parity.operators import QUANTIZED

    products = nodes(model, *QUANTIZED)
    for first in products:
        for second in products:
            if first.input[2] != second.input[2] and _sizes(model, first) == _sizes(model, second):
                first.input[2] = second.input[2]
                return
    raise Nothing("scales")


def _sizes(model: Any, node: Any) -> Any:
    dims = {t.name: list(t.dims) for t in model.graph.initializer}
    makers = {name: n for n in model.graph.node for name in n.output}
    name = node.input[2]
    while name in makers:
        name = makers[name].input[0]
    return dims[name]


def _scales(model: Any) -> Any:
    return constant(model, ".matrix.", "scales")


def change_one_scale_of_the_lookup(model: Any) -> None:
    """The scale of one row of the embedding, of a word that no text holds, is twice as large."""
    words = ".matrix.lookup" if any(".matrix.lookup" in t.name for t in model.graph.initializer) else None
    if words is None:
        raise Nothing("lookup")

    def doubled(values: Any) -> Any:
        values[3] *= 2
        return values

    change(constant(model, words), doubled)


def change_one_code(model: Any) -> None:
    """One code is another."""
    tensor = next((t for t in model.graph.initializer if t.name.endswith((".codes", ".columns"))), None)
    if tensor is None:
        raise Nothing("codes")
    change(tensor, lambda v: _with_first(v, v.flat[0] ^ v.dtype.type(1)))


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
            change(constant(model, node.input[3]), lambda v: _with_first(v, v.flat[0] ^ v.dtype.type(1)))
            return
    raise Nothing("zero point")


def drop_zero_points(model: Any) -> None:
    """An asymmetric matrix is taken for a symmetric one."""
    for node in nodes(model, "MatMulNBits"):
        if len(node.input) > 3 and node.input[3]:
            node.input[3] = ""
            return
    raise Nothing("zero points")


def _with_first(values: Any, first: Any) -> Any:
    values.flat[0] = first
    return values


# positions, embeddings

_TABLES = ("embed_positions", "position_embeddings", "wpe")


def position_off_by_one(model: Any) -> None:
    """The table of positions is read one place too far."""
    for node in nodes(model, "Gather"):
        if any(word in node.input[0] for word in _TABLES):
            _add(model, node, 1)
            return
    raise Nothing("positions")


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


def shifted_table(model: Any) -> None:
    """The table of positions (of biases, of angles) begins one row later."""
    names = (*_TABLES, "bias_by_distance", "tables.cos")
    tensor = next((t for t in model.graph.initializer if any(w in t.name for w in names)), None)
    if tensor is None:
        raise Nothing("table")
    axis = 1 if "bias_by_distance" in tensor.name else 0
    change(tensor, lambda v: np.roll(v, 1, axis=axis))


def count_padding(model: Any) -> None:
    """A language model with a table of positions counts them from the first place, padding included."""
    if not any("wpe" in name for node in nodes(model, "Gather") for name in node.input):
        raise Nothing("a table of positions")
    put_behind(model, _position_ids(model), -1, "Add", np.array(1, np.int64))


def forget_positions(model: Any) -> None:
    """All tokens of a language model are at place 0."""
    put_behind(model, _position_ids(model), -1, "Mul", np.array(0, np.int64))


def _position_ids(model: Any) -> str:
    """Return the name of the positions, if the graph uses them: fused rotary attention counts on its own."""
    rotates = [a.i for n in model.graph.node for a in n.attribute if a.name == "do_rotary"]
    if any(rotates) or not any(i.name == "position_ids" for i in model.graph.input):
        raise Nothing("position_ids")
    return "position_ids"


def forget_embed_scale(model: Any) -> None:
    """Embeddings are not multiplied by their factor."""
    from smelt.export.parity.operators import makers_of

    scalars = {t.name for t in model.graph.initializer if not t.dims and t.data_type == 1}
    for node in nodes(model, "Mul"):
        factors = [n for n in node.input if n in scalars]
        rest = [n for n in node.input if n not in scalars]
        if factors and rest:
            before, sources = makers_of(model, rest)
            if "input_ids" in sources and any(n.op_type == "Gather" for n in before):
                if not any(n.op_type in PRODUCTS for n in before) and _follows_scaled(node, before):
                    rewire(model, node.output[0], rest[0], node)
                    return
    raise Nothing("embed_scale")


def _follows_scaled(node: Any, before: list[Any]) -> bool:
    """Say whether all of the lookup lies before the factor: 4-bit codes are taken apart by factors too."""
    return any(n.op_type == "Gather" for n in before) and before[-1].op_type in ("Gather", "Mul", "Reshape")


def forget_token_types(model: Any) -> None:
    """All tokens have type 0."""
    if not any(i.name == "token_type_ids" for i in model.graph.input):
        raise Nothing("token_type_ids")
    put_behind(model, "token_type_ids", -1, "Mul", np.array(0, np.int64))


ALL: dict[str, Callable[[Any], None]] = {
    name: value
    for name, value in list(globals().items())
    if callable(value)
    and getattr(value, "__module__", "") == __name__
    and value.__doc__
    and not name.startswith("_")
    and name not in ("Nothing", "nodes", "constant", "change", "rewire", "put_after", "put_behind", "residuals")
}
