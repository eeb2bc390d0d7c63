"""Rewrite Gemm for ONNX Runtime's quantizers: factors of 1, and a bias vector with one value per output.

ONNX allows any bias that broadcasts to the output. The static quantizer assumes a vector: for a scalar it
reads beyond the end, for a matrix it takes the rows for outputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_INPUT, _MATRIX, _BIAS = 0, 1, 2


def gemms_with_factors(graph: Any) -> list[Any]:
    """Return the float Gemm nodes whose alpha or beta is not 1."""
    nodes = (node for node in graph.node if node.op_type == "Gemm" and node.domain in ("", "ai.onnx"))
    return [node for node in nodes if _gemm_factor(node, "alpha") != 1 or _gemm_factor(node, "beta") != 1]


def fold_gemm_factors(graph: Any) -> None:
    """Multiply the matrix by alpha and the bias by beta; if one is not a constant, add a Mul.

    The matrices and biases of Gemm nodes are not shared (`prepare_for_quantizer` duplicates them).
    """
    outputs = {value.name for value in graph.output}
    tensors = {tensor.name: tensor for tensor in graph.initializer if tensor.name not in outputs}
    for node in gemms_with_factors(graph):
        alpha, beta = _gemm_factor(node, "alpha"), _gemm_factor(node, "beta")
        _scale_input(graph, node, _MATRIX if node.input[_MATRIX] in tensors else _INPUT, alpha, tensors)
        if len(node.input) > _BIAS and node.input[_BIAS]:
            _scale_input(graph, node, _BIAS, beta, tensors)
        kept = [attribute for attribute in node.attribute if attribute.name not in ("alpha", "beta")]
        del node.attribute[:]
        node.attribute.extend(kept)


def _gemm_factor(node: Any, name: str) -> float:
    return next((float(one.f) for one in node.attribute if one.name == name), 1.0)


def _scale_input(graph: Any, node: Any, place: int, factor: float, tensors: dict[str, Any]) -> None:
    """Multiply an input of a node: in its constant, else with a node before it."""
    from onnx import helper, numpy_helper

    name = node.input[place]
    if factor == 1:
        return
    if name in tensors:
        value = numpy_helper.to_array(tensors[name])
        tensors[name].CopyFrom(numpy_helper.from_array((value * factor).astype(value.dtype), name))
        return
    kind = _gemm_dtype(graph, node, tensors)
    taken = {each for one in graph.node for each in (*one.input, *one.output)} | set(tensors)
    new = [f"{name}.{word}{place}" for word in ("factor", "scaled")]
    while taken & set(new):
        new = [f"{word}_" for word in new]
    tensors[new[0]] = graph.initializer.add()
    tensors[new[0]].CopyFrom(numpy_helper.from_array(np.asarray(factor, kind), new[0]))
    at = next(at for at, one in enumerate(graph.node) if one is node or one.output[0] == node.output[0])
    graph.node.insert(at, helper.make_node("Mul", [name, new[0]], [new[1]], f"{new[1]}.mul"))
    graph.node[at + 1].input[place] = new[1]


def _gemm_dtype(graph: Any, node: Any, tensors: dict[str, Any]) -> Any:
    """Return the numpy type of a Gemm node's values, float32 if unknown."""
    from onnx import helper

    kinds = {
        value.name: value.type.tensor_type.elem_type
        for value in (*graph.input, *graph.value_info, *graph.output)
    }
    kinds |= {name: tensor.data_type for name, tensor in tensors.items()}
    known = (kinds[name] for name in (*node.input, *node.output) if kinds.get(name))
    found = next(known, None)
    return np.float32 if found is None else helper.tensor_dtype_to_np_dtype(found)


def gemms_with_matrix_bias(graph: Any) -> list[Any]:
    """Return the Gemm nodes whose constant bias is not a vector with one value per output."""
    sizes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    nodes = (node for node in graph.node if node.op_type == "Gemm" and node.domain in ("", "ai.onnx"))
    return [
        node
        for node in nodes
        if len(node.input) > _BIAS
        and node.input[_BIAS] in sizes
        and node.input[_MATRIX] in sizes
        and sizes[node.input[_BIAS]] != (_output_size(node, sizes),)
    ]


def expand_gemm_biases(graph: Any) -> None:
    """Expand such biases to vectors; a bias that depends on the row is added by a separate node.

    The matrices and biases of Gemm nodes are not shared (`prepare_for_quantizer` duplicates them).
    """
    from onnx import helper, numpy_helper

    nodes = gemms_with_matrix_bias(graph)
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    sizes = {name: tuple(tensor.dims) for name, tensor in tensors.items()}
    for node in nodes:
        bias, outputs = tensors[node.input[_BIAS]], _output_size(node, sizes)
        value = numpy_helper.to_array(bias)
        if value.ndim < 2 or len(value) == 1:
            spread = np.broadcast_to(value.ravel(), (outputs,))
            bias.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(spread), bias.name))
            continue
        taken = {name for one in graph.node for name in (*one.input, *one.output)} | set(tensors)
        product = f"{node.output[0]}.product"
        while product in taken:
            product += "_"
        at = next(at for at, one in enumerate(graph.node) if one.output[:] == node.output[:])
        added = helper.make_node("Add", [product, bias.name], [node.output[0]], f"{product}.add")
        graph.node.insert(at + 1, added)
        graph.node[at].output[0] = product
        del graph.node[at].input[_BIAS]


def _output_size(node: Any, sizes: dict[str, tuple[int, ...]]) -> int:
    turned = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
    matrix = sizes[node.input[_MATRIX]]
    return matrix[0 if turned else -1]
