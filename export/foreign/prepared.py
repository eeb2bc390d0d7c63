"""A graph as ONNX Runtime's quantizers need it: weights are initializers, and none is changed for others."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from smelt.runtime.foreign.structure import all_nodes, domain_of, reads

# Since when QuantizeLinear and DequantizeLinear have an axis, and so scales for each output.
BY_OUTPUT = 13
# The inputs that are changed for a node: matrices (transposed), and biases with a scale of their own.
_OWN = {"Gemm": (1, 2), "Conv": (2,), "ConvTranspose": (2,), "LSTM": (1, 2)}


def prepared(path: Path, folder: Path) -> tuple[Path, int]:
    """Return the graph in `path`, or a copy in `folder` that ONNX Runtime quantizes right, and its opset.

    - Weights in Constant nodes, as paddle2onnx writes them, are no weights for the quantizers; they become
      initializers.
    - An opset below 13 has one scale for a matrix; the graph is converted, where onnx can.
    - The quantizer makes MatMul of Gemm and transposes the matrix in its place (onnxruntime 1.31,
      quantization/onnx_model.py, replace_gemm_with_matmul): an embedding that is the output layer too would
      be read by its columns from then on. Of a bias that several nodes read it makes copies, under names
      that other values may have. It transposes the matrices of an LSTM too. So each of these nodes gets its
      own.
    - Functions are inlined, weights are no inputs, and inner graphs (If, Loop, Scan) read their weights from
      the outermost graph (`normalized`).
    - torch.onnx.export writes down the shapes of weights too; that of a matrix which the quantizer transposes
      is then wrong, and shape inference fails. So they are removed.
    - The quantizers compute Gemm with an alpha and a beta of 1, so both become part of its weights; the bias
      gets a number for each output.
    - The quantizers know only types that onnx infers, which ends at an operator of another domain
      (com.microsoft.Gelu): static ranges would be missing behind it. So such types are written down.
    """
    from smelt.export.foreign.gemm import fit_biases, fold_factors, misshapen, scaled
    from smelt.export.foreign.normalize import is_normal, normalized
    from smelt.export.graph_files import read_graph, write_graph

    bare = read_graph(path, values=False)
    graph = bare.graph
    wrong = _constants(bare) or _shared(graph) or scaled(graph) or misshapen(graph)
    wrong = wrong or _described(graph)
    if not wrong and not _of_others(bare) and is_normal(bare) and _opset(bare) >= BY_OUTPUT:
        return path, _opset(bare)
    model = normalized(path)
    for value in _described(model.graph):
        model.graph.value_info.remove(value)
    lift_constants(model)
    _part(model.graph)
    fold_factors(model.graph)
    fit_biases(model.graph)
    model = _converted(model)
    _write_types(model)
    write_graph(model, folder / path.name)
    return folder / path.name, _opset(model)


def _of_others(model: Any) -> bool:
    """Say whether the graph has operators that onnx does not define, as far as a domain tells it."""
    return any(domain_of(node.domain) for node in model.graph.node)


def _write_types(model: Any) -> None:
    """Write down the types of the values that follow operators of other domains; shapes stay unknown."""
    if not _of_others(model):
        return
    from onnx import helper

    from smelt.export.precision.types import value_types

    graph = model.graph
    said = {value.name for value in (*graph.input, *graph.output, *graph.value_info)}
    kinds = value_types(model)
    for name in (name for node in graph.node for name in node.output if name not in said):
        if name in kinds:
            graph.value_info.append(helper.make_tensor_value_info(name, kinds[name], None))


def _opset(model: Any) -> int:
    return next((one.version for one in model.opset_import if one.domain in ("", "ai.onnx")), BY_OUTPUT)


def _constants(model: Any) -> list[Any]:
    """Return the Constant nodes of the graph itself that hold a dense tensor or numbers."""
    held = {"value", "value_float", "value_floats", "value_int", "value_ints"}
    nodes = (node for node in model.graph.node if node.op_type == "Constant" and not node.domain)
    return [node for node in nodes if held & {attribute.name for attribute in node.attribute}]


def lift_constants(model: Any) -> None:
    """Make initializers of the Constant nodes of the graph itself."""
    import numpy as np
    from onnx import helper, numpy_helper

    lifted = _constants(model)
    ends = {value.name for value in model.graph.output}
    for node in lifted:
        if node.output[0] in ends:  # a graph's output is no initializer for every tool
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
        model.ir_version = max(4, model.ir_version)  # before it each initializer was an input too


def _described(graph: Any) -> list[Any]:
    """Return the types and shapes that the graph tells of its weights, which tell theirs themselves."""
    weights = {tensor.name for tensor in graph.initializer}
    return [value for value in graph.value_info if value.name in weights]


def _shared(graph: Any) -> list[tuple[Any, int]]:
    """Return (node, place of the input) of the matrices and biases that others read too, or the caller."""
    weights = {tensor.name for tensor in graph.initializer}
    nodes = list(all_nodes(graph.node))
    readers = Counter(name for node in nodes for name in node.input)
    readers.update(value.name for value in graph.output)
    return [
        (node, place)
        for node in nodes
        for place in _OWN.get(node.op_type, ())
        if len(node.input) > place and node.input[place] in weights and readers[node.input[place]] > 1
    ]


def _part(graph: Any) -> None:
    """Give each node that shares a matrix or a bias one of its own, under a name that nothing has."""
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    taken = {name for node in all_nodes(graph.node) for name in (*node.input, *node.output)} | set(tensors)
    for number, (node, place) in enumerate(_shared(graph)):
        name = f"{node.input[place]}.own{number}"
        while name in taken:
            name += "_"
        new = graph.initializer.add()
        new.CopyFrom(tensors[node.input[place]])
        new.name = node.input[place] = name
        taken.add(name)
    read = {value.name for value in graph.output}.union(*(reads(node) for node in graph.node))
    for tensor in [tensor for tensor in graph.initializer if tensor.name not in read]:
        graph.initializer.remove(tensor)


def _converted(model: Any) -> Any:
    """Return the model in opset 13, where it is older and onnx can convert it; else as it is."""
    from onnx import checker, version_converter

    if _opset(model) >= BY_OUTPUT:
        return model
    try:
        found = version_converter.convert_version(model, BY_OUTPUT)
        checker.check_model(found)
    except Exception:  # of an operator that the converter does not know, or that is no standard one
        return model
    return found
