"""Names that ONNX Runtime's quantizers cannot take for their own.

They call what they make of `x`: `x_scale`, `x_quantized`, `x_DequantizeLinear` and so on. They do not check
whether the graph has such a name, as one with the inputs `image` and `image_scale` does. The result is then
an invalid graph, or one that reads another value. What they make of a node has its name too, so in a graph
with inner graphs (If, Loop, Scan) each node needs one, and no other may have it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from smelt.runtime.foreign.structure import all_nodes, inner_graphs


def apart(path: Path, folder: Path, keep: Iterable[str] = ()) -> tuple[Path, dict[str, str]]:
    """Return the graph in `path`, or a copy in `folder` without such names, and what `restore` needs.

    Args:
        path: an ONNX file; names in its inner graphs are of one value each.
        folder: an empty one for the copy.
        keep: names of nodes that are not changed.
    """
    from smelt.export.graph_files import read_graph, write_graph

    bare = read_graph(path, values=False).graph
    values, nodes = _values(bare), _nodes(bare)
    taken = values | nodes
    clashing = sorted({one for name in taken for one in _beginnings(name) if one in values})
    nodes_too = sorted({name for name in nodes if any(one in taken for one in _beginnings(name))} - {*keep})
    nested = any(inner_graphs(node) for node in bare.node)
    if not clashing and not nodes_too and not nested:
        return path, {}
    new = {name: _fresh(name, taken) for name in clashing}
    model = read_graph(path)
    _rename(model.graph, new)
    _rename_nodes(model.graph, {name: _fresh(name, taken) for name in nodes_too})
    if nested:
        _distinguish_nodes(model.graph, {*keep}, taken)
    write_graph(model, folder / path.name)
    return folder / path.name, {after: before for before, after in new.items()}


def restore(model: Any, names: Mapping[str, str]) -> None:
    """Give the values of the quantized `model` the names that `apart` changed."""
    if names:
        _rename(model.graph, names)


def _beginnings(name: str) -> list[str]:
    """Return the names for which the quantizers could make `name`; they append no numbers."""
    places = (at for at, letter in enumerate(name) if letter == "_")
    return [name[:at] for at in places if at and not name[at + 1 :].isdigit()]


def _fresh(name: str, taken: set[str]) -> str:
    """Return a name that nothing has or begins with, and add it to `taken`."""
    number = 0
    while any(other.startswith(f"{name}.{number}") for other in taken):
        number += 1
    taken.add(f"{name}.{number}")
    return f"{name}.{number}"


def _values(graph: Any) -> set[str]:
    names = {value.name for value in (*graph.input, *graph.initializer)}
    names |= {sparse.values.name for sparse in graph.sparse_initializer}
    for node in graph.node:
        names.update(name for name in node.output if name)
        for inside in inner_graphs(node):
            names |= _values(inside)
    return names


def _nodes(graph: Any) -> set[str]:
    names = {node.name for node in graph.node if node.name}
    return names.union(*(_nodes(inside) for node in graph.node for inside in inner_graphs(node)))


def _rename(graph: Any, names: Mapping[str, str]) -> None:
    tensors = [*graph.initializer, *(sparse.values for sparse in graph.sparse_initializer)]
    for value in (*graph.input, *graph.output, *graph.value_info, *tensors):
        value.name = names.get(value.name, value.name)
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
        for inside in inner_graphs(node):
            _rename(inside, names)


def _rename_nodes(graph: Any, names: Mapping[str, str]) -> None:
    for node in graph.node:
        node.name = names.get(node.name, node.name)
        for inside in inner_graphs(node):
            _rename_nodes(inside, names)


def _distinguish_nodes(graph: Any, keep: set[str], taken: set[str]) -> None:
    """Give nodes without a name, and all but the first of those with one, names that nothing has."""
    seen, begin = set(keep), _fresh("node", taken)
    for number, node in enumerate(all_nodes(graph.node)):
        if node.name not in keep:
            if not node.name or node.name in seen:
                node.name = f"{begin}.{node.op_type}.{number}"
            seen.add(node.name)
