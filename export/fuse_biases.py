"""In a graph that takes one token at a time, fuse matrix multiplication and bias into one operator.

ONNX Runtime has a fused operator (Gemm) only for 2-D rows. In a decoder's step rows are [R, 1, K], for which
MatMul and Add would remain two operators.

Shapes: R = rows, K = inputs, N = outputs of a layer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from smelt.export.graph_files import read_graph, write_graph
from smelt.runtimes.graph_walk import node_inputs

# operators that compute each number by itself
_ELEMENTWISE = frozenset({"Relu", "Gelu", "Tanh", "Sigmoid"})


def fuse_biases_in_file(path: Path) -> None:
    """Apply `fuse_biases` to the graph in `path`; external weights are not moved."""
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
    flat_values = _FlatValues(graph)
    for node in graph.node:
        name = node.output[0]
        if name in sums:
            continue
        if name in pairs:
            flat_values.append_gemm(node, *pairs[name])
        elif flat_values.is_row_wise(node):
            flat_values.append_flat(node)
        else:
            flat_values.append(node)
    flat_values.restore_shapes([output.name for output in graph.output])
    del graph.node[:]
    graph.node.extend(flat_values.nodes)
    return len(pairs)


class _FlatValues:
    """The nodes of the new graph, and its values that are [R, N] and not yet [R, 1, N]."""

    def __init__(self, graph: Any) -> None:
        self.nodes: list[Any] = []
        self._graph = graph
        self._dims = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
        self._flat: dict[str, tuple[str, int]] = {}  # a value's name -> its name as [R, N], and N
        self._waiting: set[str] = set()  # values that no node has read as [R, 1, N] yet

    def is_row_wise(self, node: Any) -> bool:
        """Return whether a node's inputs exist as [R, N] and it computes each row by itself."""
        from onnx import helper

        flat = [self._flat.get(name) for name in node.input]
        if node.op_type == "Add":  # another width would be broadcast
            return flat[0] is not None and flat[1] is not None and flat[0][1] == flat[1][1]
        if node.op_type == "LayerNormalization":
            attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
            return flat[0] is not None and attributes.get("axis", -1) == -1 and len(node.output) == 1
        return node.op_type in _ELEMENTWISE and flat[0] is not None

    def append_gemm(self, product: Any, add: Any, bias: str) -> None:
        """Replace a MatMul and an Add by a Gemm."""
        from onnx import helper

        source, matrix = product.input
        k, n = self._dims[matrix]
        if source not in self._flat:
            self._flat[source] = (f"{source}.flat", k)
            self._reshape(source, f"{source}.flat", [-1, k])
        flat = f"{add.output[0]}.flat"
        gemm_inputs = [self._flat[source][0], matrix, bias]
        self.nodes.append(helper.make_node("Gemm", gemm_inputs, [flat], f"{product.name}.gemm"))
        self._flat[add.output[0]] = (flat, n)
        self._waiting.add(add.output[0])

    def append_flat(self, node: Any) -> None:
        """Append a node that also works on [R, N]."""
        name = node.output[0]
        width = self._flat[node.input[0]][1]
        for index, source in enumerate(node.input):
            if source in self._flat:
                node.input[index] = self._flat[source][0]
        node.output[0] = f"{name}.flat"
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
    readers, output_names = _readers(graph), {output.name for output in graph.output}
    adds = {node.output[0]: node for node in graph.node if node.op_type == "Add"}
    pairs = {}
    for node in graph.node:
        if node.op_type != "MatMul" or len(floats.get(node.input[1], ())) != 2:
            continue
        shape, name = shapes.get(node.input[0], ()), node.output[0]
        one_token = len(shape) == 3 and shape[1].dim_value == 1
        add = adds.get(next(iter(readers[name]), "")) if len(readers[name]) == 1 else None
        if one_token and add is not None and name not in output_names:
            # a longer one would broadcast the sum, which Gemm does not support
            sizes = ([1], floats[node.input[1]][1:])
            bias = next((input_name for input_name in add.input if floats.get(input_name) in sizes), None)
            if bias is not None:
                pairs[name] = (add, bias)
    return pairs


def _readers(graph: Any) -> dict[str, set[str]]:
    """Return by value name the first outputs of the nodes that read it."""
    readers: dict[str, set[str]] = {name: set() for node in graph.node for name in node.output}
    for node in graph.node:
        for name in node_inputs(node):
            readers.setdefault(name, set()).add(node.output[0])
    return readers
