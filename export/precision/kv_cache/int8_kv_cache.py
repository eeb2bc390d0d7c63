"""Convert the keys and values of a decoder's float32 graph to int8.

Each GroupQueryAttention gets scales for its keys and values: new ones become
clip(round(x / scale), -128, 127), half to even, keys after rotary positions, and attention reads
int8 value * scale (measured: docs/measurements/int8-caches.md). Source: ONNX Runtime's
docs/ContribOperators.md, GroupQueryAttention, `k_quant_type`, `v_quant_type`, `kv_cache_bit_width`,
`k_scale`, `v_scale`.

Shapes: B = batch, K = key-value heads, P = past length, d = width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from smelt.core.errors import RunError
from smelt.export.precision.kv_cache.cache_ranges import Float32Array
from smelt.runtime.backends.backend import PAST_PREFIX, PRESENT_PREFIX, past_input_name

ATTENTION_OP = "GroupQueryAttention"
_PER_CHANNEL, _BITS = "PER_CHANNEL", 8
# indices of the operator's inputs and outputs
_PAST_INPUTS, _SCALE_INPUTS, _PRESENT_OUTPUTS = (3, 4), (12, 13), (1, 2)


def cached_attentions(model: Any) -> Iterator[tuple[Any, str, str]]:
    """Yield the attentions of an onnx.ModelProto, each with the outputs that are its keys and values.

    Raises:
        RunError: caches are connected in an unsupported way, or a cache does not belong to such an operator.
    """
    ends = {value.name for value in (*model.graph.input, *model.graph.output)}
    left = {value.name for value in model.graph.output if value.name.startswith(PRESENT_PREFIX)}
    for node in model.graph.node:
        if node.op_type != ATTENTION_OP:
            continue
        given, made = [node.input[at] for at in _PAST_INPUTS], [node.output[at] for at in _PRESENT_OUTPUTS]
        if (
            not ends.issuperset(given)
            or not ends.issuperset(made)
            or given != [past_input_name(n) for n in made]
        ):
            raise RunError(
                f"onnx: kv_cache: int8: the caches {', '.join(given)} and {', '.join(made)} of node"
                f" '{node.name}' do not match the graph's inputs and outputs one to one. Set kv_cache:"
                " float.",
                code="crossed-caches",
            )
        left -= set(made)
        yield node, made[0], made[1]
    if left:
        raise RunError(
            f"onnx: kv_cache: int8: the caches {', '.join(sorted(left))} do not belong to any {ATTENTION_OP}"
            f" node. Set kv_cache: float.",
            code="unsupported-cache",
        )


def rotated_keys(model: Any) -> set[str]:
    """Return the outputs of an onnx.ModelProto that are keys rotated by the operator."""
    return {
        keys
        for node, keys, _ in cached_attentions(model)
        if any(a.name == "do_rotary" and a.i for a in node.attribute)
    }


def quantize_kv_cache(model: Any, scales: Mapping[str, Float32Array]) -> None:
    """Convert the caches of an onnx.ModelProto to int8, in place.

    Args:
        model: a decoder's graph with float32 caches.
        scales: float32 [K, 1, d] of each cache, by the name of its output.

    Raises:
        RunError: the structure of the graph is not supported.
    """
    from onnx import TensorProto, helper, numpy_helper

    for node, *outputs in list(cached_attentions(model)):
        names = [f"{past_input_name(output)}_scale" for output in outputs]
        for output, name in zip(outputs, names, strict=True):
            model.graph.initializer.append(numpy_helper.from_array(scales[output], name))
        node.input.extend([""] * (_SCALE_INPUTS[0] - len(node.input)))
        node.input.extend(names)
        said = {"k_quant_type": _PER_CHANNEL, "v_quant_type": _PER_CHANNEL, "kv_cache_bit_width": _BITS}
        node.attribute.extend(helper.make_attribute(word, value) for word, value in said.items())
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        if value.name.startswith((PAST_PREFIX, PRESENT_PREFIX)):
            value.type.tensor_type.elem_type = TensorProto.INT8


def has_int8_caches(model: Any) -> bool:
    """Return whether an onnx.ModelProto has int8 caches."""
    from onnx import TensorProto

    caches = (value for value in model.graph.input if value.name.startswith(PAST_PREFIX))
    return any(value.type.tensor_type.elem_type == TensorProto.INT8 for value in caches)
