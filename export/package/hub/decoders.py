"""A translator's graphs as Optimum and transformers.js want them, made of smelt's two.

smelt's encoder also gives the keys and values of cross-attention, and its decoder's step takes caches of no
places at first. There an encoder gives its hidden states alone, and the decoder's first graph makes those
keys and values of them. So the nodes that make them move; all others stay as they are.

| graph | inputs | outputs |
|---|---|---|
| encoder | input_ids, attention_mask | last_hidden_state |
| first | input_ids, encoder_attention_mask, encoder_hidden_states | logits, present of both kinds |
| next | input_ids, encoder_attention_mask, past_key_values of both kinds | logits, present.{i}.decoder |
| merged | of first and next, use_cache_branch bool [1] | as first |

Shapes: B = batch, L = source length, P = past length, H = heads, d = width of a head, V = vocabulary;
input_ids [B, 1], logits [B, 1, V], caches [B, H, P, d] and [B, H, L, d]. Caches follow each other as the
tools number them: key and value of the decoder, then of the encoder. Source of the names:
optimum/onnxruntime/modeling_seq2seq.py (0.1.0).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from smelt.core.errors import RunError

HIDDEN, STATES, MASK, BRANCH = (
    "last_hidden_state",
    "encoder_hidden_states",
    "encoder_attention_mask",
    "use_cache_branch",
)
_OWN_NAMES = "cross."  # before the names of what came from the encoder's graph


@dataclass(frozen=True)
class Cross:
    """What makes keys and values of cross-attention from `encoder_hidden_states`.

    nodes, weights: NodeProtos and TensorProtos. outputs: ValueInfoProtos, `present.{i}.encoder.*`.
    """

    nodes: list[Any]
    weights: list[Any]
    outputs: list[Any]


@dataclass(frozen=True)
class Layout:
    """The four graphs of the table, as onnx.ModelProto."""

    encoder: Any
    first: Any
    next: Any
    merged: Any


def layout_of(encoder: Any, decoder: Any) -> Layout:
    """Return the graphs made of smelt's `encoder` and `decoder`, each an onnx.ModelProto.

    Weights may lie outside; what is returned names the same places.

    Raises:
        RunError: keys and values are made of more than hidden states.
    """
    cross = _cross_of(encoder.graph)
    states = _named(next(o for o in encoder.graph.output if o.name == HIDDEN), STATES)
    return Layout(
        _encoder(encoder), _first(decoder, cross, states), _next(decoder), _merged(decoder, cross, states)
    )


def _cross_of(graph: Any) -> Cross:
    """Cut what makes the keys and values out of the encoder's `graph`, as copies."""
    outputs = [o for o in graph.output if o.name != HIDDEN]
    found = _needed(graph, [o.name for o in outputs], stop=HIDDEN)
    renamed = {HIDDEN: STATES, "attention_mask": MASK} | {o.name: o.name for o in outputs}
    nodes = []
    for node in (_copy(one) for one in found):
        if "input_ids" in node.input and node.op_type != "Shape":
            raise RunError(
                f"encoder_model.onnx: node '{node.name}' ({node.op_type}) makes keys or values of"
                " cross-attention from input_ids, not from the hidden states; this layout cannot hold it.",
                code="unsupported-graph",
                file="encoder_model.onnx",
            )
        node.name = _OWN_NAMES + node.name
        # the mask has the shape of the ids
        names = renamed | {"input_ids": MASK}
        _rename(node.input, names, _OWN_NAMES)
        _rename(node.output, names, _OWN_NAMES)
        nodes.append(node)
    read = {name for node in found for name in node.input}
    weights = [_named(w, _OWN_NAMES + w.name) for w in graph.initializer if w.name in read]
    return Cross(nodes, weights, [_copy(o) for o in outputs])


def _encoder(model: Any) -> Any:
    """Return the encoder without what makes keys and values."""
    nodes = _needed(model.graph, [HIDDEN])
    read = {name for node in nodes for name in node.input}
    outputs = [o for o in model.graph.output if o.name == HIDDEN]
    weights = [w for w in model.graph.initializer if w.name in read]
    return _made(model, nodes, list(model.graph.input), outputs, weights)


def _first(decoder: Any, cross: Cross, states: Any) -> Any:
    """Return the decoder's graph for the first token."""
    from onnx import helper

    graph = decoder.graph
    own = [i for i in graph.input if _is_cache(i.name, "decoder")]
    start = [helper.make_node("Shape", ["input_ids"], ["first.batch"], "first.batch", start=0, end=1)]
    weights = [*cross.weights]
    for one in own:
        nodes, sizes = _nothing(one)
        start += nodes
        weights.append(sizes)
    nodes = [*start, *cross.nodes, *_step(graph)]
    inputs = [*(i for i in graph.input if not i.name.startswith("past_")), states]
    return _made(decoder, nodes, inputs, _outputs(graph, cross), [*graph.initializer, *weights])


def _next(decoder: Any) -> Any:
    """Return the decoder's graph for all other tokens; no encoder's names change."""
    graph = decoder.graph
    nodes = [*(_copy(node) for node in graph.node)]
    logits = _by_token(nodes, graph)
    outputs = [logits, *(o for o in graph.output if o.name != "logits")]
    return _made(decoder, nodes, _in_layers(graph.input), outputs, list(graph.initializer))


def _merged(decoder: Any, cross: Cross, states: Any) -> Any:
    """Return one graph for all tokens: keys and values of cross-attention come from one of two places."""
    from onnx import TensorProto, helper

    graph = decoder.graph
    names = [o.name for o in cross.outputs]
    # the outputs of both branches have names of their own
    here = [_copy(node) for node in cross.nodes]
    for node in here:
        for ends in (node.input, node.output):  # one may read what another gives
            _rename(ends, {name: f"made.{name}" for name in names})
    made = [_named(o, f"made.{o.name}") for o in cross.outputs]
    given = [_named(o, f"given.{o.name}") for o in cross.outputs]
    pasts = [_past(name) for name in names]
    take = [helper.make_node("Identity", [p], [g.name], g.name) for p, g in zip(pasts, given, strict=True)]
    choice = helper.make_node(
        "If", [BRANCH], names, "cross_attention",
        then_branch=helper.make_graph(take, "given", [], given),
        else_branch=helper.make_graph(here, "made", [], made),
    )  # fmt: skip
    branch = helper.make_tensor_value_info(BRANCH, TensorProto.BOOL, [1])
    inputs = [*_in_layers(graph.input), states, branch]
    nodes = [choice, *_step(graph)]
    return _made(decoder, nodes, inputs, _outputs(graph, cross), [*graph.initializer, *cross.weights])


def _step(graph: Any) -> list[Any]:
    """Return copies of the decoder's nodes that read the keys and values which the same graph gives."""
    nodes = [_copy(node) for node in graph.node]
    renamed = {i.name: _present(i.name) for i in graph.input if _is_cache(i.name, "encoder")}
    for node in nodes:
        _rename(node.input, renamed)
    _by_token(nodes, graph)
    return nodes


def _by_token(nodes: list[Any], graph: Any) -> Any:
    """Let `logits` [B, V] of `nodes` be [B, 1, V], in place; return what describes them."""
    from onnx import helper

    described = _copy(next(o for o in graph.output if o.name == "logits"))
    known = {name for node in nodes for name in (node.name, *node.output)}
    word = "logits"
    while known & {f"{word}.of_token", f"{word}.axis"}:  # a package that was read again
        word += "_"
    inner, by = f"{word}.of_token", f"{word}.axis"
    for node in nodes:
        _rename(node.output, {"logits": inner})
        _rename(node.input, {"logits": inner})
    axis = helper.make_node("Constant", [], [by], by, value_ints=[1])
    nodes += [axis, helper.make_node("Unsqueeze", [inner, by], ["logits"], word)]
    dims = described.type.tensor_type.shape.dim
    batch, words = _copy(dims[0]), _copy(dims[1])
    del dims[:]
    one = type(batch)(dim_value=1)
    dims.extend([batch, one, words])
    return described


def _outputs(graph: Any, cross: Cross) -> list[Any]:
    logits = _by_token([], graph)
    return _in_layers([logits, *(o for o in graph.output if o.name != "logits"), *cross.outputs])


def _nothing(cache: Any) -> tuple[list[Any], Any]:
    """Return nodes that make the value `cache` [B, H, 0, d] of the value first.batch, and what they read."""
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    tensor = cache.type.tensor_type
    _, heads, _, width = (d.dim_value for d in tensor.shape.dim)
    sizes = numpy_helper.from_array(np.array([heads, 0, width]), f"first.sizes.{cache.name}")
    zero = helper.make_tensor("zero", tensor.elem_type or TensorProto.FLOAT, [1], [0.0])
    shape = f"first.shape.{cache.name}"
    return [
        helper.make_node("Concat", ["first.batch", sizes.name], [shape], shape, axis=0),
        helper.make_node("ConstantOfShape", [shape], [cache.name], f"first.{cache.name}", value=zero),
    ], sizes


def _needed(graph: Any, outputs: Iterable[str], stop: str | None = None) -> list[Any]:
    """Return the nodes that give `outputs`, in their order; `stop` is taken as given."""
    wanted, found = set(outputs), []
    for node in reversed(graph.node):
        if wanted.intersection(node.output) and stop not in node.output:
            found.append(node)
            wanted.update(node.input)
    return found[::-1]


def _in_layers(values: Iterable[Any]) -> list[Any]:
    """Return `values` with the caches behind the rest, by layer, the decoder's before the encoder's."""

    def place(value: Any) -> tuple[int, int]:
        if not value.name.startswith(("past_key_values.", "present.")):
            return -1, 0
        layer, kind = value.name.split(".")[1:3]
        return int(layer), int(kind == "encoder")

    return sorted(values, key=place)


def _is_cache(name: str, kind: str) -> bool:
    return name.startswith("past_key_values.") and f".{kind}." in name


def _past(name: str) -> str:
    return f"past_key_values.{name.removeprefix('present.')}"


def _present(name: str) -> str:
    return f"present.{name.removeprefix('past_key_values.')}"


def _rename(names: Any, renamed: Mapping[str, str], prefix: str = "") -> None:
    """Rename in place; what `renamed` does not have gets `prefix`; what is left out stays so."""
    for place, name in enumerate(names):
        if name:
            names[place] = renamed.get(name, prefix + name)


def _copy(message: Any) -> Any:
    new = type(message)()
    new.CopyFrom(message)
    return new


def _named(message: Any, name: str) -> Any:
    new = _copy(message)
    new.name = name
    return new


def name_batch(graph: Any) -> None:
    """Call the dimension of rows `batch_size`, in place.

    transformers.js (4.3, `resolveCacheShape`) makes the caches of a first step by this name.
    """
    for value in (*graph.input, *graph.output):
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_param == "batch":
                dimension.dim_param = "batch_size"


def _made(model: Any, nodes: list[Any], inputs: list[Any], outputs: list[Any], weights: list[Any]) -> Any:
    """Return a model of these parts with the operator sets of `model`."""
    from onnx import helper

    graph = helper.make_graph(nodes, model.graph.name, inputs, outputs, weights)
    name_batch(graph)
    return helper.make_model(
        graph, opset_imports=list(model.opset_import), ir_version=model.ir_version, producer_name="smelt"
    )
