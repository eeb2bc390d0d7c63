"""Store matrices that are equal only once.

Layers that share a weight [N, K] have one tensor in torch. For each of them torch's optimizer computes the
transpose [K, N], which ONNX multiplies with, again and stores it each time.
"""

from __future__ import annotations

from typing import Any

_PROBE_ELEMENTS = 256  # bytes that distinguish most matrices


def deduplicate_matrices(model: Any) -> int:
    """Merge equal matrices of an onnx.ModelProto, in place; return the number of removed copies.

    Vectors and attributes of nodes are not changed.
    """
    graph = model.graph
    outside = {value.name for value in (*graph.input, *graph.output)}
    firsts: dict[tuple[Any, ...], list[Any]] = {}
    renamed: dict[str, str] = {}
    for tensor in graph.initializer:
        if len(tensor.dims) < 2 or tensor.name in outside:
            continue
        values = tensor.raw_data  # a copy, which protobuf creates at each access
        if not values:
            continue
        probe = (tensor.data_type, *tensor.dims, values[:_PROBE_ELEMENTS], values[-_PROBE_ELEMENTS:])
        alike = firsts.setdefault(probe, [])
        same = next((first for first in alike if first.raw_data == values), None)
        if same is None:
            alike.append(tensor)
        else:
            renamed[tensor.name] = same.name
    if renamed:
        for node in graph.node:
            for place, name in enumerate(node.input):
                node.input[place] = renamed.get(name, name)
        for place in reversed(range(len(graph.initializer))):
            if graph.initializer[place].name in renamed:
                del graph.initializer[place]
    return len(renamed)
