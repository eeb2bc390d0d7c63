"""The graphs that smelt's runners call, made of those that Optimum's classes call.

No node computes otherwise. Optimum's first decoder makes the keys and values of cross-attention of the
encoder's hidden states; here the
encoder's graph makes them, once for a text. Its decoder for all later tokens takes the first one too: with
caches of no places (whether it does is tried, see `trial.py`).

Shapes: B = batch, L = source length, P = tokens before, H = heads, d = width of a head, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from smelt.core.errors import InputError
from smelt.runtime.foreign.generators.edit import copied, needed, renamed, used, with_branch
from smelt.runtime.foreign.generators.layout import (
    BRANCH,
    ENCODER,
    FIRST,
    MERGED,
    NEXT,
    PAST,
    PRESENT,
    STATES,
)
from smelt.runtime.foreign.structure import reads

HIDDEN, MASK, SOURCE_MASK = "last_hidden_state", "attention_mask", "encoder_attention_mask"
_CROSS, _ROWS = "cross.", "cross.rows"
_SQUEEZE_BY_INPUT = 13  # since this opset axes are an input


def in_two(parts: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Return encoder and decoder as smelt calls them, and Optimum's graph for the first token alone.

    Args:
        parts: onnx.ModelProtos by name, of one of the layouts in `layout.py`; weights may lie outside.

    Raises:
        InputError: they do not go together.
    """
    encoder, some = parts[ENCODER], parts.get(MERGED)
    if some is not None:
        later, first = (_specialized(some, value) for value in (True, False))
    else:
        later, first = parts[NEXT], parts[FIRST]
    opsets = [_opsets(model) for model in (encoder, first, later)]
    if any(said != opsets[0] for said in opsets):
        raise InputError(
            "encoder and decoder have operators of different opsets: export them together",
            code="opset-mismatch",
        )
    wanted = [i.name.removeprefix(PAST) for i in later.graph.input if _is_cross(i.name, PAST)]
    return _encoder(encoder, first, wanted), _decoder(later), first


def in_one(model: Any) -> Any:
    """Return the graph of a language model as smelt calls it: with places, whether it reads them or not.

    Raises:
        InputError: its caches are int8.
    """
    from onnx import TensorProto, helper

    graph = model.graph
    inputs = [copied(value) for value in graph.input]
    caches = [value for value in inputs if value.name.startswith(PAST)]
    if any(value.type.tensor_type.elem_type == TensorProto.INT8 for value in caches):
        raise InputError(
            "its caches are int8, which round what its calls are compared by: start from the folder with"
            " weights, or from a graph with float caches",
            code="unsupported-cache",
        )
    if all(value.name != "position_ids" for value in inputs):
        inputs.append(helper.make_tensor_value_info("position_ids", TensorProto.INT64, [None, None]))
    sizes = {
        "input_ids": ("batch", "sequence_length"), "position_ids": ("batch", "sequence_length"),
        MASK: ("batch", "total_sequence_length"),
    }  # fmt: skip
    for value in inputs:
        _name_sizes(value, sizes.get(value.name), "past_sequence_length")
    outputs = [o for o in graph.output if o.name == "logits" or o.name.startswith(PRESENT)]
    return _model(model, needed(graph.node, [o.name for o in outputs]), inputs, outputs, graph.initializer)


def set_caches(model: Any, shapes: Mapping[str, tuple[int, int]]) -> None:
    """Write the heads and the width of each cache into the inputs of `model`, where they stood as names."""
    for value in model.graph.input:
        if value.name in shapes:
            dims = value.type.tensor_type.shape.dim
            dims[1].dim_value, dims[3].dim_value = shapes[value.name]


def _specialized(model: Any, value: bool) -> Any:
    from onnx import helper

    graph = with_branch(model.graph, BRANCH, value)
    if any(BRANCH in reads(node) for node in graph.node):
        raise InputError(
            f"{MERGED}.onnx: {BRANCH} chooses something else than branches of If", code="unsupported-graph"
        )
    return helper.make_model(graph, opset_imports=list(model.opset_import), ir_version=model.ir_version)


def _encoder(encoder: Any, first: Any, wanted: list[str]) -> Any:
    """Return the encoder with what makes keys and values of its hidden states, `present.{i}.encoder.*`."""
    from onnx import TensorProto, helper, numpy_helper

    names = {f"{PRESENT}{name}" for name in wanted}
    outputs = [o for o in first.graph.output if o.name in names]
    if len(outputs) != len(names):
        raise InputError(
            "the decoder takes keys and values of the encoder that its first graph does not leave",
            code="missing-cache",
        )
    found = needed(first.graph.node, names)
    known = {STATES: HIDDEN, SOURCE_MASK: MASK, "input_ids": _ROWS} | {name: name for name in names}
    made = renamed(found, lambda name: known.get(name, _CROSS + name), _CROSS)
    weights = [copied(tensor) for tensor in used(first.graph.initializer, found)]
    for tensor in weights:
        tensor.name = known.get(tensor.name, _CROSS + tensor.name)
    if any("input_ids" in reads(node) for node in found):
        # how many rows there are, is all that keys and values can want to know of the decoder's tokens
        import numpy as np

        ends = {f"{_ROWS}.{word}": np.array([n]) for word, n in (("start", 0), ("end", 1), ("axis", 1))}
        weights += [numpy_helper.from_array(value, name) for name, value in ends.items()]
        made.insert(0, helper.make_node("Slice", [MASK, *ends], [_ROWS], _ROWS))
    graph = encoder.graph
    inputs = [copied(value) for value in graph.input]
    if all(value.name != MASK for value in inputs):
        inputs.append(helper.make_tensor_value_info(MASK, TensorProto.INT64, [None, None]))
    for value in inputs:
        _name_sizes(value, ("batch", "encoder_length"), "")
    own = needed(graph.node, [HIDDEN])
    hidden = [o for o in graph.output if o.name == HIDDEN]
    return _model(encoder, [*own, *made], inputs, [*hidden, *outputs], [*graph.initializer, *weights])


def _decoder(later: Any) -> Any:
    """Return the decoder's step: logits [B, V], caches of any number of places."""
    from onnx import TensorProto, helper

    graph = later.graph
    outputs = [copied(o) for o in graph.output if o.name == "logits" or _is_own(o.name)]
    nodes = [copied(node) for node in needed(graph.node, [o.name for o in outputs])]
    if any(STATES in reads(node) for node in nodes):
        raise InputError(
            f"its decoder reads {STATES} at every token, where keys and values of them are expected",
            code="unsupported-graph",
        )
    weights = list(graph.initializer)
    nodes += _squeezed(nodes, outputs, weights, later)
    inputs = [copied(i) for i in graph.input if i.name != STATES]
    if all(value.name != SOURCE_MASK for value in inputs):
        inputs.append(helper.make_tensor_value_info(SOURCE_MASK, TensorProto.INT64, [None, None]))
    sizes: dict[str, tuple[str | int, ...]] = {
        SOURCE_MASK: ("batch", "encoder_length"),
        "input_ids": ("batch", 1),
    }
    for value in inputs:
        past = "encoder_length" if _is_cross(value.name, PAST) else "past_length"
        _name_sizes(value, sizes.get(value.name), past)
    return _model(later, nodes, inputs, outputs, weights)


def _squeezed(nodes: list[Any], outputs: list[Any], weights: list[Any], model: Any) -> list[Any]:
    """Let `logits` [B, 1, V] be [B, V], in place; return the node that is still to come."""
    import numpy as np
    from onnx import helper, numpy_helper

    known = {name for node in nodes for name in (node.name, *node.output)} | {w.name for w in weights}
    wide, axis, squeeze = (_new(f"one_token.{word}", known) for word in ("logits", "axis", "squeeze"))
    for node in nodes:
        for names in (node.input, node.output):
            names[:] = [wide if name == "logits" else name for name in names]
    shape = next(o for o in outputs if o.name == "logits").type.tensor_type.shape
    if len(shape.dim) == 3:
        del shape.dim[1]
    if dict(_opsets(model)).get("", _SQUEEZE_BY_INPUT) < _SQUEEZE_BY_INPUT:
        return [helper.make_node("Squeeze", [wide], ["logits"], squeeze, axes=[1])]
    weights.append(numpy_helper.from_array(np.array([1]), axis))
    return [helper.make_node("Squeeze", [wide, axis], ["logits"], squeeze)]


def _new(name: str, known: set[str]) -> str:
    """Return `name`, longer where there is one: a graph that smelt packaged may be read again."""
    return name if name not in known else _new(f"{name}_", known)


def _name_sizes(value: Any, sizes: tuple[str | int, ...] | None, past: str) -> None:
    """Give the sizes of an input the names that smelt's own graphs have."""
    dims = value.type.tensor_type.shape.dim
    said: tuple[tuple[int, str | int], ...] = ()
    if value.name.startswith(PAST) and len(dims) == 4:
        said = ((0, "batch"), (2, past))
    elif sizes is not None and len(dims) == len(sizes):
        said = tuple(enumerate(sizes))
    for at, size in said:
        if isinstance(size, int):
            dims[at].dim_value = size
        else:
            dims[at].dim_param = size


def _model(
    like: Any, nodes: Iterable[Any], inputs: list[Any], outputs: list[Any], weights: Iterable[Any]
) -> Any:
    from onnx import helper

    kept = list(nodes)
    names = {o.name for o in outputs}
    graph = helper.make_graph(kept, "graph", inputs, outputs, used(weights, kept, names))
    return helper.make_model(graph, opset_imports=list(like.opset_import), ir_version=like.ir_version)


def _opsets(model: Any) -> list[tuple[str, int]]:
    return sorted(("" if o.domain == "ai.onnx" else o.domain, o.version) for o in model.opset_import)


def _is_cross(name: str, word: str) -> bool:
    return name.startswith(word) and ".encoder." in name


def _is_own(name: str) -> bool:
    return name.startswith(PRESENT) and ".encoder." not in name
