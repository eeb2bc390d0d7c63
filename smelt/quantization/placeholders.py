"""Graphs as schemes see them when an export is finished: placeholders to expand, and nodes to recognize.

A layer emits a placeholder of the domain `smelt.load` (`smelt/quantization/emit.py`) for what a runtime
computes from constants when it loads a graph. The scheme of the layer expands it into standard operators
(`Scheme.placeholder_expansions`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Returns the nodes that replace a placeholder; its constants are added to the graph.
Expansion = Callable[["QuantizedGraph", Any], list[Any]]


class QuantizedGraph:
    """An onnx.GraphProto with its constants and nodes by the names of their values.

    shapes: of the constants, and of the results of expanded placeholders.
    """

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self.shapes: dict[str, list[int]] = {t.name: list(t.dims) for t in graph.initializer}
        self._constants = {tensor.name: tensor for tensor in graph.initializer}
        self._makers = {name: node for node in graph.node for name in node.output}

    def constant(self, name: str) -> Any:
        """Return the onnx.TensorProto `name`; None if it is no constant."""
        return self._constants.get(name)

    def maker(self, name: str) -> Any:
        """Return the node that computes the value `name`; None if no node does."""
        return self._makers.get(name)

    def add_constant(self, name: str, value: NDArray[Any]) -> None:
        """Add a constant, once for its name."""
        from onnx import numpy_helper

        if name not in self._constants:
            self.add_tensor(numpy_helper.from_array(value, name))

    def reinterpret_constant(self, source: str, name: str, kind: int, shape: tuple[int, ...]) -> None:
        """Add the bytes of the constant `source`, which may be external, with another type and shape.

        kind: of onnx.TensorProto.DataType.
        """
        copy = type(self._constants[source])()
        copy.CopyFrom(self._constants[source])
        copy.name, copy.data_type = name, kind
        del copy.dims[:]
        copy.dims.extend(shape)
        self.add_tensor(copy)

    def add_tensor(self, tensor: Any) -> None:
        """Add a constant, an onnx.TensorProto."""
        self.graph.initializer.append(tensor)
        self._constants[tensor.name] = self.graph.initializer[-1]


def expand_by_table(graph: QuantizedGraph, node: Any, table: NDArray[np.uint8]) -> list[Any]:
    """Return the nodes that replace each byte of a constant by a row of `table`, uint8 [256, n]."""
    from onnx import TensorProto, helper

    source, result, width = node.input[0], node.output[0], table.shape[1]
    name = f"smelt.{re.sub(r'(?<=[a-z])(?=[A-Z])', '_', node.op_type).lower()}"
    graph.add_constant(name, table)
    shape = [*graph.shapes[source][:-1], width * graph.shapes[source][-1]]
    graph.shapes[result] = shape  # it may be expanded again
    indices, expanded, target = (f"{result}.{suffix}" for suffix in ("indices", "pairs", "shape"))
    graph.add_constant(target, np.array(shape, dtype=np.int64))
    return [
        helper.make_node("Cast", [source], [indices], f"{result}.cast", to=TensorProto.INT32),
        helper.make_node("Gather", [name, indices], [expanded], f"{result}.gather", axis=0),
        helper.make_node("Reshape", [expanded, target], [result], f"{result}.reshape"),
    ]
