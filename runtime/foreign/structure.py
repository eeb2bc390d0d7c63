"""How the nodes of a graph hang together: names that nothing gives, two that give one, circles, operators."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

_DEEPEST = 16  # graphs inside of nodes inside of graphs
_STANDARD = ("", "ai.onnx")
# of the standard too; ONNX Runtime has more or less all of the first
OF_ONNX = ("ai.onnx.ml", "ai.onnx.training", "ai.onnx.preview", "ai.onnx.preview.training")
_RANDOM = (
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
    "Multinomial",
    "Bernoulli",
)
_IN_TRAINING = ("Dropout", 2)  # the input that says whether it is


def structure_problems(model: Any) -> Iterator[str]:
    """Yield what is wrong with the graph of an onnx.ModelProto and with those inside of its nodes."""
    waiting: list[tuple[Any, frozenset[str], int]] = [(model.graph, frozenset(), 0)]
    while waiting:
        graph, outer, depth = waiting.pop()
        if depth > _DEEPEST:
            yield f"graphs lie inside of graphs more than {_DEEPEST} deep"
            return
        given = {value.name for value in graph.input} | {t.name for t in graph.initializer}
        given |= {sparse.values.name for sparse in graph.sparse_initializer}
        made = _makers(graph.node)
        yield from _twice(graph.node, made, given)
        known = given | set(made) | outer
        yield from _unknown(graph, known)
        yield from _circle(graph.node, made)
        inner = frozenset(known)
        for node in graph.node:
            waiting += [(found, inner, depth + 1) for found in inner_graphs(node)]


def inner_graphs(node: Any) -> list[Any]:
    """Return the graphs that a node holds: the branches of If, the body of Loop and Scan."""
    found = []
    for attribute in node.attribute:
        found += [attribute.g] if attribute.HasField("g") else []
        found += list(attribute.graphs)
    return found


def label(node: Any) -> str:
    """Return how a message calls a node."""
    return f"{node.op_type} '{(node.name or next(iter(node.output), '?'))[:80]}'"


def _makers(nodes: Sequence[Any]) -> dict[str, int]:
    """Return which node gives each value, by the value's name; the last one of several."""
    return {name: at for at, node in enumerate(nodes) for name in node.output if name}


def _twice(nodes: Sequence[Any], made: Mapping[str, int], given: Collection[str]) -> Iterator[str]:
    for at, node in enumerate(nodes):
        for name in node.output:
            if name and (made[name] != at or name in given):
                yield f"two places give the value '{name[:80]}', one of them the node {label(node)}"


def _unknown(graph: Any, known: Collection[str]) -> Iterator[str]:
    for node in graph.node:
        for name in node.input:
            if name and name not in known:
                yield f"the node {label(node)} reads '{name[:80]}', which nothing in the graph gives"
    for value in graph.output:
        if value.name not in known:
            yield f"the graph's output '{value.name[:80]}' is given by no node"


def reads(node: Any) -> set[str]:
    """Return all names that a node reads, those that graphs inside of it read from outside too."""
    names = {name for name in node.input if name}
    for graph in inner_graphs(node):
        inside = {value.name for value in graph.output}.union(*(reads(one) for one in graph.node))
        own = {value.name for value in (*graph.input, *graph.initializer)}
        own |= {sparse.values.name for sparse in graph.sparse_initializer}
        names |= inside - own.union(*(one.output for one in graph.node))
    return names


def _circle(nodes: Sequence[Any], made: Mapping[str, int]) -> Iterator[str]:
    """Name the nodes of one circle, if there is one: no order exists in which they could run (Kahn 1962)."""
    before = [{made[name] for name in reads(node) if name in made} for node in nodes]
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
    names = [label(nodes[place]) for place in [*way[way.index(at) :], at][::-1]]
    shown = " -> ".join(names if len(names) <= 6 else [*names[:3], "...", *names[-2:]])
    yield f"its nodes wait for each other in a circle: {shown}"


def operator_problems(model: Any, known: Collection[tuple[str, str]]) -> Iterator[str]:
    """Yield the operators that neither `known` (domain, name) nor the model's own functions define."""
    own = {(domain_of(f.domain), f.name): f for f in model.functions}
    seen: dict[tuple[str, str], Any] = {}
    calls: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for key, nodes in [(("", ""), model.graph.node), *((key, f.node) for key, f in own.items())]:
        for node in all_nodes(nodes):
            what = (domain_of(node.domain), node.op_type)
            seen.setdefault(what, node)
            calls.setdefault(key, set()).add(what)
    for what, node in seen.items():
        if what not in known and what not in own:
            yield _no_operator(what, node)
    reachable = {key: found & set(own) for key, found in calls.items() if key in own}
    while leaves := [key for key, found in reachable.items() if not found & reachable.keys()]:
        for key in leaves:
            del reachable[key]
    if reachable:
        names = ", ".join(sorted(name for _, name in reachable)[:4])
        yield f"functions of the model call themselves without end: {names}"


def _no_operator(what: tuple[str, str], node: Any) -> str:
    domain, name = what
    if domain in OF_ONNX:
        return (
            f"the node {label(node)} is {domain}.{name}, which the installed ONNX Runtime does not have."
            f" Export the model with an older opset of {domain}, or without this operator"
        )
    if domain:
        return (
            f"the node {label(node)} is the custom operator {domain}.{name}, which ONNX Runtime does not"
            " have. Libraries of operators are not loaded; export the model without it"
        )
    return f"the node {label(node)}: ONNX has no operator {name}"


def random_nodes(model: Any) -> Iterator[str]:
    """Yield the labels of the nodes that draw random numbers, Dropout in training among them."""
    from onnx.numpy_helper import to_array

    nodes = [*all_nodes(model.graph.node), *(n for f in model.functions for n in all_nodes(f.node))]
    truths = [(tensor.name, tensor) for tensor in model.graph.initializer]
    for node in nodes:
        if node.op_type == "Constant" and node.output:
            truths += [(node.output[0], a.t) for a in node.attribute if a.name == "value"]
    off = {n for n, t in truths if t.data_type == 9 and not t.data_location and not any(to_array(t).flat)}
    operator, place = _IN_TRAINING
    for node in nodes:
        if domain_of(node.domain):
            continue
        trains = node.op_type == operator and len(node.input) > place and node.input[place] not in ("", *off)
        if node.op_type in _RANDOM or trains:
            yield label(node)


def all_nodes(nodes: Sequence[Any]) -> Iterator[Any]:
    """Yield `nodes` and those of the graphs inside of them."""
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        yield node
        for graph in inner_graphs(node):
            waiting += graph.node


def domain_of(name: str) -> str:
    """Return the name of a domain, empty for ONNX's own."""
    return "" if name in _STANDARD else name
