"""Find the outputs of a graph that are scores of classes, from its structure.

The largest value of such an output is a decision, which must not change (`top1`). The largest value of others
is none: of a heat map's row, of an embedding, of a box.

    x - ... - Softmax or LogSoftmax - y     the axis of the operator
    x - ... - MatMul, Add, or Gemm - y      the last axis, if there is one besides the samples'
    x - ... - Conv, pooling, Flatten - y    likewise
    x - ... - TreeEnsembleClassifier - y    the last axis, of ai.onnx.ml

Softmax alone is no decision where nodes of the graph read it: probabilities of attention.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from smelt.runtimes.graph_walk import all_nodes, opset_versions, subgraphs

# since this opset Softmax works along one axis; before it works on all axes from its axis on
_SOFTMAX_AXIS_OPSET = 13
_SAME_SHAPE_OPS = ("Cast", "DequantizeLinear", "Dropout", "Identity", "QuantizeLinear")
_RESHAPING_OPS = ("Flatten", "Reshape", "Squeeze")
_POOLING_OPS = ("AveragePool", "GlobalAveragePool", "GlobalMaxPool", "MaxPool", "ReduceMax", "ReduceMean")
_MATRIX_OPS = ("Gemm", "MatMul")
_CLASS_NAMES = re.compile(r"logits|scores|probs|probabilities|output_probability", re.IGNORECASE)
# names of outputs of a linear layer that are no scores
_OTHER_NAMES = re.compile(r"embed|feature|hidden|pool|vector|box|coord|landmark|keypoint", re.IGNORECASE)


def class_outputs(model: Any) -> dict[str, int]:
    """Return by output of an onnx.ModelProto that holds scores of classes their axis, from the last (-1).

    The values of weights are not needed.
    """
    graph = model.graph
    makers = {name: node for node in graph.node for name in node.output}
    read_names = {name for node in all_nodes(graph.node) for name in node.input}
    constants = _constants(graph)
    flattening = opset_versions(model).get("", _SOFTMAX_AXIS_OPSET) < _SOFTMAX_AXIS_OPSET
    axes = {}
    for output in graph.output:
        shape = _shape(output)
        chain = list(_makers_above(output.name, makers, constants))
        axis = _class_axis(output.name, chain, shape, read_names, constants, flattening)
        if axis is None or (shape is not None and (len(shape) < -axis + 1 or shape[axis] == 1)):
            continue
        axes[output.name] = axis
    return axes


def _constants(graph: Any) -> set[str]:
    """Return the weights, and what nodes compute from weights alone: transposed, dequantized, converted."""
    constants = {tensor.name for tensor in graph.initializer}
    for node in graph.node:  # in topological order
        if not subgraphs(node) and not {*filter(None, node.input)} - constants:
            constants |= {*node.output}
    return constants


def _shape(output: Any) -> list[int | None] | None:
    """Return the sizes of an output, None for those that vary; None if its rank is unknown."""
    kind = output.type.tensor_type
    if not kind.HasField("shape"):
        return None
    return [size.dim_value if size.HasField("dim_value") else None for size in kind.shape.dim]


def _makers_above(name: str, makers: Mapping[str, Any], constants: set[str]) -> Iterator[Any]:
    """Yield the nodes that compute a value, the last one first, up to one that does more than reshape."""
    while name in makers:
        node = makers[name]
        yield node
        operands = [input_name for input_name in node.input if input_name not in constants]
        passes = node.op_type in (*_SAME_SHAPE_OPS, *_RESHAPING_OPS, *_POOLING_OPS)
        if not passes and not (node.op_type == "Add" and len(operands) == 1):
            return
        name = operands[0] if operands else ""


def _class_axis(
    name: str, chain: list[Any], shape: list[int | None] | None, read: set[str], constants: set[str],
    flattening: bool,
) -> int | None:  # fmt: skip
    """Return the axis of the classes of an output whose last nodes are `chain`, from the last one."""
    if not chain:
        return None
    last, types = chain[-1], [node.op_type for node in chain]
    rank = None if shape is None else len(shape)
    reshaped = any(kind in _RESHAPING_OPS for kind in types)
    if last.op_type in ("Softmax", "LogSoftmax"):
        inner = {input_name for node in chain for input_name in node.input}
        if any(kind in _POOLING_OPS for kind in types) or read & {*last.output} - inner:
            return None
        return _softmax_axis(last, 2 if reshaped and rank == 2 else None if reshaped else rank, flattening)
    if last.op_type.endswith("Classifier") and last.domain == "ai.onnx.ml":
        return -1 if last.output[1:2] == [name] else None
    if _OTHER_NAMES.search(name) or (rank is not None and rank < 2):
        return None
    is_vector = rank in (None, 2)  # of a sample; a sequence of vectors may be anything
    linear = is_vector and last.op_type in _MATRIX_OPS and last.input[1] in constants and not reshaped
    pooled = rank == 2 and last.op_type in (*_MATRIX_OPS, "Conv") and len(chain) > 1
    has_class_name = rank in (2, 3) and _CLASS_NAMES.fullmatch(name)
    return -1 if linear or pooled or has_class_name else None


def _softmax_axis(node: Any, rank: int | None, flattening: bool) -> int | None:
    """Return the axis of a Softmax from the last one; None if it is unknown, or if it is several."""
    axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), None)
    axis = (1 if flattening else -1) if axis is None else axis
    if axis >= 0:
        if rank is None:
            return None
        axis -= rank
    return axis if axis == -1 or not flattening else None
