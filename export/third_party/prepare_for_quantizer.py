"""Prepare a graph for ONNX Runtime's quantizers: weights are initializers and are not shared."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from smelt.runtime.third_party.graph_structure import all_nodes, node_inputs, normalized_domain

# Since this opset QuantizeLinear and DequantizeLinear have an axis, and so scales per output.
PER_CHANNEL_OPSET = 13
# Inputs of a node that the quantizer changes: matrices (transposed), and biases with a scale of their own.
_MODIFIED_INPUTS = {"Gemm": (1, 2), "Conv": (2,), "ConvTranspose": (2,), "LSTM": (1, 2)}


def prepare_for_quantizer(path: Path, folder: Path) -> tuple[Path, int]:
    """Return the graph in `path`, or a copy in `folder` that ONNX Runtime quantizes correctly, and its opset.

    - The quantizers do not treat Constant nodes as weights, as paddle2onnx writes them; they become
      initializers.
    - Below opset 13 a matrix has one scale; the graph is converted, if onnx can.
    - The quantizer replaces Gemm by MatMul and transposes the matrix in place (onnxruntime 1.31,
      quantization/onnx_model.py, replace_gemm_with_matmul): an embedding that is also the output layer would
      then be read by its columns. A bias with several readers is copied under names that other values may
      have. The matrices of an LSTM are transposed too. So each of these nodes gets its own copy.
    - Functions are inlined, weights are not inputs, and weights of inner graphs (If, Loop, Scan) are moved to
      the outermost graph (`normalize_graph`).
    - torch.onnx.export records the shapes of weights too; that of a matrix which the quantizer transposes is
      then wrong, and shape inference fails. So they are removed.
    - The quantizers assume Gemm with an alpha and a beta of 1, so both are folded into its weights; the bias
      gets one value per output.
    - The quantizers rely on types inferred by onnx, which stops at an operator of another domain
      (com.microsoft.Gelu): static ranges would be missing after it. So such types are recorded.
    """
    from smelt.export.graph_files import read_graph, write_graph
    from smelt.export.third_party.normalize_gemm import (
        expand_gemm_biases,
        fold_gemm_factors,
        gemms_with_factors,
        gemms_with_matrix_bias,
    )
    from smelt.export.third_party.normalize_graph import is_normalized, normalize_graph

    bare = read_graph(path, values=False)
    graph = bare.graph
    wrong = (
        _constant_nodes(bare)
        or _shared_weights(graph)
        or gemms_with_factors(graph)
        or gemms_with_matrix_bias(graph)
    )
    wrong = wrong or _weight_value_infos(graph)
    if (
        not wrong
        and not _has_custom_operators(bare)
        and is_normalized(bare)
        and _onnx_opset(bare) >= PER_CHANNEL_OPSET
    ):
        return path, _onnx_opset(bare)
    model = normalize_graph(path)
    for value in _weight_value_infos(model.graph):
        model.graph.value_info.remove(value)
    constants_to_initializers(model)
    _duplicate_shared(model.graph)
    fold_gemm_factors(model.graph)
    expand_gemm_biases(model.graph)
    model = _convert_opset(model)
    _annotate_types(model)
    write_graph(model, folder / path.name)
    return folder / path.name, _onnx_opset(model)


def _has_custom_operators(model: Any) -> bool:
    """Return whether the graph has operators that onnx does not define, judged by their domain."""
    return any(normalized_domain(node.domain) for node in model.graph.node)


def _annotate_types(model: Any) -> None:
    """Record the types of the values after operators of other domains; shapes remain unknown."""
    if not _has_custom_operators(model):
        return
    from onnx import helper

    from smelt.export.precision.value_types import value_types

    graph = model.graph
    said = {value.name for value in (*graph.input, *graph.output, *graph.value_info)}
    kinds = value_types(model)
    for name in (name for node in graph.node for name in node.output if name not in said):
        if name in kinds:
            graph.value_info.append(helper.make_tensor_value_info(name, kinds[name], None))


def _onnx_opset(model: Any) -> int:
    return next(
        (one.version for one in model.opset_import if one.domain in ("", "ai.onnx")), PER_CHANNEL_OPSET
    )


def _constant_nodes(model: Any) -> list[Any]:
    """Return the Constant nodes of the graph itself that hold a dense tensor or numbers."""
    held = {"value", "value_float", "value_floats", "value_int", "value_ints"}
    nodes = (node for node in model.graph.node if node.op_type == "Constant" and not node.domain)
    return [node for node in nodes if held & {attribute.name for attribute in node.attribute}]


def constants_to_initializers(model: Any) -> None:
    """Convert the Constant nodes of the graph itself to initializers."""
    import numpy as np
    from onnx import helper, numpy_helper

    lifted = _constant_nodes(model)
    ends = {value.name for value in model.graph.output}
    for node in lifted:
        if node.output[0] in ends:  # some tools do not accept a graph output that is an initializer
            continue
        attribute = node.attribute[0]
        value = helper.get_attribute_value(attribute)
        if attribute.name == "value":
            tensor = model.graph.initializer.add()
            tensor.CopyFrom(value)
        else:
            kind = np.float32 if "float" in attribute.name else np.int64
            tensor = model.graph.initializer.add()
            tensor.CopyFrom(numpy_helper.from_array(np.asarray(value, kind)))
        tensor.name = node.output[0]
        model.graph.node.remove(node)
    if lifted:
        model.ir_version = max(4, model.ir_version)  # before IR version 4 each initializer was an input too


def _weight_value_infos(graph: Any) -> list[Any]:
    """Return the value infos of weights, whose types and shapes are known from the weights themselves."""
    weights = {tensor.name for tensor in graph.initializer}
    return [value for value in graph.value_info if value.name in weights]


def _shared_weights(graph: Any) -> list[tuple[Any, int]]:
    """Return (node, input index) of the matrices and biases that have other readers or are outputs."""
    weights = {tensor.name for tensor in graph.initializer}
    nodes = list(all_nodes(graph.node))
    readers = Counter(name for node in nodes for name in node.input)
    readers.update(value.name for value in graph.output)
    return [
        (node, place)
        for node in nodes
        for place in _MODIFIED_INPUTS.get(node.op_type, ())
        if len(node.input) > place and node.input[place] in weights and readers[node.input[place]] > 1
    ]


def _duplicate_shared(graph: Any) -> None:
    """Give each node that shares a matrix or a bias its own copy, under an unused name."""
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    taken = {name for node in all_nodes(graph.node) for name in (*node.input, *node.output)} | set(tensors)
    for number, (node, place) in enumerate(_shared_weights(graph)):
        name = f"{node.input[place]}.own{number}"
        while name in taken:
            name += "_"
        new = graph.initializer.add()
        new.CopyFrom(tensors[node.input[place]])
        new.name = node.input[place] = name
        taken.add(name)
    read = {value.name for value in graph.output}.union(*(node_inputs(node) for node in graph.node))
    for tensor in [tensor for tensor in graph.initializer if tensor.name not in read]:
        graph.initializer.remove(tensor)


def _convert_opset(model: Any) -> Any:
    """Return the model in opset 13 if it is older and onnx can convert it, else unchanged."""
    from onnx import checker, version_converter

    if _onnx_opset(model) >= PER_CHANNEL_OPSET:
        return model
    try:
        found = version_converter.convert_version(model, PER_CHANNEL_OPSET)
        checker.check_model(found)
    except Exception:  # the converter does not know an operator, or it is not a standard one
        return model
    return found
