"""What a graph is, in lines that do not depend on the names that its values were given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def ordered_constants(graph: Any) -> dict[str, Any]:
    """Return a graph's constants in the order of their use, so that two that changed places are noticed.

    One without a name of its own is called by the operator that takes it.
    """
    from onnx import numpy_helper

    users: dict[str, str] = {}
    for node in graph.node:
        for name in node.input:
            users.setdefault(name, node.op_type)
    tensors = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    ordered = [name for name in users if name in tensors]
    ordered += sorted(tensors.keys() - users.keys())
    return {
        f"{index:05}.{name if '.' in name else users.get(name, name)}": tensors[name]
        for index, name in enumerate(ordered)
        if tensors[name].dtype.kind in "fiu"
    }


def outline_lines(model: Any) -> Iterator[str]:
    """Describe inputs, outputs, constants and nodes; values have numbers instead of names."""

    numbers: dict[str, int] = {"": -1}
    for value in (*model.graph.input, *model.graph.output):
        sizes = [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
        yield f"{value.name} {value.type.tensor_type.elem_type} {sizes}"
        numbers.setdefault(value.name, len(numbers))
    yield from _node_lines(model.graph, numbers, {})


def _node_lines(graph: Any, places: dict[str, int], shapes: dict[str, str]) -> Iterator[str]:
    """Describe the nodes of a graph, those of the graphs inside of them behind each."""
    import onnx

    shapes = shapes | {t.name: f"{t.data_type} {list(t.dims)}" for t in graph.initializer}
    nested_types = (onnx.AttributeProto.TENSOR, onnx.AttributeProto.GRAPH)
    for node in graph.node:
        inputs = [shapes.get(n) or places.setdefault(n, len(places)) for n in node.input]
        attributes = sorted(
            f"{a.name}={_rounded_value(onnx.helper.get_attribute_value(a))}"
            for a in node.attribute
            if a.type not in nested_types
        )
        outputs = [places.setdefault(n, len(places)) for n in node.output]
        yield f"{node.domain}::{node.op_type} {inputs} {attributes} {outputs}"
        for a in node.attribute:
            if a.type == onnx.AttributeProto.GRAPH:
                numbers = [places.setdefault(v.name, len(places)) for v in a.g.input]
                yield f"{a.name} of {numbers}"
                yield from _node_lines(a.g, places, shapes)
                yield f"gives {[places[v.name] for v in a.g.output]}"


def _rounded_value(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value
