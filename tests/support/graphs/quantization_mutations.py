"""Codes, scales and zero points that are others'. See mutations.py."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import numpy_helper

from smelt.quantization.scheme import QuantizedGraph
from smelt.quantization.schemes.registry import owner_of_operator
from tests.support.graphs.graph_edits import (
    NotApplicable,
    find_constant,
    find_nodes,
    mutation,
    replace_values,
    scale_initializers,
    with_first_value,
)


@mutation
def change_one_scale(model: Any) -> None:
    """One scale of one quantized matrix is 1 % larger."""
    replace_values(_scales(model), lambda v: with_first_value(v, v.flat[0] * v.dtype.type(1.01)))


@mutation
def swap_two_scales(model: Any) -> None:
    """Two scales of one quantized matrix change places."""

    def swapped(values: Any) -> Any:
        flat = values.reshape(-1)
        flat[[0, -1]] = flat[[-1, 0]]
        return values

    replace_values(_scales(model), swapped)


@mutation
def take_another_layers_scales(model: Any) -> None:
    """A product reads the scales of another layer of its size."""
    graph = QuantizedGraph(model.graph)
    products = [node for node in model.graph.node if owner_of_operator(node, graph)]
    for first in products:
        for second in products:
            if first.input[2] != second.input[2] and scale_initializers(model, first) == scale_initializers(
                model, second
            ):
                first.input[2] = second.input[2]
                return
    raise NotApplicable("scales")


def _scales(model: Any) -> Any:
    return find_constant(model, ".matrix.", "scales")


@mutation
def change_one_scale_of_the_lookup(model: Any) -> None:
    """The scale of one row of the embedding, of a word that no text holds, is twice as large."""
    lookup_name = (
        ".matrix.lookup" if any(".matrix.lookup" in t.name for t in model.graph.initializer) else None
    )
    if lookup_name is None:
        raise NotApplicable("lookup")

    def doubled(values: Any) -> Any:
        values[3] *= 2
        return values

    replace_values(find_constant(model, lookup_name), doubled)


@mutation
def change_one_code(model: Any) -> None:
    """One code is another."""
    tensor = next(
        (t for t in model.graph.initializer if t.name.endswith((".codes", ".columns", ".flat"))), None
    )
    if tensor is None:
        raise NotApplicable("codes")
    replace_values(tensor, lambda v: with_first_value(v, v.flat[0] ^ v.dtype.type(1)))


@mutation
def other_zero_point(model: Any) -> None:
    """One zero point is one higher; int8 codes, whose zero is 0, get one of 1."""
    for node in find_nodes(model, "DynamicQuantizeMatMul", "MatMulNBits"):
        if node.op_type == "DynamicQuantizeMatMul":
            model.graph.initializer.append(numpy_helper.from_array(np.array(1, np.int8), "zero.mutation"))
            inputs = [*node.input[:3], "zero.mutation", *node.input[4:]]
            del node.input[:]
            node.input.extend(inputs)
            return
        if len(node.input) > 3 and node.input[3]:
            replace_values(
                find_constant(model, node.input[3]),
                lambda v: with_first_value(v, v.flat[0] ^ v.dtype.type(1)),
            )
            return
    raise NotApplicable("zero point")


@mutation
def drop_zero_points(model: Any) -> None:
    """An asymmetric matrix is taken for a symmetric one."""
    for node in find_nodes(model, "MatMulNBits"):
        if len(node.input) > 3 and node.input[3]:
            node.input[3] = ""
            return
    raise NotApplicable("zero points")
