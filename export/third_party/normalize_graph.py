"""Normalize a third-party graph for the stages: no functions, unique value names.

- Functions of the model are inlined: quantizers and conversions see operators, not calls.
- Weights are not inputs. Before IR version 4 each had to be listed as one; later a listed weight is the
  default value of an input.
- Weights of inner graphs (If, Loop, Scan) are moved to the outermost graph, where quantizers find them.
- Value names are unique. Two branches of an If may use the same name; here they do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from smelt.export.graph_files import read_graph
from smelt.runtime.third_party.graph_structure import all_nodes, subgraphs

_LISTED = 4  # since this IR version an initializer need not be an input
_MATRIX = 2  # dimensions


def normalize_graph(path: Path) -> Any:
    """Return the graph in `path` as an onnx.ModelProto with its weights, normalized for the stages."""
    model = inline_functions(path)
    remove_weight_inputs(model)
    graph = model.graph
    taken = _defined_names(graph)
    for node in graph.node:
        for body in subgraphs(node):
            _rename_shadowing(body, {}, taken)
            _hoist_matrices(body, graph)
    return model


def is_normalized(model: Any) -> bool:
    """Return whether `normalize_graph` would not change a model, which may be read without values."""
    graph = model.graph
    listed = {value.name for value in graph.input} & {
        tensor.name for tensor in graph.initializer if len(tensor.dims) >= _MATRIX
    }
    inner = any(subgraphs(node) for node in graph.node)
    return not (model.functions or listed or inner or model.ir_version < _LISTED)


def iter_model_nodes(model: Any) -> Iterator[Any]:
    """Yield the nodes of a model, of its inner graphs and of its functions."""
    yield from all_nodes(model.graph.node)
    for function in model.functions:
        yield from all_nodes(function.node)


def inline_functions(path: Path) -> Any:
    """Return the graph in `path` with its weights and without functions, as far as onnx can inline them."""
    from onnx import inliner
    from onnx.external_data_helper import load_external_data_for_model

    bare = read_graph(path, values=False)
    if not bare.functions:
        return read_graph(path)
    try:
        model = inliner.inline_local_functions(bare, convert_version=True)
    except Exception:  # from C++: if no converter handles a function's opset
        model = inliner.inline_local_functions(bare)
    load_external_data_for_model(model, str(path.parent))
    return model


def remove_weight_inputs(model: Any) -> None:
    """Remove the weights from the list of inputs."""
    graph = model.graph
    old = model.ir_version < _LISTED
    weights = {t.name for t in graph.initializer if old or len(t.dims) >= _MATRIX}
    for value in [value for value in graph.input if value.name in weights]:
        graph.input.remove(value)
    model.ir_version = max(_LISTED, model.ir_version)


def _defined_names(graph: Any) -> set[str]:
    """Return the names of the values that a graph defines."""
    names = {value.name for value in (*graph.input, *graph.initializer)}
    names |= {sparse.values.name for sparse in graph.sparse_initializer}
    return names.union(*(node.output for node in graph.node)) - {""}


def _rename_shadowing(graph: Any, around: Mapping[str, str], taken: set[str]) -> None:
    """Rename the values of an inner graph to names that are not `taken`, and add these to `taken`.

    around: new names of values of the enclosing graphs.
    """
    names = {name: new for name, new in around.items() if name not in _defined_names(graph)}
    for name in sorted(_defined_names(graph)):
        new, number = name, 0
        while new in taken:
            number += 1
            new = f"{name}.{number}"
        taken.add(new)
        names[name] = new
    tensors = [*graph.initializer, *(sparse.values for sparse in graph.sparse_initializer)]
    for value in (*graph.input, *graph.output, *graph.value_info, *tensors):
        value.name = names.get(value.name, value.name)
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
        for body in subgraphs(node):
            _rename_shadowing(body, names, taken)


def _hoist_matrices(body: Any, outermost: Any) -> None:
    """Move the float matrices of an inner graph, and of graphs inside it, to the outermost graph."""
    from onnx import TensorProto

    ends = {value.name for value in (*body.input, *body.output)}
    for tensor in list(body.initializer):
        if tensor.data_type == TensorProto.FLOAT and len(tensor.dims) >= _MATRIX and tensor.name not in ends:
            outermost.initializer.append(tensor)
            body.initializer.remove(tensor)
    for node in list(body.node):
        is_constant = node.op_type == "Constant" and node.output[0] not in ends
        held = [a.t for a in node.attribute if a.name == "value" and a.HasField("t")] if is_constant else []
        for tensor in held:
            if tensor.data_type == TensorProto.FLOAT and len(tensor.dims) >= _MATRIX:
                tensor.name = node.output[0]
                outermost.initializer.append(tensor)
                body.node.remove(node)
        for inside in subgraphs(node):
            _hoist_matrices(inside, outermost)
