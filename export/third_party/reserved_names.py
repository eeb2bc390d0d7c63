"""Rename values and nodes whose names ONNX Runtime's quantizers could create themselves.

For a value `x` they create `x_scale`, `x_quantized`, `x_DequantizeLinear` and so on. They do not check
whether the graph already has such a name, as one with the inputs `image` and `image_scale` does. The result
is then an invalid graph, or one that reads another value. New nodes are named after the original node, so in
a graph with inner graphs (If, Loop, Scan) each node needs a unique name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from smelt.runtime.third_party.graph_structure import all_nodes, subgraphs


def rename_reserved(path: Path, folder: Path, keep: Iterable[str] = ()) -> tuple[Path, dict[str, str]]:
    """Return the graph in `path`, or a copy in `folder` without such names, and the map for `restore_names`.

    Args:
        path: an ONNX file; names in its inner graphs are unique.
        folder: an empty one for the copy.
        keep: names of nodes that are not changed.
    """
    from smelt.export.graph_files import read_graph, write_graph

    bare = read_graph(path, values=False).graph
    values, nodes = _value_names(bare), _node_names(bare)
    taken = values | nodes
    clashing = sorted({one for name in taken for one in _conflicting_prefixes(name) if one in values})
    nodes_too = sorted(
        {name for name in nodes if any(one in taken for one in _conflicting_prefixes(name))} - {*keep}
    )
    nested = any(subgraphs(node) for node in bare.node)
    if not clashing and not nodes_too and not nested:
        return path, {}
    new = {name: _unused_name(name, taken) for name in clashing}
    model = read_graph(path)
    _rename_values(model.graph, new)
    _rename_nodes(model.graph, {name: _unused_name(name, taken) for name in nodes_too})
    if nested:
        _make_node_names_unique(model.graph, {*keep}, taken)
    write_graph(model, folder / path.name)
    return folder / path.name, {after: before for before, after in new.items()}


def restore_names(model: Any, names: Mapping[str, str]) -> None:
    """Give the values of the quantized `model` the names that `rename_reserved` changed."""
    if names:
        _rename_values(model.graph, names)


def _conflicting_prefixes(name: str) -> list[str]:
    """Return the names for which the quantizers could create `name`; they append no numbers."""
    places = (at for at, letter in enumerate(name) if letter == "_")
    return [name[:at] for at in places if at and not name[at + 1 :].isdigit()]


def _unused_name(name: str, taken: set[str]) -> str:
    """Return an unused name that is not a prefix of another one, and add it to `taken`."""
    number = 0
    while any(other.startswith(f"{name}.{number}") for other in taken):
        number += 1
    taken.add(f"{name}.{number}")
    return f"{name}.{number}"


def _value_names(graph: Any) -> set[str]:
    names = {value.name for value in (*graph.input, *graph.initializer)}
    names |= {sparse.values.name for sparse in graph.sparse_initializer}
    for node in graph.node:
        names.update(name for name in node.output if name)
        for inside in subgraphs(node):
            names |= _value_names(inside)
    return names


def _node_names(graph: Any) -> set[str]:
    names = {node.name for node in graph.node if node.name}
    return names.union(*(_node_names(inside) for node in graph.node for inside in subgraphs(node)))


def _rename_values(graph: Any, names: Mapping[str, str]) -> None:
    tensors = [*graph.initializer, *(sparse.values for sparse in graph.sparse_initializer)]
    for value in (*graph.input, *graph.output, *graph.value_info, *tensors):
        value.name = names.get(value.name, value.name)
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
        for inside in subgraphs(node):
            _rename_values(inside, names)


def _rename_nodes(graph: Any, names: Mapping[str, str]) -> None:
    for node in graph.node:
        node.name = names.get(node.name, node.name)
        for inside in subgraphs(node):
            _rename_nodes(inside, names)


def _make_node_names_unique(graph: Any, keep: set[str], taken: set[str]) -> None:
    """Give unused names to nodes without a name, and to all but the first node with the same name."""
    seen, begin = set(keep), _unused_name("node", taken)
    for number, node in enumerate(all_nodes(graph.node)):
        if node.name not in keep:
            if not node.name or node.name in seen:
                node.name = f"{begin}.{node.op_type}.{number}"
            seen.add(node.name)
