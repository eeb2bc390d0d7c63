"""From a decoder's float32 graph to one whose keys and values are kept as int8 codes.

Each GroupQueryAttention gets scales for its keys and values: new ones become
clip(round(x / scale), -128, 127), half to even, keys after they were rotated, and attention reads
code * scale (measured: docs/measurements/int8-caches.md). Source: ONNX Runtime's docs/ContribOperators.md,
GroupQueryAttention, `k_quant_type`, `v_quant_type`, `kv_cache_bit_width`, `k_scale`, `v_scale`.

Shapes: B = batch, K = key-value heads, P = past length, d = width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from smelt.core.errors import RunError
from smelt.export.precision.caches.ranges import Floats
from smelt.runtime.backends.backend import PAST, PRESENT, past_of

OPERATOR = "GroupQueryAttention"
_PER_CHANNEL, _BITS = "PER_CHANNEL", 8
# places among the operator's inputs, and of its outputs
_PAST, _SCALES, _PRESENT = (3, 4), (12, 13), (1, 2)


def attentions_of(model: Any) -> Iterator[tuple[Any, str, str]]:
    """Yield the attentions of an onnx.ModelProto, each with the outputs that its keys and values are.

    Raises:
        RunError: one hands its caches on in a way that is not known, or a cache is that of no such operator.
    """
    ends = {value.name for value in (*model.graph.input, *model.graph.output)}
    left = {value.name for value in model.graph.output if value.name.startswith(PRESENT)}
    for node in model.graph.node:
        if node.op_type != OPERATOR:
            continue
        given, made = [node.input[at] for at in _PAST], [node.output[at] for at in _PRESENT]
        if not ends.issuperset(given) or not ends.issuperset(made) or given != [past_of(n) for n in made]:
            raise RunError(
                f"onnx: kv_cache: int8: node '{node.name}' takes the caches {', '.join(given)} and leaves"
                f" {', '.join(made)}: not the graph's own, one for one. Set kv_cache: float.",
                code="crossed-caches",
            )
        left -= set(made)
        yield node, made[0], made[1]
    if left:
        raise RunError(
            f"onnx: kv_cache: int8: {', '.join(sorted(left))} belong to no {OPERATOR}. Set kv_cache: float.",
            code="unsupported-cache",
        )


def rotated_keys(model: Any) -> set[str]:
    """Return the outputs of an onnx.ModelProto that are keys which the operator has rotated."""
    return {
        keys
        for node, keys, _ in attentions_of(model)
        if any(a.name == "do_rotary" and a.i for a in node.attribute)
    }


def code_caches(model: Any, scales: Mapping[str, Floats]) -> None:
    """Let the caches of an onnx.ModelProto be int8, in place.

    Args:
        model: a decoder's graph with float32 caches.
        scales: float32 [K, 1, d] of each cache, by the output that it leaves as.

    Raises:
        RunError: the graph is not wired as this knows it.
    """
    from onnx import TensorProto, helper, numpy_helper

    for node, *outputs in list(attentions_of(model)):
        names = [f"{past_of(output)}_scale" for output in outputs]
        for output, name in zip(outputs, names, strict=True):
            model.graph.initializer.append(numpy_helper.from_array(scales[output], name))
        node.input.extend([""] * (_SCALES[0] - len(node.input)))
        node.input.extend(names)
        said = {"k_quant_type": _PER_CHANNEL, "v_quant_type": _PER_CHANNEL, "kv_cache_bit_width": _BITS}
        node.attribute.extend(helper.make_attribute(word, value) for word, value in said.items())
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        if value.name.startswith((PAST, PRESENT)):
            value.type.tensor_type.elem_type = TensorProto.INT8


def has_int8_caches(model: Any) -> bool:
    """Say whether an onnx.ModelProto takes int8 caches."""
    from onnx import TensorProto

    caches = (value for value in model.graph.input if value.name.startswith(PAST))
    return any(value.type.tensor_type.elem_type == TensorProto.INT8 for value in caches)
