"""Walk the nodes and tensors of an ONNX graph and of the graphs inside of its nodes; read its operator sets.

All functions follow both kinds of inner graphs: the attributes of one graph (the branches of If, the body of
Loop and Scan) and those of several.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_EXTERNAL_DATA_KEYS = ("location", "offset", "length")
_INT8 = 3  # of onnx.TensorProto


def subgraphs(node: Any) -> list[Any]:
    """Return the subgraphs of a node: the branches of If, the body of Loop and Scan."""
    graphs = []
    for attribute in node.attribute:
        graphs += [attribute.g] if attribute.HasField("g") else []
        graphs += list(attribute.graphs)
    return graphs


def iter_graphs(graph: Any) -> Iterator[Any]:
    """Yield a graph, and those inside of its nodes."""
    yield graph
    for node in graph.node:
        for subgraph in subgraphs(node):
            yield from iter_graphs(subgraph)


def all_nodes(nodes: Sequence[Any]) -> Iterator[Any]:
    """Yield `nodes` and those of their subgraphs."""
    pending = list(nodes)
    while pending:
        node = pending.pop()
        yield node
        for graph in subgraphs(node):
            pending += graph.node


def iter_initializers(graph: Any) -> Iterator[Any]:
    """Yield the initializers of a graph and of the graphs in its nodes."""
    for subgraph in iter_graphs(graph):
        yield from subgraph.initializer


def separate_int8_readers(graph: Any) -> int:
    """Give each node but the first that reads an int8 initializer a copy of its own; return their number.

    Without VNNI, ONNX Runtime 1.31 cannot open a graph in which two nodes read one int8 weight, or zero
    point: avx2_weight_s8_to_u8.cc creates a tensor of the same name for each. It copies a DequantizeLinear
    with several readers itself, so that is copied too.
    """
    used_names = {name for node in all_nodes(graph.node) for name in (*node.input, *node.output)}
    used_names |= {v.name for scope in iter_graphs(graph) for v in (*scope.input, *scope.initializer)}
    copies = 0
    for scope in iter_graphs(graph):
        tensors = {tensor.name: tensor for tensor in scope.initializer if tensor.data_type == _INT8}
        _separate_dequantizing_nodes(scope, tensors, used_names)
        readers = set[str]()
        for node in all_nodes(scope.node):
            for index, name in enumerate(node.input):
                if name in tensors and name in readers:
                    copies += 1
                    copy = scope.initializer.add()
                    copy.CopyFrom(tensors[name])
                    copy.name = node.input[index] = _unused_name(name, used_names)
                readers.add(name)
    return copies


def _separate_dequantizing_nodes(graph: Any, tensors: Mapping[str, Any], used_names: set[str]) -> None:
    """Give each node but the first that reads a dequantized initializer a DequantizeLinear of its own."""
    makers = {n.output[0]: n for n in graph.node if n.op_type == "DequantizeLinear" and n.input[0] in tensors}
    copies: dict[str, list[Any]] = {name: [] for name in makers}
    readers = set[str]()
    for node in all_nodes(graph.node):
        for index, name in enumerate(node.input):
            if name in makers and name in readers:
                copy = type(node)()
                copy.CopyFrom(makers[name])
                copy.name = copy.output[0] = node.input[index] = _unused_name(name, used_names)
                copies[name].append(copy)
            readers.add(name)
    nodes = [each for node in graph.node for each in (node, *copies.get(next(iter(node.output), ""), ()))]
    del graph.node[:]
    graph.node.extend(nodes)


def _unused_name(name: str, used_names: set[str]) -> str:
    """Return a name that no value has, and add it to `used_names`."""
    number = 2
    while f"{name}.{number}" in used_names:
        number += 1
    used_names.add(f"{name}.{number}")
    return f"{name}.{number}"


def node_inputs(node: Any) -> set[str]:
    """Return all names that a node reads, including those that its subgraphs read from outside."""
    names = {name for name in node.input if name}
    for graph in subgraphs(node):
        used_names = {value.name for value in graph.output}.union(
            *(node_inputs(inner) for inner in graph.node)
        )
        defined_names = {value.name for value in (*graph.input, *graph.initializer)}
        defined_names |= {sparse.values.name for sparse in graph.sparse_initializer}
        names |= used_names - defined_names.union(*(inner.output for inner in graph.node))
    return names


def normalized_domain(name: str) -> str:
    """Return the name of a domain, empty for ONNX's own."""
    return "" if name == "ai.onnx" else name


def opset_versions(model: Any) -> dict[str, int]:
    """Return the version of each domain's operators, ONNX's own under the empty name."""
    return {normalized_domain(opset.domain): opset.version for opset in model.opset_import}


def is_external(tensor: Any) -> bool:
    """Return whether the values of an onnx.TensorProto are in another file."""
    return int(tensor.data_location) == 1  # TensorProto.EXTERNAL


def external_data_fields(tensor: Any) -> Mapping[str, str]:
    """Return the external data fields of a tensor; of duplicate keys the last."""
    return {entry.key: entry.value for entry in tensor.external_data if entry.key in _EXTERNAL_DATA_KEYS}


def external_locations(model: Any) -> set[str]:
    """Return the names of the external data files of an onnx.ModelProto, as it was read."""
    external = (tensor for tensor in iter_model_tensors(model) if is_external(tensor))
    return {external_data_fields(tensor).get("location", "") for tensor in external}


def content_key(tensor: Any) -> bytes:
    """Return a hash of the type, shape and values of an onnx.TensorProto, or of where its values are."""
    from onnx import numpy_helper

    kind = f"{tensor.data_type} {list(tensor.dims)} "
    if is_external(tensor):
        return f"{kind}{sorted(external_data_fields(tensor).items())}".encode()
    return hashlib.sha256(kind.encode() + numpy_helper.to_array(tensor).tobytes()).digest()


def iter_graph_tensors(graph: Any) -> Iterator[Any]:
    """Yield every tensor of an onnx.GraphProto: initializers, values of attributes, those of subgraphs."""
    pending = [graph]
    while pending:
        graph = pending.pop()
        yield from graph.initializer
        for sparse in graph.sparse_initializer:
            yield from (sparse.values, sparse.indices)
        yield from _attribute_tensors(_node_attributes(graph.node), pending)


def iter_model_tensors(model: Any) -> Iterator[Any]:
    """Yield every tensor of an onnx.ModelProto, including those of its functions."""
    yield from iter_graph_tensors(model.graph)
    for function in model.functions:
        pending: list[Any] = []
        yield from _attribute_tensors(_node_attributes(function.node), pending)
        yield from _attribute_tensors(function.attribute_proto, pending)  # the defaults
        for graph in pending:
            yield from iter_graph_tensors(graph)


def _node_attributes(nodes: Any) -> Iterator[Any]:
    for node in nodes:
        yield from node.attribute


def _attribute_tensors(attributes: Any, waiting: list[Any]) -> Iterator[Any]:
    for attribute in attributes:
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors
        sparse_tensors = [attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else []
        for sparse in (*sparse_tensors, *attribute.sparse_tensors):
            yield from (sparse.values, sparse.indices)
        if attribute.HasField("g"):
            waiting.append(attribute.g)
        waiting.extend(attribute.graphs)


def node_label(node: Any) -> str:
    """Return the name of a node in messages."""
    return f"{node.op_type} '{(node.name or next(filter(None, node.output), '?'))[:80]}'"
