"""Checks the structure of a graph: undefined and duplicate names, cycles, operators."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from smelt.core.messages import Message, error_message
from smelt.runtimes.graph_walk import all_nodes, node_inputs, normalized_domain, subgraphs

_MAX_DEPTH = 16  # depth of nested subgraphs
# domains of the standard; ONNX Runtime has almost all operators of the first
ONNX_DOMAINS = ("ai.onnx.ml", "ai.onnx.training", "ai.onnx.preview", "ai.onnx.preview.training")
_RANDOM = (
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
    "Multinomial",
    "Bernoulli",
)
_TRAINING_MODE_INPUT = ("Dropout", 2)  # the input with the training mode


def structure_problems(model: Any) -> Iterator[Message]:
    """Yield what is wrong with the graph of an onnx.ModelProto and with its subgraphs."""
    waiting: list[tuple[Any, frozenset[str], int]] = [(model.graph, frozenset(), 0)]
    while waiting:
        graph, outer, depth = waiting.pop()
        if depth > _MAX_DEPTH:
            text = f"subgraphs are nested more than {_MAX_DEPTH} deep"
            yield error_message("subgraphs-too-deep", text)
            return
        given = {value.name for value in graph.input} | {t.name for t in graph.initializer}
        given |= {sparse.values.name for sparse in graph.sparse_initializer}
        producers = _producers(graph.node)
        yield from _duplicate_outputs(graph.node, producers, given)
        known = given | set(producers) | outer
        yield from _undefined_inputs(graph, known)
        yield from _find_cycle(graph.node, producers)
        inner = frozenset(known)
        for node in graph.node:
            waiting += [(found, inner, depth + 1) for found in subgraphs(node)]


def node_label(node: Any) -> str:
    """Return the name of a node in messages."""
    return f"{node.op_type} '{(node.name or next(iter(node.output), '?'))[:80]}'"


def _producers(nodes: Sequence[Any]) -> dict[str, int]:
    """Return the node index of each value by name; the last one of several."""
    return {name: at for at, node in enumerate(nodes) for name in node.output if name}


def _duplicate_outputs(
    nodes: Sequence[Any], producers: Mapping[str, int], given: Collection[str]
) -> Iterator[Message]:
    for at, node in enumerate(nodes):
        for name in node.output:
            if name and (producers[name] != at or name in given):
                text = f"the value '{name[:80]}' is defined twice, once by the node {node_label(node)}"
                yield error_message("duplicate-value", text)


def _undefined_inputs(graph: Any, known: Collection[str]) -> Iterator[Message]:
    for node in graph.node:
        for name in node.input:
            if name and name not in known:
                text = f"the node {node_label(node)} reads '{name[:80]}', which is not defined in the graph"
                yield error_message("undefined-input", text)
    for value in graph.output:
        if value.name not in known:
            text = f"the graph's output '{value.name[:80]}' is not defined by any node"
            yield error_message("undefined-output", text)


def _find_cycle(nodes: Sequence[Any], producers: Mapping[str, int]) -> Iterator[Message]:
    """Yield the nodes of one cycle, if there is one: they cannot be ordered (Kahn 1962)."""
    before = [{producers[name] for name in node_inputs(node) if name in producers} for node in nodes]
    after: list[list[int]] = [[] for _ in nodes]
    for at, froms in enumerate(before):
        for source in froms:
            after[source].append(at)
    open_ends = [len(froms) for froms in before]
    ready = deque(at for at, count in enumerate(open_ends) if not count)
    done = 0
    while ready:
        done += 1
        for at in after[ready.popleft()]:
            open_ends[at] -= 1
            if not open_ends[at]:
                ready.append(at)
    if done == len(nodes):
        return
    left = {at for at, count in enumerate(open_ends) if count}
    way: list[int] = []
    at = min(left)
    while at not in way:
        way.append(at)
        at = next(source for source in before[at] if source in left)
    names = [node_label(nodes[place]) for place in [*way[way.index(at) :], at][::-1]]
    shown = " -> ".join(names if len(names) <= 6 else [*names[:3], "...", *names[-2:]])
    yield error_message("cycle", f"its nodes form a cycle: {shown}")


def operator_problems(model: Any, known: Collection[tuple[str, str]]) -> Iterator[Message]:
    """Yield the operators that neither `known` (domain, name) nor the model's own functions define."""
    own = {(normalized_domain(f.domain), f.name): f for f in model.functions}
    seen: dict[tuple[str, str], Any] = {}
    calls: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for key, nodes in [(("", ""), model.graph.node), *((key, f.node) for key, f in own.items())]:
        for node in all_nodes(nodes):
            what = (normalized_domain(node.domain), node.op_type)
            seen.setdefault(what, node)
            calls.setdefault(key, set()).add(what)
    for what, node in seen.items():
        if what not in known and what not in own:
            yield _unknown_operator_problem(what, node)
    reachable = {key: found & set(own) for key, found in calls.items() if key in own}
    while leaves := [key for key, found in reachable.items() if not found & reachable.keys()]:
        for key in leaves:
            del reachable[key]
    if reachable:
        names = ", ".join(sorted(name for _, name in reachable)[:4])
        yield error_message("recursive-functions", f"functions of the model are recursive: {names}")


def _unknown_operator_problem(what: tuple[str, str], node: Any) -> Message:
    domain, name = what
    if domain in ONNX_DOMAINS:
        return error_message(
            "missing-operator",
            f"the node {node_label(node)} is {domain}.{name}, which the installed ONNX Runtime does not have."
            f" Export the model with an older opset of {domain}, or without this operator",
        )
    if domain:
        return error_message(
            "custom-operator",
            f"the node {node_label(node)} is the custom operator {domain}.{name}, which ONNX Runtime does not"
            " support. Operator libraries are not loaded; export the model without it",
        )
    return error_message("unknown-operator", f"the node {node_label(node)}: ONNX has no operator {name}")


def random_nodes(model: Any) -> Iterator[str]:
    """Yield the labels of the nodes that draw random numbers, including Dropout in training mode."""
    from onnx.numpy_helper import to_array

    nodes = [*all_nodes(model.graph.node), *(n for f in model.functions for n in all_nodes(f.node))]
    truths = [(tensor.name, tensor) for tensor in model.graph.initializer]
    for node in nodes:
        if node.op_type == "Constant" and node.output:
            truths += [(node.output[0], a.t) for a in node.attribute if a.name == "value"]
    off = {n for n, t in truths if t.data_type == 9 and not t.data_location and not any(to_array(t).flat)}
    operator, place = _TRAINING_MODE_INPUT
    for node in nodes:
        if normalized_domain(node.domain):
            continue
        trains = node.op_type == operator and len(node.input) > place and node.input[place] not in ("", *off)
        if node.op_type in _RANDOM or trains:
            yield node_label(node)
