"""Detects small files with unlimited demands: functions with billions of nodes, loops of 10^18 trips.

Checked before a runtime opens the file, because it would inline every function.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from smelt.core.messages import Message, error_message
from smelt.runtime.third_party.graph_structure import all_nodes, node_label, normalized_domain, subgraphs

_MAX_NODES = 1_000_000  # after inlining of functions; a large language model has 10,000
_MAX_TRIPS = 1_000_000_000  # one second, at a nanosecond each


def function_expansion_problems(model: Any) -> Iterator[Message]:
    """Yield a problem if inlining the functions, none of which is recursive, gives too many nodes."""
    own = {(normalized_domain(function.domain), function.name): function for function in model.functions}
    if own and (count := _expanded_node_count(model.graph.node, own)) > _MAX_NODES:
        yield error_message(
            "too-many-nodes",
            f"its functions call each other so often that inlining gives {float(count):.3g} nodes; at most"
            f" {_MAX_NODES:,} are supported: export it without functions, or with fewer calls",
        )


def _expanded_node_count(nodes: Sequence[Any], functions: Mapping[tuple[str, str], Any]) -> int:
    """Return the number of nodes after a runtime has inlined all functions."""
    sizes: dict[tuple[str, str], int] = {}

    def of(inside: Sequence[Any]) -> int | None:
        """Return the number of these nodes; None where that of one of their functions is not known yet."""
        keys = [(normalized_domain(node.domain), node.op_type) for node in all_nodes(inside)]
        if any(key in functions and key not in sizes for key in keys):
            return None
        return sum(sizes.get(key, 1) for key in keys)

    waiting = list(functions)
    while waiting:  # none is recursive, so each round determines one
        found = {key: size for key in waiting if (size := of(functions[key].node)) is not None}
        sizes |= found
        waiting = [key for key in waiting if key not in found]
    return of(nodes) or 0


def infinite_loop_problems(model: Any) -> Iterator[Message]:
    """Yield the loops that are endless by the file itself: too many trips, without a changing condition.

    Exporters write the largest number where a condition ends the loop; the body then computes
    the condition.
    """
    waiting: list[tuple[Any, dict[str, int]]] = [
        (model.graph, {}),
        *((function, {}) for function in model.functions),
    ]
    while waiting:
        graph, outer = waiting.pop()
        known = outer | _integer_constants(graph)
        for node in graph.node:
            waiting += [(inner, known) for inner in subgraphs(node)]
            if node.op_type != "Loop" or normalized_domain(node.domain):
                continue
            body = next(a.g for a in node.attribute if a.name == "body")
            trips = known.get(node.input[0]) if node.input and node.input[0] else _MAX_TRIPS + 1
            if trips is not None and trips > _MAX_TRIPS and not _may_terminate(body):
                code, number = (
                    ("too-many-trips", f"{float(trips):.3g} trips")
                    if node.input[0]
                    else ("unlimited-trips", "no number of trips")
                )
                yield error_message(
                    code,
                    f"the node {node_label(node)} has {number}, and its body does not change the condition",
                )


def _integer_constants(graph: Any) -> dict[str, int]:
    """Return the scalar integer constants of a graph, by name."""
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
    return {n: int(numpy_helper.to_array(t).reshape(-1)[0]) for n, t in small if _is_single_value(t)}


def _is_single_value(tensor: Any) -> bool:
    return math.prod(tensor.dims) == 1 and (len(tensor.raw_data) == 8 or len(tensor.int64_data) == 1)


def _may_terminate(body: Any) -> bool:
    """Return whether the body of a loop computes the condition for its next trip."""
    if len(body.input) < 2 or not body.output:
        return True  # not such a loop: reported elsewhere
    given = {body.input[1].name, *(tensor.name for tensor in body.initializer)}
    for node in body.node:
        if node.op_type == "Constant" or (node.op_type == "Identity" and node.input[0] in given):
            given.update(node.output)
    return body.output[0].name not in given
