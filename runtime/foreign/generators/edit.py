"""Edits of a graph that know of the graphs inside of its nodes: names, branches that are always taken, parts.

Graphs are onnx.GraphProto; what is returned is new, or a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from smelt.runtime.foreign.structure import inner_graphs, reads


def copied(message: Any) -> Any:
    """Return a copy of a protobuf message."""
    new = type(message)()
    new.CopyFrom(message)
    return new


def renamed(nodes: Iterable[Any], name_of: Callable[[str], str], prefix: str) -> list[Any]:
    """Return copies of `nodes` whose values have the names that `name_of` gives; nodes get `prefix`.

    What a graph inside of a node calls its own is renamed too, so no two of them can have one name.
    """
    found = [copied(node) for node in nodes]
    for node in found:
        _rename(node, name_of, prefix)
    return found


def _rename(node: Any, name_of: Callable[[str], str], prefix: str) -> None:
    node.name = prefix + node.name
    for names in (node.input, node.output):
        names[:] = [name and name_of(name) for name in names]
    for graph in inner_graphs(node):
        for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
            value.name = name_of(value.name)
        for sparse in graph.sparse_initializer:
            sparse.values.name = name_of(sparse.values.name)
        for inside in graph.node:
            _rename(inside, name_of, prefix)


def needed(nodes: Iterable[Any], outputs: Iterable[str]) -> list[Any]:
    """Return those of `nodes`, which stand in their order, that `outputs` are made by."""
    wanted, found = set(outputs), []
    for node in reversed(list(nodes)):
        if wanted.intersection(node.output):
            found.append(node)
            wanted |= reads(node)
    return found[::-1]


def used(tensors: Iterable[Any], nodes: Iterable[Any], outputs: Collection[str] = ()) -> list[Any]:
    """Return those of `tensors` that `nodes` read, or that are outputs as they are."""
    names = set(outputs).union(*(reads(node) for node in nodes))
    return [tensor for tensor in tensors if tensor.name in names]


def with_branch(graph: Any, flag: str, value: bool) -> Any:
    """Return a copy of `graph` in which the input `flag` is `value`: the branches of If that it chooses.

    The input is gone, and so are nodes and weights that only the other branches wanted.
    """
    from onnx import helper

    nodes: list[Any] = []
    weights = list(graph.initializer)
    for number, node in enumerate(graph.node):
        if node.op_type != "If" or node.input[0] != flag:
            nodes.append(node)
            continue
        word = "then_branch" if value else "else_branch"
        branch = next(a.g for a in node.attribute if a.name == word)
        taken, tensors = _inlined(branch, list(node.output), f"branch{number}.")
        nodes += taken
        weights += tensors
    outputs = [o.name for o in graph.output]
    nodes = needed(nodes, outputs)
    names = set().union(*(reads(node) for node in nodes)) | set(outputs)
    inputs = [i for i in graph.input if i.name != flag and i.name in names]
    return helper.make_graph(nodes, graph.name, inputs, list(graph.output), used(weights, nodes, outputs))


def _inlined(branch: Any, outputs: list[str], prefix: str) -> tuple[list[Any], list[Any]]:
    """Return nodes and weights of a branch of If, whose results have the names `outputs`."""
    from onnx import helper

    own = {t.name for t in branch.initializer} | {name for node in branch.node for name in node.output}

    def name_of(name: str) -> str:
        return prefix + name if name in own else name

    nodes = renamed(branch.node, name_of, prefix)
    for value, output in zip(branch.output, outputs, strict=True):
        nodes.append(helper.make_node("Identity", [name_of(value.name)], [output], f"{prefix}{output}"))
    tensors = [copied(tensor) for tensor in branch.initializer]
    for tensor in tensors:
        tensor.name = prefix + tensor.name
    return nodes, tensors
