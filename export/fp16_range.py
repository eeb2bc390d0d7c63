"""Find the nodes of a float32 graph that float16 cannot compute, from the graph's structure alone.

float16 has no values between 0 and 6e-8, only a few bits below 6.1e-5, and none above 65,504. Samples do not
show what is lost: the 1e-12 in `x / max(|x|, 1e-12)` matters only for a sample with x = 0. So these nodes
remain float32, whatever their values are on samples:

- Nodes with a constant that becomes 0, subnormal or infinite, where the constant matters alone: a bound, a
  summand or factor for all elements, a divisor. A weight matrix with some small elements does not.
- Roots, logarithms and divisions by a computed value, and the nodes that compute this value by sums, squares,
  products of computed values and elementwise operators, such as the variance of a layer norm:

      x - mean(x), Pow 2, ReduceMean, Add 1e-12, Sqrt, Div

- Readers of values that may lie outside of the range because of such a constant: the scores after a mask of
  -3.4e38 up to their Softmax, a product with a reciprocal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from smelt.export.value_types import node_key, values_of_type
from smelt.runtimes.graph_walk import all_nodes, iter_graphs, normalized_domain, subgraphs

FP16_MAX = 65504.0
FP16_MIN_NORMAL = 2.0**-14
# below it a value becomes 0; the limit for the epsilon of a norm, which is a float of the operator
_FP16_ZERO = 2.0**-25

_RESHAPING_OPS = frozenset(
    {
        *("Cast", "CastLike", "Concat", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice"),
        *("Split", "Squeeze", "Tile", "Transpose", "Unsqueeze"),
    }
)
_COMBINING_OPS = frozenset({"Concat", "Gather"})  # whose outputs depend on more than their first input
_PRODUCT_OPS = ("MatMul", "Gemm", "Conv", "ConvTranspose")
_MATRIX_OPS = frozenset({"Einsum", "Gemm", "MatMul"})
_BIASES = {"Gemm": 2, "Conv": 2, "ConvTranspose": 2}
_BOUNDING_OPS = ("Clip", "Max", "Min")
# constants, and operators whose scales have a type of their own
_SKIPPED_OPS = ("Constant", "ConstantOfShape", "QuantizeLinear", "DequantizeLinear")
_LINEAR_UNARY_OPS = frozenset({"Abs", "Neg", "Relu"})
_UNARY_OPS = _LINEAR_UNARY_OPS | {"Clip", "Pow", "Reciprocal", "Sqrt"}
_EXPONENTIAL_OPS = frozenset({"Exp", "Sigmoid", "Softmax"})  # small values of inputs that are not small
_BINARY_OPS = frozenset({"Add", "Div", "Max", "Mean", "Min", "Mul", "Sub", "Sum", "Where"})
_MASKING_OPS = _BINARY_OPS | {"Neg"}


class ConstantRange(NamedTuple):
    """The smallest and the largest magnitude of a constant's nonzero elements, and its lowest element."""

    smallest: float
    largest: float
    lowest: float


_NO_RANGE = ConstantRange(0.0, 0.0, 0.0)


class _Graph(NamedTuple):
    """The nodes of a model by the values that they compute and read; its constants."""

    nodes: list[Any]
    makers: dict[str, Any]
    readers: dict[str, list[Any]]
    constants: dict[str, ConstantRange]


def nodes_outside_fp16(model: Any) -> set[str]:
    """Return the nodes of an onnx.ModelProto that must remain float32, each by its first output.

    Args:
        model: in float32, its weights loaded; value names are unique, also in If, Loop and Scan.
    """
    graph = _read_graph(model)
    float32_nodes: set[str] = set()
    for node in graph.nodes:
        tiny, huge = _underflowing_inputs(node, graph.constants), _overflowing_inputs(node, graph.constants)
        if tiny or huge or _has_extreme_attribute(node):
            constants = (graph.makers.get(node.input[index]) for index in (*tiny, *huge))
            float32_nodes |= {
                node_key(node),
                *(node_key(producer) for producer in constants if producer is not None),
            }
        for name in _sensitive_inputs(node, graph.constants):
            float32_nodes |= {node_key(node), *_computing_nodes(name, graph)}
            if node.op_type == "Div":  # a ratio of two small sums
                float32_nodes |= _computing_nodes(node.input[0], graph, sums_only=True)
        if (tiny and node.op_type in ("Mul", *_PRODUCT_OPS)) or (node.op_type == "Div" and 1 in huge):
            float32_nodes |= _reading_nodes(node, graph, _RESHAPING_OPS | _LINEAR_UNARY_OPS)
        elif huge and node.op_type in (_MASKING_OPS | _RESHAPING_OPS) - {*_BOUNDING_OPS}:
            float32_nodes |= _reading_nodes(node, graph, _RESHAPING_OPS | _MASKING_OPS)
        if _returns_reciprocals(node, graph.constants):
            float32_nodes |= _reading_nodes(node, graph, _RESHAPING_OPS | _LINEAR_UNARY_OPS)
    return float32_nodes


def _read_graph(model: Any) -> _Graph:
    graph = _Graph([], {}, defaultdict(list), {})
    floats = values_of_type(model)
    for body in iter_graphs(model.graph):
        for tensor in body.initializer:
            graph.constants[tensor.name] = _tensor_range(tensor)
        for node in body.node:
            graph.constants.update(_constant_outputs(node, graph.constants))
    for node in all_nodes(model.graph.node):
        if normalized_domain(node.domain) or subgraphs(node) or not floats & {*node.input, *node.output}:
            continue
        graph.makers.update(dict.fromkeys(node.output, node))
        for name in {*node.input}:
            graph.readers[name].append(node)
        if node.op_type not in _SKIPPED_OPS:
            graph.nodes.append(node)
    return graph


def _tensor_range(tensor: Any) -> ConstantRange:
    """Return the range of a float32 tensor, and no range for other types."""
    from onnx import TensorProto, numpy_helper

    if tensor.data_type != TensorProto.FLOAT:
        return _NO_RANGE
    return _array_range(numpy_helper.to_array(tensor))


def _array_range(values: Any) -> ConstantRange:
    sizes = np.abs(values)
    sizes = sizes[sizes > 0]  # without NaN
    if not sizes.size:
        return _NO_RANGE
    return ConstantRange(float(sizes.min()), float(sizes.max()), float(np.nanmin(values)))


def _constant_outputs(node: Any, constants: Mapping[str, ConstantRange]) -> dict[str, ConstantRange]:
    """Return the outputs of a node that are constant, or depend on shapes only, with their ranges."""
    inputs = [name for name in node.input if name]
    if node.op_type in ("Shape", "Size"):
        return dict.fromkeys(node.output, _NO_RANGE)
    if node.op_type in ("Constant", "ConstantOfShape"):
        ranges = [_attribute_range(attribute) for attribute in node.attribute]
    elif node.op_type in _RESHAPING_OPS - _COMBINING_OPS and inputs[0] in constants:
        ranges = [constants[inputs[0]]]
    elif inputs and constants.keys() >= {*inputs} and not subgraphs(node):
        ranges = [constants[name] for name in inputs]  # whose extremes its output may have
    else:
        return {}
    non_empty = [values for values in ranges if values.largest]
    merged_range = _NO_RANGE
    if non_empty:
        smallest, largest, lowest = zip(*non_empty, strict=True)
        merged_range = ConstantRange(min(smallest), max(largest), min(lowest))
    return dict.fromkeys(node.output, merged_range)


def _attribute_range(attribute: Any) -> ConstantRange:
    """Return the range of a Constant's value."""
    if attribute.name in ("value_float", "value_floats"):
        return _array_range(np.asarray([attribute.f, *attribute.floats]))
    return _tensor_range(attribute.t) if attribute.name == "value" else _NO_RANGE


def _underflowing_inputs(node: Any, constants: Mapping[str, ConstantRange]) -> list[int]:
    """Return the indices of the constants that are 0 or subnormal in float16, and matter there."""
    return [
        index
        for index, name in enumerate(node.input)
        if name in constants and _underflows(node.op_type, index, constants[name])
    ]


def _underflows(op_type: str, index: int, constant: ConstantRange) -> bool:
    if index == _BIASES.get(op_type):
        return False  # it is added to sums of products, next to which it is negligible
    if op_type in _BOUNDING_OPS or (op_type, index) == ("Div", 1):
        return 0 < constant.smallest < FP16_MIN_NORMAL  # each element counts by itself
    if op_type in ("Add", "Sub") and constant.smallest < constant.largest:
        return False  # a bias too
    return 0 < constant.largest < FP16_MIN_NORMAL


def _overflowing_inputs(node: Any, constants: Mapping[str, ConstantRange]) -> list[int]:
    """Return the indices of the constants that are infinite in float16."""
    return [
        index
        for index, name in enumerate(node.input)
        if name in constants and constants[name].largest > FP16_MAX
    ]


def _has_extreme_attribute(node: Any) -> bool:
    """Return whether a float attribute has no float16 value."""
    if node.op_type in ("LayerNormalization", "RMSNormalization") or any(
        attribute.name == "stash_type" for attribute in node.attribute
    ):
        return False  # by definition such a norm is computed in float32
    for attribute in node.attribute:
        sizes = np.abs(np.asarray([attribute.f, *attribute.floats], np.float64))
        # the epsilon of a norm is no value of the graph; it must only be more than nothing
        minimum = _FP16_ZERO if attribute.name == "epsilon" else FP16_MIN_NORMAL
        if ((sizes > 0) & (sizes < minimum)).any():
            return True
        if node.op_type != "Clip" and (sizes > FP16_MAX).any():  # an infinite bound is none
            return True
    return False


def _sensitive_inputs(node: Any, constants: Mapping[str, ConstantRange]) -> list[str]:
    """Return the computed inputs whose small values have large effects."""
    name = ""
    if node.op_type in ("Log", "LpNormalization", "ReduceL2", "ReduceLogSum", "Reciprocal", "Sqrt"):
        name = node.input[0]
    elif node.op_type == "Div":
        name = node.input[1]
    elif node.op_type == "Pow":
        exponent = constants.get(node.input[1])
        name = node.input[0] if exponent is None or exponent.lowest < 1 else ""
    return [name] if name and name not in constants else []


def _returns_reciprocals(node: Any, constants: Mapping[str, ConstantRange]) -> bool:
    """Return whether a node divides a constant by a computed value: a small one gives a large one."""
    if node.op_type == "Div":
        return node.input[0] in constants and node.input[1] not in constants
    if node.op_type == "Pow":
        exponent = constants.get(node.input[1])
        return exponent is None or exponent.lowest < 0
    return bool(node.op_type == "Reciprocal")


def _reading_nodes(node: Any, graph: _Graph, passing: Collection[str]) -> set[str]:
    """Return the nodes that read the outputs of `node`, directly or through nodes of the types `passing`."""
    readers: set[str] = set()
    pending = [*node.output]
    while pending:
        for reader in graph.readers.get(pending.pop(), ()):
            if node_key(reader) not in readers:
                readers.add(node_key(reader))
                pending += reader.output if reader.op_type in passing else ()
    return readers


def _computing_nodes(name: str, graph: _Graph, sums_only: bool = False) -> set[str]:
    """Return the nodes that compute the small values of the value `name`.

    Searched back through sums, squares and elementwise operators, up to the operators that only get values of
    ordinary size. Of several operands (the values and their mean, in the difference of a norm) only means,
    sums and squares are followed: a difference is exact in float32 if its operands are.

    Args:
        name: of a value.
        graph: its graph.
        sums_only: follow only sums and squares from the beginning.
    """
    nodes: set[str] = set()
    visited: set[tuple[str, bool, bool]] = set()
    pending = [(name, sums_only, False)]
    while pending:
        visit = value, sums_only, squared = pending.pop()
        if visit in visited:
            continue
        visited.add(visit)
        path = _path_to_sum(value, graph, squared) if sums_only else [*_maker(value, graph)]
        if not path:
            continue
        node, operands = path[-1], _operands(path[-1], graph)
        if node.op_type in _RESHAPING_OPS and not operands:
            continue  # elements of a constant, such as embeddings, whose squares alone are small
        is_product = not squared and _is_sum_of_products(node, graph)
        if not (is_product or _keeps_small_values(node)):
            continue
        nodes |= {node_key(path_node) for path_node in path}
        if node.op_type in _EXPONENTIAL_OPS:
            continue
        squared = squared or _is_square(node)
        sums_only |= is_product or len(operands) > 1
        if _is_reduction(node):  # of products
            terms = [term for operand in operands for term in _maker(operand, graph)]
            nodes |= {node_key(term) for term in terms if term.op_type == "Mul"}
        pending += [(operand, sums_only, squared) for operand in operands]
    return nodes


def _maker(value: str, graph: _Graph) -> Iterator[Any]:
    """Yield the node that computes a value; nothing for constants, inputs and outputs of control flow."""
    if value in graph.makers and value not in graph.constants:
        yield graph.makers[value]


def _path_to_sum(value: str, graph: _Graph, squared: bool) -> list[Any]:
    """Return the nodes from a value back to a sum or square, through reshaping ones; empty for none.

    squared: the value is squared, so it may have an ordinary size: sums of products are not searched for.
    """
    path: list[Any] = []
    for node in _maker(value, graph):
        path.append(node)
        while path[-1].op_type in _RESHAPING_OPS:
            producers = [*_maker(path[-1].input[0], graph)]
            if not producers:
                return []
            path += producers
    if not path or _is_reduction(path[-1]) or _is_square(path[-1]):
        return path
    return path if not squared and _is_sum_of_products(path[-1], graph) else []


def _is_reduction(node: Any) -> bool:
    return bool(node.op_type.startswith("Reduce") or node.op_type in ("GlobalAveragePool", "CumSum"))


def _is_sum_of_products(node: Any, graph: _Graph) -> bool:
    """Return whether a matrix product may be of small values only: of computed ones, or without signs.

    The powers of a spectrum are multiplied by filters without negative elements; trained weights have signs.
    """
    if node.op_type not in _MATRIX_OPS:
        return False
    weights = [graph.constants[name] for name in node.input[:2] if name in graph.constants]
    return all(weight.lowest >= 0 for weight in weights)


def _is_square(node: Any) -> bool:
    is_norm = node.op_type in ("ReduceL2", "ReduceSumSquare")
    return bool(
        is_norm or node.op_type == "Pow" or (node.op_type == "Mul" and node.input[0] == node.input[1])
    )


def _keeps_small_values(node: Any) -> bool:
    """Return whether small values of an output follow from those of inputs, or from an exponential."""
    supported_ops = _RESHAPING_OPS | _UNARY_OPS | _BINARY_OPS | _EXPONENTIAL_OPS
    return bool(node.op_type in supported_ops) or _is_reduction(node)


def _operands(node: Any, graph: _Graph) -> set[str]:
    """Return the computed values among the operands of a node."""
    names = [*node.input]
    if node.op_type == "Where":
        names = names[1:]
    elif node.op_type not in _BINARY_OPS | _MATRIX_OPS | {"Concat"}:
        names = names[:1]
    return {name for name in names if name and name not in graph.constants}
