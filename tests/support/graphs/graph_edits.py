"""Changing finished graphs by hand: what the mutations of mutations.py are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from onnx import helper, numpy_helper

MATRIX_OPERATORS = ("DynamicQuantizeMatMul", "MatMulIntegerToFloat", "MatMulNBits", "MatMul", "Gemm")
ATTENTION_OPERATORS = ("MultiHeadAttention", "GroupQueryAttention")


class NotApplicable(Exception):  # noqa: N818
    """The graph has nothing that this mutation could change."""


MUTATIONS: dict[str, Callable[[Any], None]] = {}


def mutation(change: Callable[[Any], None]) -> Callable[[Any], None]:
    """Keep a mutation under its name."""
    MUTATIONS[change.__name__] = change
    return change


def find_nodes(model: Any, *kinds: str) -> list[Any]:
    """Return the nodes of these kinds, of which there must be one."""
    nodes = [node for node in model.graph.node if node.op_type in kinds]
    if not nodes:
        raise NotApplicable(", ".join(kinds))
    return nodes


def split_attention(model: Any) -> tuple[Any, Any]:
    """Return the products query x key and weights x value of the first attention of matrix products."""
    scores, context = find_nodes(model, "FusedMatMul")[:2]
    return scores, context


def has_attention_operator(model: Any) -> bool:
    """Return whether attention is one operator, not matrix products."""
    return any(node.op_type in ATTENTION_OPERATORS for node in model.graph.node)


def find_constant(model: Any, *words: str) -> Any:
    """Return the first constant whose name holds all `words`."""
    tensors = (t for t in model.graph.initializer if all(fragment in t.name for fragment in words))
    if (tensor := next(tensors, None)) is None:
        raise NotApplicable(" ".join(words))
    return tensor


def replace_values(tensor: Any, how: Callable[[Any], Any]) -> None:
    """Replace the values of a constant by `how(values)`."""
    values = numpy_helper.to_array(tensor)
    tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(how(values.copy())), tensor.name))


def rewire(model: Any, old: str, new: str, after: Any = None) -> None:
    """Let every node (and output) that reads `old` read `new`; `after` keeps what it reads."""
    for node in model.graph.node:
        if node is not after:
            for index, name in enumerate(node.input):
                if name == old:
                    node.input[index] = new
    if any(output.name == old for output in model.graph.output):
        producer = next(n for n in model.graph.node if old in n.output)
        producer.output[list(producer.output).index(old)] = f"{old}.before"
        for node in model.graph.node:
            for index, name in enumerate(node.input):
                if name == old:
                    node.input[index] = f"{old}.before"
        model.graph.node.append(helper.make_node("Identity", [new], [old]))


def insert_after_node(model: Any, node: Any, kind: str, *more: Any, out: int = 0, **attributes: Any) -> None:
    """Let `kind`, with constants `more` as further inputs, change what `node` gives to all who read it."""
    insert_after_value(model, node.output[out], list(model.graph.node).index(node), kind, *more, **attributes)


def insert_after_value(
    model: Any, value: str, node_index: int, kind: str, *more: Any, **attributes: Any
) -> None:
    """Insert a node of `kind` after `value`; `node_index`: index of the node that computes it, or -1."""
    names = []
    for number, array in enumerate(more):
        name = f"{value}.mutation.{number}"
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
        names.append(name)
    changed = f"{value}.mutated"
    if any(output.name == value for output in model.graph.output):
        model.graph.node[node_index].output[list(model.graph.node[node_index].output).index(value)] = changed
        model.graph.node.append(helper.make_node(kind, [changed, *names], [value], **attributes))
        return
    rewire(model, value, changed)
    new = helper.make_node(kind, [value, *names], [changed], name=f"mutation.{value}", **attributes)
    rest = [*list(model.graph.node)[: node_index + 1], new, *list(model.graph.node)[node_index + 1 :]]
    del model.graph.node[:]
    model.graph.node.extend(rest)


def residual_additions(model: Any) -> Iterator[Any]:
    """Yield the additions of a sublayer to what went into it."""
    constants = {t.name for t in model.graph.initializer}
    producers = {name: n for n in model.graph.node for name in n.output}
    kinds = [n for n in model.graph.node if n.op_type in MATRIX_OPERATORS]
    products = {n.output[0] for n in kinds if n.input[1] in constants or n.op_type == "MatMulNBits"}
    for node in model.graph.node:
        if node.op_type == "Add" and not constants & set(node.input):
            inputs = [producers[n] for n in node.input if n in producers]
            biased = [n for m in inputs if m.op_type in ("Add", "Reshape") for n in m.input]
            if products & {*node.input, *biased}:
                yield node


def head_width(model: Any, node: Any, heads: int) -> int:
    """Return d, from the product that follows the attention."""
    reader = next(n for n in model.graph.node if node.output[0] in n.input)
    if reader.op_type in ("QuantizeLinear", "Reshape", "GatherND"):
        reader = next(n for n in model.graph.node if reader.output[0] in n.input)
    sizes = {t.name: list(t.dims) for t in model.graph.initializer}
    if reader.op_type == "MatMulNBits":
        return int(next(a.i for a in reader.attribute if a.name == "K")) // heads
    return sizes[reader.input[1]][0] // heads


def scale_initializers(model: Any, node: Any) -> Any:
    dims = {t.name: list(t.dims) for t in model.graph.initializer}
    producers = {name: n for n in model.graph.node for name in n.output}
    name = node.input[2]
    while name in producers:
        name = producers[name].input[0]
    return dims[name]


def with_first_value(values: Any, first: Any) -> Any:
    values.flat[0] = first
    return values
