"""Matrices that several operators of a graph multiply with, stored once.

Layers that share a weight [N, K] have one tensor in torch. Its transpose [K, N], which ONNX multiplies with,
torch's optimizer computes anew for each product and stores each time.
"""

from __future__ import annotations

from typing import Any

_PROBE = 256  # bytes that tell most matrices apart


def store_once(model: Any) -> int:
    """Let equal matrices of an onnx.ModelProto be one, in place; return how many copies went.

    Vectors and what is inside of nodes stay as they are.
    """
    graph = model.graph
    outside = {value.name for value in (*graph.input, *graph.output)}
    firsts: dict[tuple[Any, ...], list[Any]] = {}
    renamed: dict[str, str] = {}
    for tensor in graph.initializer:
        if len(tensor.dims) < 2 or tensor.name in outside:
            continue
        values = tensor.raw_data  # a copy, which protobuf makes each time that it is asked
        if not values:
            continue
        probe = (tensor.data_type, *tensor.dims, values[:_PROBE], values[-_PROBE:])
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
