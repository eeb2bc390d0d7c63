"""Edits of a graph including its subgraphs: renaming, resolving branches, extracting parts.

Graphs are onnx.GraphProto; results are new, or copies.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from smelt.runtime.third_party.graph_structure import node_inputs, subgraphs


def copy_message(message: Any) -> Any:
    """Return a copy of a protobuf message."""
    new = type(message)()
    new.CopyFrom(message)
    return new


def rename_values(nodes: Iterable[Any], name_of: Callable[[str], str], prefix: str) -> list[Any]:
    """Return copies of `nodes` whose values have the names of `name_of`; nodes get `prefix`.

    Names inside of subgraphs are changed too, so that they stay unique.
    """
    found = [copy_message(node) for node in nodes]
    for node in found:
        _rename_node(node, name_of, prefix)
    return found


def _rename_node(node: Any, name_of: Callable[[str], str], prefix: str) -> None:
    node.name = prefix + node.name
    for names in (node.input, node.output):
        names[:] = [name and name_of(name) for name in names]
    for graph in subgraphs(node):
        for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
            value.name = name_of(value.name)
        for sparse in graph.sparse_initializer:
            sparse.values.name = name_of(sparse.values.name)
        for inside in graph.node:
            _rename_node(inside, name_of, prefix)


def nodes_for_outputs(nodes: Iterable[Any], outputs: Iterable[str]) -> list[Any]:
    """Return those of the ordered `nodes` that `outputs` depend on."""
    wanted, found = set(outputs), []
    for node in reversed(list(nodes)):
        if wanted.intersection(node.output):
            found.append(node)
            wanted |= node_inputs(node)
    return found[::-1]


def used_tensors(tensors: Iterable[Any], nodes: Iterable[Any], outputs: Collection[str] = ()) -> list[Any]:
    """Return those of `tensors` that `nodes` read, or that are outputs themselves."""
    names = set(outputs).union(*(node_inputs(node) for node in nodes))
    return [tensor for tensor in tensors if tensor.name in names]


def resolve_if_branch(graph: Any, flag: str, value: bool) -> Any:
    """Return a copy of `graph` with the input `flag` set to `value`: the selected branches of If.

    The input is removed, and so are nodes and weights of the other branches only.
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
        taken, tensors = _inline_branch(branch, list(node.output), f"branch{number}.")
        nodes += taken
        weights += tensors
    outputs = [o.name for o in graph.output]
    nodes = nodes_for_outputs(nodes, outputs)
    names = set().union(*(node_inputs(node) for node in nodes)) | set(outputs)
    inputs = [i for i in graph.input if i.name != flag and i.name in names]
    return helper.make_graph(
        nodes, graph.name, inputs, list(graph.output), used_tensors(weights, nodes, outputs)
    )


def _inline_branch(branch: Any, outputs: list[str], prefix: str) -> tuple[list[Any], list[Any]]:
    """Return nodes and weights of a branch of If, whose results get the names `outputs`."""
    from onnx import helper

    own = {t.name for t in branch.initializer} | {name for node in branch.node for name in node.output}

    def name_of(name: str) -> str:
        return prefix + name if name in own else name

    nodes = rename_values(branch.node, name_of, prefix)
    for value, output in zip(branch.output, outputs, strict=True):
        nodes.append(helper.make_node("Identity", [name_of(value.name)], [output], f"{prefix}{output}"))
    tensors = [copy_message(tensor) for tensor in branch.initializer]
    for tensor in tensors:
        tensor.name = prefix + tensor.name
    return nodes, tensors
