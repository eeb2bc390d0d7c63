"""Fuse matrix multiplication and bias into one operator, in a graph that takes one token at a time.

ONNX Runtime has a fused operator (Gemm) only for 2-D rows. In a decoder's step rows are [R, 1, K], for which
MatMul and Add would remain two operators.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from smelt.runtimes.graph_walk import node_inputs

# operators that may be between two matrix multiplications, for any shape
_ELEMENTWISE = frozenset({"Relu", "Gelu", "Tanh", "Sigmoid"})


def fuse_biases_in_file(path: Path) -> None:
    """Apply `fuse_biases` to the graph in `path`; external weights are not moved."""
    from smelt.export.graph_files import read_graph, write_graph

    model = read_graph(path, values=False)
    if fuse_biases(model):
        write_graph(model, path)


def fuse_biases(model: Any) -> int:
    """Replace MatMul [R, 1, K] x [K, N] and the Add of a bias [N] by Gemm, in place; return their number.

    The rows are flattened before it and get their second dimension back after it, without a copy. Nodes that
    the shapes in the file do not show to be of one token are not changed.
    """
    graph = model.graph
    pairs = _matmul_add_pairs(graph)
    if not pairs:
        return 0
    sums = {add.output[0] for add, _ in pairs.values()}
    rows = _FlatValues(graph)
    for node in graph.node:
        name = node.output[0]
        if name in sums:
            continue
        if name in pairs:
            rows.append_gemm(node, *pairs[name])
        elif node.op_type in _ELEMENTWISE and rows.is_flat(node.input[0]):
            rows.append_flat(node)
        else:
            rows.append(node)
    rows.restore_shapes([output.name for output in graph.output])
    del graph.node[:]
    graph.node.extend(rows.nodes)
    return len(pairs)


class _FlatValues:
    """The nodes of the new graph, and its values that are [R, N] and not yet [R, 1, N]."""

    def __init__(self, graph: Any) -> None:
        self.nodes: list[Any] = []
        self._graph = graph
        self._dims = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
        self._flat: dict[str, tuple[str, int]] = {}  # a value's name -> its name as [R, N], and N
        self._waiting: set[str] = set()  # values that no node has read as [R, 1, N] yet

    def is_flat(self, name: str) -> bool:
        """Return whether the value exists as [R, N]."""
        return name in self._flat

    def append_gemm(self, product: Any, add: Any, bias: str) -> None:
        """Replace a MatMul and an Add by a Gemm."""
        from onnx import helper

        source, matrix = product.input
        k, n = self._dims[matrix]
        if source not in self._flat:
            self._flat[source] = (f"{source}.flat", k)
            self._reshape(source, f"{source}.flat", [-1, k])
        flat = f"{add.output[0]}.flat"
        read = [self._flat[source][0], matrix, bias]
        self.nodes.append(helper.make_node("Gemm", read, [flat], f"{product.name}.gemm"))
        self._flat[add.output[0]] = (flat, n)
        self._waiting.add(add.output[0])

    def append_flat(self, node: Any) -> None:
        """Append a node that also works on [R, N]."""
        source, name = node.input[0], node.output[0]
        flat, width = self._flat[source]
        node.input[0], node.output[0] = flat, f"{name}.flat"
        self.nodes.append(node)
        self._flat[name] = (f"{name}.flat", width)
        self._waiting.add(name)

    def append(self, node: Any) -> None:
        """Append a node without changes."""
        self.restore_shapes([*node.input, *sorted(node_inputs(node) - set(node.input))])
        self.nodes.append(node)

    def restore_shapes(self, names: Any) -> None:
        """Create the values [R, 1, N] that do not exist yet."""
        for name in names:
            if name in self._waiting:
                self._waiting.remove(name)
                flat, width = self._flat[name]
                self._reshape(flat, name, [-1, 1, width])

    def _reshape(self, name: str, result: str, shape: list[int]) -> None:
        from onnx import helper, numpy_helper

        table = f"{result}.shape"
        self._graph.initializer.append(numpy_helper.from_array(np.array(shape, np.int64), table))
        self.nodes.append(helper.make_node("Reshape", [name, table], [result], f"{result}.reshape"))


def _matmul_add_pairs(graph: Any) -> dict[str, tuple[Any, str]]:
    """Return by the output of a MatMul its Add and bias, where a Gemm can replace both."""
    from onnx import TensorProto

    floats = {t.name: list(t.dims) for t in graph.initializer if t.data_type == TensorProto.FLOAT}
    shapes = {v.name: v.type.tensor_type.shape.dim for v in (*graph.value_info, *graph.input, *graph.output)}
    readers, outside = _readers(graph), {output.name for output in graph.output}
    adds = {node.output[0]: node for node in graph.node if node.op_type == "Add"}
    found = {}
    for node in graph.node:
        if node.op_type != "MatMul" or len(floats.get(node.input[1], ())) != 2:
            continue
        shape, name = shapes.get(node.input[0], ()), node.output[0]
        one_token = len(shape) == 3 and shape[1].dim_value == 1
        add = adds.get(next(iter(readers[name]), "")) if len(readers[name]) == 1 else None
        if one_token and add is not None and name not in outside:
            # a longer one would broadcast the sum, which Gemm does not support
            sizes = ([1], floats[node.input[1]][1:])
            bias = next((read for read in add.input if floats.get(read) in sizes), None)
            if bias is not None:
                found[name] = (add, bias)
    return found


def _readers(graph: Any) -> dict[str, set[str]]:
    """Return by value name the first outputs of the nodes that read it."""
    found: dict[str, set[str]] = {name: set() for node in graph.node for name in node.output}
    for node in graph.node:
        for name in node_inputs(node):
            found.setdefault(name, set()).add(node.output[0])
    return found
