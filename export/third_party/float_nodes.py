"""Find the nodes that must remain float: those that read or compute a mask, and types without int8.

A mask has one value for valid positions and a large negative one for padding. One scale for both makes all
other values 0; a scale calibrated without padding clips the mask, and padding gets attention.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.runtime.third_party.graph_structure import node_inputs, normalized_domain, subgraphs

# A constant below this is the fill value of a mask: BERT's is -10000, others' -65504, -1e9 and -3.4e38.
_MASK_FILL = -1e4
_HUGE_VALUE = 1e9  # a magnitude that no int8 scale can share with other values
_SHAPE_OPS = (
    "Cast", "Concat", "Expand", "Flatten", "Gather", "Identity", "Pad", "Reshape", "Slice", "Split",
    "Squeeze", "Tile", "Transpose", "Trilu", "Unsqueeze",
)  # fmt: skip
_COMBINE_OPS = ("Add", "Sub", "Where", "Max", "Min", "Sum")  # two operands of one shape: scores and a mask
_CLIP_OPS = ("Clip", "Max", "Min")  # their constants are bounds, not outputs
_MASK_CHAIN_OPS = frozenset({*_SHAPE_OPS, *_COMBINE_OPS, "Clip", "Div", "Mul", "Neg"})
# The quantizers' operators that belong to ONNX Runtime. All others are ONNX's; it has Attention since 23.
_RUNTIME, _OF_RUNTIME = "com.microsoft", ("Attention", "EmbedLayerNormalization")
_SOFTMAX = ("LogSoftmax", "Softmax")


def float_only_nodes(model: Any, kinds: Mapping[str, int], operators: Collection[str]) -> dict[int, str]:
    """Return the indices of the nodes of `operators` that must remain float, each with the reason.

    Args:
        model: an onnx.ModelProto with its values.
        kinds: the onnx.TensorProto type of each value whose type is known.
        operators: operator types that would be quantized.
    """
    masked = masked_values(model.graph)
    found = unquantizable_nodes(model.graph, kinds, operators)
    for at, node in enumerate(model.graph.node):
        if node.op_type in operators and masked & {*node.input, *node.output}:
            found[at] = "a mask"
    return found


def unquantizable_nodes(graph: Any, kinds: Mapping[str, int], operators: Collection[str]) -> dict[int, str]:
    """Return the indices of the nodes of a graph that the quantizers do not support, each with the reason."""
    # for a sum over nothing ONNX Runtime's int8 operators return uninitialized memory
    empty = {tensor.name for tensor in graph.initializer if 0 in tensor.dims}
    nodes = ((at, node) for at, node in enumerate(graph.node) if node.op_type in operators)
    reasons = (
        (
            at,
            "an empty weight"
            if empty & {*node.input}
            else _unquantizable_type(node, kinds) or _foreign_domain(node),
        )
        for at, node in nodes
    )
    return {at: reason for at, reason in reasons if reason}


def unfused_activations(graph: Any, operators: Collection[str]) -> dict[int, str]:
    """Return the indices of the ReLU and Clip that the static quantizer must skip, each with the reason.

    It removes them after a convolution, because the range of the convolution's output, which includes 0,
    clips in the same way. A bound on the other side of 0, or a computed one, is then lost; and inner graphs
    (If, Loop, Scan) still read the removed value.
    """
    inside = {name for node in graph.node if subgraphs(node) for name in node_inputs(node)}
    constants = {name: value for name, value in _float_constants(graph) if value.size == 1}
    found = {}
    for at, node in enumerate(graph.node):
        if node.op_type not in ("Relu", "Clip") or node.op_type not in operators:
            continue
        if inside & {node.input[0], node.output[0]}:
            found[at] = "used in If, Loop or Scan"
        elif node.op_type == "Clip" and not _clips_around_zero(node, constants):
            found[at] = "bounds are computed or do not include 0"
    return found


def _clips_around_zero(node: Any, constants: Mapping[str, NDArray[Any]]) -> bool:
    """Return whether a Clip has constant bounds, the lower one at most 0 and the upper one at least 0."""
    low, high = [*node.input[1:3], "", ""][:2]
    if any(name and name not in constants for name in (low, high)):
        return False
    said = {attribute.name: attribute.f for attribute in node.attribute}  # before opset 11
    least = float(constants[low].item()) if low else said.get("min", -np.inf)
    most = float(constants[high].item()) if high else said.get("max", np.inf)
    return least <= 0 <= most


def masked_values(graph: Any) -> set[str]:
    """Return the values that contain the fill value of a mask, or may contain it."""
    return {*_mask_constants(graph), *_between_mask_and_softmax(graph)}


def has_huge_values(values: NDArray[Any]) -> bool:
    """Return whether an array contains infinite or very large values, which int8 scales cannot represent."""
    return bool((np.abs(values) > np.finfo(np.float32).max / 1e8).any())


def _unquantizable_type(node: Any, kinds: Mapping[str, int]) -> str | None:
    from onnx import TensorProto

    words: dict[int, str] = {
        TensorProto.FLOAT16: "float16",
        TensorProto.BFLOAT16: "bfloat16",
        TensorProto.DOUBLE: "float64",
    }
    return next((words[kinds[name]] for name in node.input if kinds.get(name) in words), None)


def _foreign_domain(node: Any) -> str | None:
    """Return the node's own domain if the quantizer, which compares only names, assumes another one."""
    meant = _RUNTIME if node.op_type in _OF_RUNTIME else ""
    domain = normalized_domain(node.domain)
    return None if domain == meant else f"{node.op_type} of {domain or 'ONNX'}"


def _mask_constants(graph: Any) -> set[str]:
    """Return the values that are computed from a constant which is the fill value of a mask."""
    constants = dict(_float_constants(graph))
    found = {name for name, value in constants.items() if _is_mask_fill(value)}
    for node in graph.node:
        if node.op_type not in _MASK_CHAIN_OPS:
            continue
        bounds = constants if node.op_type in _CLIP_OPS else ()
        if any(name in found and name not in bounds for name in node.input):
            found.update(node.output)
    return found - set(constants)


def _float_constants(graph: Any) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the float constants of the graph, by name."""
    from onnx import TensorProto, helper, numpy_helper

    for tensor in graph.initializer:
        if tensor.data_type in (TensorProto.FLOAT, TensorProto.DOUBLE):
            yield tensor.name, numpy_helper.to_array(tensor)
    for node in graph.node:
        if node.op_type not in ("Constant", "ConstantOfShape"):
            continue
        for attribute in node.attribute:
            value = helper.get_attribute_value(attribute)
            if attribute.name in ("value_float", "value_floats"):
                yield node.output[0], np.asarray(value, np.float32)
            elif attribute.name == "value" and value.data_type in (TensorProto.FLOAT, TensorProto.DOUBLE):
                yield node.output[0], numpy_helper.to_array(value)


def _is_mask_fill(value: NDArray[Any]) -> bool:
    """Return whether all values are 0 or a fill value, unlike those of a large weight or bias."""
    there = value[value != 0]
    return bool(there.size and ((there <= _MASK_FILL) | (there >= _HUGE_VALUE)).all())


def _between_mask_and_softmax(graph: Any) -> set[str]:
    """Return the values between a mask and a Softmax, where the mask may be computed or an input.

    Searched from each Softmax back through elementwise operators up to the operator that computes the scores:
    a value is masked if two non-constant values were combined before it.
    """
    constants = {name for name, _ in _float_constants(graph)} | {tensor.name for tensor in graph.initializer}
    makers = {name: node for node in graph.node for name in node.output}
    waiting = [node.input[0] for node in graph.node if node.op_type in _SOFTMAX]
    above: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in above and name in makers and makers[name].op_type in _MASK_CHAIN_OPS:
            above.add(name)
            waiting += makers[name].input
    order = {name: at for at, node in enumerate(graph.node) for name in node.output}
    masked: set[str] = set()
    for name in sorted(above, key=order.__getitem__):
        node = makers[name]
        free = [each for each in node.input if each and each not in constants]
        combines = node.op_type in _COMBINE_OPS and len(free) > 1
        if combines or masked & set(node.input):
            masked.add(name)
    return masked
