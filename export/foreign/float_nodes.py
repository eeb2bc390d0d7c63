"""Which nodes the quantizers must keep in float: those that read or compute a mask, and types without int8.

A mask holds one value for a place that counts and a huge negative one for padding. One scale for both makes
all other values 0; a scale that was found without padding clips the mask, and padding gets attention.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.runtime.foreign.structure import domain_of, inner_graphs, reads

# From here down a constant is the fill value of a mask: BERT's is -10000, others' -65504, -1e9 and -3.4e38.
_FILL = -1e4
_HUGE = 1e9  # a value of either sign that no int8 scale can share with others
_SHAPE = (
    "Cast", "Concat", "Expand", "Flatten", "Gather", "Identity", "Pad", "Reshape", "Slice", "Split",
    "Squeeze", "Tile", "Transpose", "Trilu", "Unsqueeze",
)  # fmt: skip
_COMBINE = ("Add", "Sub", "Where", "Max", "Min", "Sum")  # two operands of one shape: scores and a mask
_BOUNDS = ("Clip", "Max", "Min")  # their constants are bounds, not values that come out
_CHAIN = frozenset({*_SHAPE, *_COMBINE, "Clip", "Div", "Mul", "Neg"})
# The quantizers' operators that are ONNX Runtime's own. All others are ONNX's; it has an Attention since 23.
_RUNTIME, _OF_RUNTIME = "com.microsoft", ("Attention", "EmbedLayerNormalization")
_SOFTMAX = ("LogSoftmax", "Softmax")


def float_nodes(model: Any, kinds: Mapping[str, int], operators: Collection[str]) -> dict[int, str]:
    """Return the places of the nodes of `operators` that must stay float, each with the reason.

    Args:
        model: an onnx.ModelProto with its values.
        kinds: of each value whose type is known, its onnx.TensorProto type.
        operators: operator types that would be quantized.
    """
    masked = masked_values(model.graph)
    found = unfit_nodes(model.graph, kinds, operators)
    for at, node in enumerate(model.graph.node):
        if node.op_type in operators and masked & {*node.input, *node.output}:
            found[at] = "a mask"
    return found


def unfit_nodes(graph: Any, kinds: Mapping[str, int], operators: Collection[str]) -> dict[int, str]:
    """Return the places of the nodes of a graph that the quantizers cannot take, each with the reason."""
    # of a sum over nothing ONNX Runtime's int8 operators return what lies in memory
    empty = {tensor.name for tensor in graph.initializer if 0 in tensor.dims}
    nodes = ((at, node) for at, node in enumerate(graph.node) if node.op_type in operators)
    reasons = (
        (at, "an empty weight" if empty & {*node.input} else _unfit_type(node, kinds) or _unfit_domain(node))
        for at, node in nodes
    )
    return {at: reason for at, reason in reasons if reason}


def standing_nodes(graph: Any, operators: Collection[str]) -> dict[int, str]:
    """Return the places of the ReLU and Clip that the static quantizer must not take, each with the reason.

    It removes them after a convolution: the range of their output, which has 0 inside, does their work. A
    bound on the other side of 0, or one that is computed, is then lost; and inner graphs (If, Loop, Scan) go
    on to read what was removed, now without it.
    """
    inside = {name for node in graph.node if inner_graphs(node) for name in reads(node)}
    constants = {name: value for name, value in _constants(graph) if value.size == 1}
    found = {}
    for at, node in enumerate(graph.node):
        if node.op_type not in ("Relu", "Clip") or node.op_type not in operators:
            continue
        if inside & {node.input[0], node.output[0]}:
            found[at] = "read in If, Loop or Scan"
        elif node.op_type == "Clip" and not _is_around_zero(node, constants):
            found[at] = "bounds that are not around 0, or computed"
    return found


def _is_around_zero(node: Any, constants: Mapping[str, NDArray[Any]]) -> bool:
    """Return whether a Clip has constant bounds, the lower one at most 0 and the upper one at least 0."""
    low, high = [*node.input[1:3], "", ""][:2]
    if any(name and name not in constants for name in (low, high)):
        return False
    said = {attribute.name: attribute.f for attribute in node.attribute}  # before opset 11
    least = float(constants[low].item()) if low else said.get("min", -np.inf)
    most = float(constants[high].item()) if high else said.get("max", np.inf)
    return least <= 0 <= most


def masked_values(graph: Any) -> set[str]:
    """Return the values that hold the fill value of a mask, or may hold one."""
    return {*_filled(graph), *_into_softmax(graph)}


def is_huge(values: NDArray[Any]) -> bool:
    """Return whether an array holds infinities or the like, which no scale of int8 can hold."""
    return bool((np.abs(values) > np.finfo(np.float32).max / 1e8).any())


def _unfit_type(node: Any, kinds: Mapping[str, int]) -> str | None:
    from onnx import TensorProto

    words: dict[int, str] = {
        TensorProto.FLOAT16: "float16",
        TensorProto.BFLOAT16: "bfloat16",
        TensorProto.DOUBLE: "float64",
    }
    return next((words[kinds[name]] for name in node.input if kinds.get(name) in words), None)


def _unfit_domain(node: Any) -> str | None:
    """Return whose operator it is where the quantizer, which reads names alone, takes it for another's."""
    meant = _RUNTIME if node.op_type in _OF_RUNTIME else ""
    domain = domain_of(node.domain)
    return None if domain == meant else f"{node.op_type} of {domain or 'ONNX'}"


def _filled(graph: Any) -> set[str]:
    """Return the values that are made of a constant which is the fill value of a mask."""
    constants = dict(_constants(graph))
    found = {name for name, value in constants.items() if _is_fill(value)}
    for node in graph.node:
        if node.op_type not in _CHAIN:
            continue
        bounds = constants if node.op_type in _BOUNDS else ()
        if any(name in found and name not in bounds for name in node.input):
            found.update(node.output)
    return found - set(constants)


def _constants(graph: Any) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the constants of the graph that are floats, by name."""
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


def _is_fill(value: NDArray[Any]) -> bool:
    """Return whether all values are 0 or a fill value, unlike those of a large weight or bias."""
    there = value[value != 0]
    return bool(there.size and ((there <= _FILL) | (there >= _HUGE)).all())


def _into_softmax(graph: Any) -> set[str]:
    """Return what lies between a mask and a Softmax, where the mask may be computed or an input.

    From each Softmax back through operators that work value by value, up to whatever gives scores: a value
    is masked where two values that are not constant were combined before it.
    """
    constants = {name for name, _ in _constants(graph)} | {tensor.name for tensor in graph.initializer}
    makers = {name: node for node in graph.node for name in node.output}
    waiting = [node.input[0] for node in graph.node if node.op_type in _SOFTMAX]
    above: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in above and name in makers and makers[name].op_type in _CHAIN:
            above.add(name)
            waiting += makers[name].input
    order = {name: at for at, node in enumerate(graph.node) for name in node.output}
    masked: set[str] = set()
    for name in sorted(above, key=order.__getitem__):
        node = makers[name]
        free = [each for each in node.input if each and each not in constants]
        combines = node.op_type in _COMBINE and len(free) > 1
        if combines or masked & set(node.input):
            masked.add(name)
    return masked
