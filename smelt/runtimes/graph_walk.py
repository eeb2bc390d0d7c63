"""Walk an ONNX graph and the graphs inside of its nodes, and read its operator sets.

All functions follow both kinds of inner graphs: the attributes of one graph (the branches of If, the body of
Loop and Scan) and those of several.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any


def subgraphs(node: Any) -> list[Any]:
    """Return the subgraphs of a node: the branches of If, the body of Loop and Scan."""
    found = []
    for attribute in node.attribute:
        found += [attribute.g] if attribute.HasField("g") else []
        found += list(attribute.graphs)
    return found


def iter_graphs(graph: Any) -> Iterator[Any]:
    """Yield a graph, and those inside of its nodes."""
    yield graph
    for node in graph.node:
        for inside in subgraphs(node):
            yield from iter_graphs(inside)


def all_nodes(nodes: Sequence[Any]) -> Iterator[Any]:
    """Yield `nodes` and those of their subgraphs."""
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        yield node
        for graph in subgraphs(node):
            waiting += graph.node


def iter_initializers(graph: Any) -> Iterator[Any]:
    """Yield the initializers of a graph and of the graphs in its nodes."""
    for inside in iter_graphs(graph):
        yield from inside.initializer


def node_inputs(node: Any) -> set[str]:
    """Return all names that a node reads, including those that its subgraphs read from outside."""
    names = {name for name in node.input if name}
    for graph in subgraphs(node):
        inside = {value.name for value in graph.output}.union(*(node_inputs(inner) for inner in graph.node))
        own = {value.name for value in (*graph.input, *graph.initializer)}
        own |= {sparse.values.name for sparse in graph.sparse_initializer}
        names |= inside - own.union(*(inner.output for inner in graph.node))
    return names


def normalized_domain(name: str) -> str:
    """Return the name of a domain, empty for ONNX's own."""
    return "" if name == "ai.onnx" else name


def opset_versions(model: Any) -> dict[str, int]:
    """Return the version of each domain's operators, ONNX's own under the empty name."""
    return {normalized_domain(opset.domain): opset.version for opset in model.opset_import}
