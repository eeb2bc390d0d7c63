"""Products with a bias as one operator, in a graph that takes one token at a time.

ONNX Runtime multiplies by a matrix and adds a bias in one go (Gemm) only for rows of two dimensions. In a
decoder's step rows are [R, 1, K], of which MatMul and Add would stay two operators.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

# what may lie between two products and works on any shape
_ELEMENTWISE = frozenset({"Relu", "Gelu", "Tanh", "Sigmoid"})


def join_biases_file(path: Path) -> None:
    """Do `join_biases` to the graph in `path`; weights that lie outside stay there."""
    from smelt.export.graph_files import read_graph, write_graph

    model = read_graph(path, values=False)
    if join_biases(model):
        write_graph(model, path)


def join_biases(model: Any) -> int:
    """Let MatMul [R, 1, K] x [K, N] and the Add of a bias [N] be a Gemm, in place; return how many are.

    The rows are flattened before it and get their second dimension back behind it, which copies nothing. What
    the shapes in the file do not show to be of one token stays as it is.
    """
    graph = model.graph
    pairs = _pairs(graph)
    if not pairs:
        return 0
    sums = {add.output[0] for add, _ in pairs.values()}
    rows = _Rows(graph)
    for node in graph.node:
        name = node.output[0]
        if name in sums:
            continue
        if name in pairs:
            rows.multiply(node, *pairs[name])
        elif node.op_type in _ELEMENTWISE and rows.are_flat(node.input[0]):
            rows.keep_flat(node)
        else:
            rows.append(node)
    rows.give_back([output.name for output in graph.output])
    del graph.node[:]
    graph.node.extend(rows.nodes)
    return len(pairs)


class _Rows:
    """The nodes of the new graph, and its values that are [R, N] and not yet [R, 1, N]."""

    def __init__(self, graph: Any) -> None:
        self.nodes: list[Any] = []
        self._graph = graph
        self._dims = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
        self._flat: dict[str, tuple[str, int]] = {}  # a value's name -> what it is called as [R, N], and N
        self._waiting: set[str] = set()  # values that nothing has asked for as [R, 1, N]

    def are_flat(self, name: str) -> bool:
        """Say whether the value is there as [R, N]."""
        return name in self._flat

    def multiply(self, product: Any, add: Any, bias: str) -> None:
        """Put a Gemm in the place of a MatMul and an Add."""
        from onnx import helper

        source, matrix = product.input
        k, n = self._dims[matrix]
        if source not in self._flat:
            self._flat[source] = (f"{source}.flat", k)
            self._reshape(source, f"{source}.flat", [-1, k])
        made = f"{add.output[0]}.flat"
        read = [self._flat[source][0], matrix, bias]
        self.nodes.append(helper.make_node("Gemm", read, [made], f"{product.name}.gemm"))
        self._flat[add.output[0]] = (made, n)
        self._waiting.add(add.output[0])

    def keep_flat(self, node: Any) -> None:
        """Append a node that works on [R, N] as well."""
        source, name = node.input[0], node.output[0]
        flat, width = self._flat[source]
        node.input[0], node.output[0] = flat, f"{name}.flat"
        self.nodes.append(node)
        self._flat[name] = (f"{name}.flat", width)
        self._waiting.add(name)

    def append(self, node: Any) -> None:
        """Append a node as it is."""
        self.give_back(_read_by(node))
        self.nodes.append(node)

    def give_back(self, names: Any) -> None:
        """Make values [R, 1, N] that are not yet."""
        for name in names:
            if name in self._waiting:
                self._waiting.remove(name)
                flat, width = self._flat[name]
                self._reshape(flat, name, [-1, 1, width])

    def _reshape(self, name: str, made: str, shape: list[int]) -> None:
        import numpy as np
        from onnx import helper, numpy_helper

        table = f"{made}.shape"
        self._graph.initializer.append(numpy_helper.from_array(np.array(shape, np.int64), table))
        self.nodes.append(helper.make_node("Reshape", [name, table], [made], f"{made}.reshape"))


def _pairs(graph: Any) -> dict[str, tuple[Any, str]]:
    """Return by the output of a MatMul the Add behind it and the bias; where a Gemm may take their place."""
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
            # a longer one would widen the sum, which a Gemm's may not
            sizes = ([1], floats[node.input[1]][1:])
            bias = next((read for read in add.input if floats.get(read) in sizes), None)
            if bias is not None:
                found[name] = (add, bias)
    return found


def _readers(graph: Any) -> dict[str, set[str]]:
    """Return by name of a value the first outputs of the nodes that read it."""
    found: dict[str, set[str]] = {name: set() for node in graph.node for name in node.output}
    for node in graph.node:
        for name in _read_by(node):
            found.setdefault(name, set()).add(node.output[0])
    return found


def _read_by(node: Any) -> list[str]:
    """Return the names that a node reads, those that the graphs in it read included."""
    inner = [attribute.g for attribute in node.attribute if attribute.HasField("g")]
    names = [name for graph in inner for one in graph.node for name in _read_by(one)]
    return [*node.input, *names, *(output.name for graph in inner for output in graph.output)]
