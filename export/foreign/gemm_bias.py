"""Biases of Gemm in the one shape that ONNX Runtime's static quantizer reads: a number for each output.

ONNX lets C be whatever broadcasts to the output. The quantizer takes it for a vector: of a scalar or of one
number for all it reads beyond the end, of a matrix its rows for outputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_MATRIX, _BIAS = 1, 2


def misshapen(graph: Any) -> list[Any]:
    """Return the Gemm nodes whose constant bias is no vector of a number for each output."""
    sizes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    nodes = (node for node in graph.node if node.op_type == "Gemm" and node.domain in ("", "ai.onnx"))
    return [
        node
        for node in nodes
        if len(node.input) > _BIAS
        and node.input[_BIAS] in sizes
        and node.input[_MATRIX] in sizes
        and sizes[node.input[_BIAS]] != (_outputs(node, sizes),)
    ]


def fit_biases(graph: Any) -> None:
    """Spread such biases over the outputs; what depends on the row too is added by a node of its own.

    The biases of Gemm nodes are theirs alone (`prepared` sees to it).
    """
    from onnx import helper, numpy_helper

    nodes = misshapen(graph)
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    sizes = {name: tuple(tensor.dims) for name, tensor in tensors.items()}
    for node in nodes:
        bias, outputs = tensors[node.input[_BIAS]], _outputs(node, sizes)
        value = numpy_helper.to_array(bias)
        if value.ndim < 2 or len(value) == 1:
            spread = np.broadcast_to(value.ravel(), (outputs,))
            bias.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(spread), bias.name))
            continue
        taken = {name for one in graph.node for name in (*one.input, *one.output)} | set(tensors)
        product = f"{node.output[0]}.product"
        while product in taken:
            product += "_"
        at = next(at for at, one in enumerate(graph.node) if one.output[:] == node.output[:])
        added = helper.make_node("Add", [product, bias.name], [node.output[0]], f"{product}.add")
        graph.node.insert(at + 1, added)
        graph.node[at].output[0] = product
        del graph.node[at].input[_BIAS]


def _outputs(node: Any, sizes: dict[str, tuple[int, ...]]) -> int:
    turned = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
    matrix = sizes[node.input[_MATRIX]]
    return matrix[0 if turned else -1]
