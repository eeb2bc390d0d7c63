"""Fold operators that move or cut weights of recurrent layers in inner graphs (If, Loop, Scan).

torch's exporters write the weights of an LSTM as Unsqueeze(Concat(Slice(W), ...)), which reorders its gates;
a quantizer finds constant matrices only. Simplifiers fold them in the outermost graph only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.export.onnx_models.settings import RECURRENT_OPS
from smelt.runtimes.graph_walk import all_nodes, subgraphs

_MOVING_OPS = ("Concat", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")
Constants = Mapping[str, NDArray[Any]]


def fold_moved_weights(model: Any) -> None:
    """Replace such operators before recurrent layers of inner graphs by initializers, in place.

    Equal results are stored once, in the outermost graph; weights that nothing reads any more are removed.
    """
    graph = model.graph
    before = _read_names(graph)
    stored: dict[bytes, str] = {}
    constants = _constants(graph)
    for node in graph.node:
        for body in subgraphs(node):
            _fold_body(body, constants, model, stored)
    if stored:
        unused = before - _read_names(graph)
        for owner in (*reversed(_inner_graphs(graph)), graph):  # extending copies nodes with their graphs
            tensors = [tensor for tensor in owner.initializer if tensor.name not in unused]
            nodes = [n for n in owner.node if n.op_type != "Constant" or not unused.issuperset(n.output)]
            del owner.initializer[:], owner.node[:]
            owner.initializer.extend(tensors)
            owner.node.extend(nodes)


def _fold_body(body: Any, outer: Constants, model: Any, stored: dict[bytes, str]) -> None:
    from onnx import numpy_helper

    constants = dict(outer)
    for name in (*(value.name for value in body.input), *(out for node in body.node for out in node.output)):
        constants.pop(name, None)  # hides the outer value
    constants |= _constants(body)
    outputs = {value.name for value in body.output}
    moved: dict[str, NDArray[Any]] = {}
    for node in body.node:  # in topological order
        if node.op_type not in _MOVING_OPS or node.domain or outputs & {*node.output}:
            continue
        if all(name in constants for name in node.input if name):
            value = _evaluate(node, constants, model)
            constants[node.output[0]] = moved[node.output[0]] = value
    readers = [node for node in all_nodes(body.node) if node.op_type in RECURRENT_OPS]
    names = {}
    for name in sorted({name for node in readers for name in node.input[1:]} & {*moved}):
        key = _content(moved[name])
        if key not in stored:
            stored[key] = name
            model.graph.initializer.append(numpy_helper.from_array(moved[name], name))
        names[name] = stored[key]
    unread = {*names}  # values that nothing needs to compute any more
    for node in reversed(list(body.node)):
        if names and {*node.output} <= unread:
            body.node.remove(node)
            read_names = outputs | {name for other in all_nodes(body.node) for name in other.input}
            unread |= {*moved} - read_names
    for node in all_nodes(body.node):
        node.input[:] = [names.get(name, name) for name in node.input]
    for node in body.node:
        for inner in subgraphs(node):
            _fold_body(inner, constants, model, stored)


def _constants(graph: Any) -> dict[str, NDArray[Any]]:
    """Return the values of a graph's own initializers and Constant nodes."""
    from onnx import numpy_helper

    tensors = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        values = [attribute.t for attribute in node.attribute if attribute.name == "value"]
        if node.op_type == "Constant" and values:
            [tensors[node.output[0]]] = values
    return {name: numpy_helper.to_array(tensor) for name, tensor in tensors.items()}


def _evaluate(node: Any, constants: Constants, model: Any) -> NDArray[Any]:
    from onnx import helper
    from onnx.reference import ReferenceEvaluator

    feeds = {name: constants[name] for name in node.input if name}
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in feeds.items()
    ]
    single = helper.make_graph(
        [node], "folded", inputs, [helper.make_empty_tensor_value_info(node.output[0])]
    )
    one_node_model = helper.make_model(single, opset_imports=list(model.opset_import))
    (value,) = ReferenceEvaluator(one_node_model).run(None, feeds)
    return np.ascontiguousarray(value)


def _content(value: NDArray[Any]) -> bytes:
    return f"{value.dtype} {value.shape} ".encode() + value.tobytes()


def _inner_graphs(graph: Any) -> list[Any]:
    bodies = [body for node in graph.node for body in subgraphs(node)]
    return [inner for body in bodies for inner in (body, *_inner_graphs(body))]


def _read_names(graph: Any) -> set[str]:
    """Return the names that nodes read, at any depth, or that graphs return."""
    names = {name for node in all_nodes(graph.node) for name in node.input}
    return names | {value.name for owner in (graph, *_inner_graphs(graph)) for value in owner.output}
