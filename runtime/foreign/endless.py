"""What a small file asks for without end: functions that unfold to billions of nodes, loops of 10^18 trips.

Looked for before a runtime opens the file, which would put every function's nodes in the place of its calls.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from smelt.runtime.foreign.structure import all_nodes, domain_of, inner_graphs, label

_MOST_NODES = 1_000_000  # that calls of functions may unfold to; a large language model has 10,000
_MOST_TRIPS = 1_000_000_000  # at a nanosecond each a second


def function_problems(model: Any) -> Iterator[str]:
    """Yield that calls of functions, none of which calls itself, unfold to more nodes than anybody opens."""
    own = {(domain_of(function.domain), function.name): function for function in model.functions}
    if own and (count := _unfolded(model.graph.node, own)) > _MOST_NODES:
        yield (
            f"its functions call each other so often that they unfold to {float(count):.3g} nodes, and at"
            f" most {_MOST_NODES:,} are opened: export it without functions, or with fewer calls"
        )


def _unfolded(nodes: Sequence[Any], own: Mapping[tuple[str, str], Any]) -> int:
    """Return how many nodes are there once a runtime has put every function's in the place of its calls."""
    sizes: dict[tuple[str, str], int] = {}

    def of(inside: Sequence[Any]) -> int | None:
        """Return the size of these nodes; None where that of a function among them is not known yet."""
        keys = [(domain_of(node.domain), node.op_type) for node in all_nodes(inside)]
        if any(key in own and key not in sizes for key in keys):
            return None
        return sum(sizes.get(key, 1) for key in keys)

    waiting = list(own)
    while waiting:  # none of them calls itself, so in each round one is known
        found = {key: size for key in waiting if (size := of(own[key].node)) is not None}
        sizes |= found
        waiting = [key for key in waiting if key not in found]
    return of(nodes) or 0


def loop_problems(model: Any) -> Iterator[str]:
    """Yield the loops that the file itself says to be endless: so many trips that no condition can cut short.

    Exporters write the largest number there is where a condition ends the loop; that is one that the body
    computes.
    """
    waiting: list[tuple[Any, dict[str, int]]] = [
        (model.graph, {}),
        *((function, {}) for function in model.functions),
    ]
    while waiting:
        graph, outer = waiting.pop()
        known = outer | _constants(graph)
        for node in graph.node:
            waiting += [(inner, known) for inner in inner_graphs(node)]
            if node.op_type != "Loop" or domain_of(node.domain):
                continue
            body = next(a.g for a in node.attribute if a.name == "body")
            trips = known.get(node.input[0]) if node.input and node.input[0] else _MOST_TRIPS + 1
            if trips is not None and trips > _MOST_TRIPS and not _may_stop(body):
                number = f"{float(trips):.3g} trips" if node.input[0] else "no number of trips"
                yield f"the node {label(node)} has {number}, and a condition that nothing in it changes"


def _constants(graph: Any) -> dict[str, int]:
    """Return the whole numbers that a graph holds, each alone, by name."""
    from onnx import TensorProto, numpy_helper

    tensors = [(tensor.name, tensor) for tensor in getattr(graph, "initializer", ())]
    tensors += [
        (node.output[0], attribute.t)
        for node in graph.node
        if node.op_type == "Constant" and node.output
        for attribute in node.attribute
        if attribute.name == "value"
    ]
    small = [(n, t) for n, t in tensors if t.data_type == TensorProto.INT64 and not math.prod(t.dims) > 1]
    return {n: int(numpy_helper.to_array(t).reshape(-1)[0]) for n, t in small if _holds_one(t)}


def _holds_one(tensor: Any) -> bool:
    return math.prod(tensor.dims) == 1 and (len(tensor.raw_data) == 8 or len(tensor.int64_data) == 1)


def _may_stop(body: Any) -> bool:
    """Say whether the body of a loop computes the condition for its next trip."""
    if len(body.input) < 2 or not body.output:
        return True  # no such loop: what it is, others say
    given = {body.input[1].name, *(tensor.name for tensor in body.initializer)}
    for node in body.node:
        if node.op_type == "Constant" or (node.op_type == "Identity" and node.input[0] in given):
            given.update(node.output)
    return body.output[0].name not in given
