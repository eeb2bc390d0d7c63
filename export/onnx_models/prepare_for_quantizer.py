"""Prepare a graph for ONNX Runtime's quantizers: weights, Gemm, and the nodes that must remain float.

Weights become initializers that are not shared.

Nodes remain float if they read or compute a mask, or have types without int8. A mask has one value for valid
positions and a large negative one for padding. One scale for both makes all other values 0; a scale
calibrated without padding clips the mask, and padding gets attention.

Gemm gets factors of 1, and a bias vector with one value per output. ONNX allows any bias that broadcasts to
the output. The static quantizer assumes a vector: for a scalar it reads beyond the end, for a matrix it takes
the rows for outputs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.core.errors import InputError
from smelt.export.onnx_models.settings import PER_CHANNEL_OPSET
from smelt.runtimes.graph_walk import (
    all_nodes,
    node_inputs,
    node_label,
    normalized_domain,
    opset_versions,
    subgraphs,
)

# Inputs of a node that the quantizer changes: matrices (transposed), and biases with a scale of their own.
_MODIFIED_INPUTS = {"Gemm": (1, 2), "Conv": (2,), "ConvTranspose": (2,), "LSTM": (1, 2)}


def prepare_for_quantizer(
    path: Path, folder: Path, min_opset: int = PER_CHANNEL_OPSET, opset: int | None = None
) -> tuple[Path, int]:
    """Return the graph in `path`, or a copy in `folder` that ONNX Runtime quantizes correctly, and its opset.

    Args:
        path: an ONNX file.
        folder: an empty one for the copy.
        min_opset: the opset that the quantized operators need.
        opset: of the result; None: the graph's, or `min_opset` if that is larger.

    Raises:
        InputError: onnx cannot convert the graph to an opset that was set or is needed
            (`opset-not-convertible`).

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
    from smelt.export.onnx_models.normalize_graph import is_normalized, normalize_graph

    structure = read_graph(path, values=False)
    graph = structure.graph
    wrong = (
        _constant_nodes(structure)
        or _shared_weights(graph)
        or gemms_with_factors(graph)
        or gemms_with_matrix_bias(graph)
    )
    wrong = wrong or _weight_value_infos(graph)
    if (
        not wrong
        and not _has_custom_operators(structure)
        and is_normalized(structure)
        and _onnx_opset(structure) >= min_opset
        and opset in (None, _onnx_opset(structure))
    ):
        return path, _onnx_opset(structure)
    model = normalize_graph(path)
    for value in _weight_value_infos(model.graph):
        model.graph.value_info.remove(value)
    constants_to_initializers(model)
    _duplicate_shared(model.graph)
    fold_gemm_factors(model.graph)
    expand_gemm_biases(model.graph)
    model = _convert_opset(model, opset or max(min_opset, _onnx_opset(model)), opset is not None)
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

    from smelt.export.value_types import value_types

    graph = model.graph
    typed = {value.name for value in (*graph.input, *graph.output, *graph.value_info)}
    types_by_name = value_types(model)
    for name in (name for node in graph.node for name in node.output if name not in typed):
        if name in types_by_name:
            graph.value_info.append(helper.make_tensor_value_info(name, types_by_name[name], None))


def _onnx_opset(model: Any) -> int:
    return opset_versions(model).get("", PER_CHANNEL_OPSET)


def _constant_nodes(model: Any) -> list[Any]:
    """Return the Constant nodes of the graph itself that hold a dense tensor or numbers."""
    value_attributes = {"value", "value_float", "value_floats", "value_int", "value_ints"}
    nodes = (node for node in model.graph.node if node.op_type == "Constant" and not node.domain)
    return [node for node in nodes if value_attributes & {attribute.name for attribute in node.attribute}]


def constants_to_initializers(model: Any) -> None:
    """Convert the Constant nodes of the graph itself to initializers."""
    from onnx import helper, numpy_helper

    constant_nodes = _constant_nodes(model)
    ends = {value.name for value in model.graph.output}
    for node in constant_nodes:
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
    if constant_nodes:
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
        (node, input_index)
        for node in nodes
        for input_index in _MODIFIED_INPUTS.get(node.op_type, ())
        if len(node.input) > input_index
        and node.input[input_index] in weights
        and readers[node.input[input_index]] > 1
    ]


def _duplicate_shared(graph: Any) -> None:
    """Give each node that shares a matrix or a bias its own copy, under an unused name."""
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    used_names = {name for node in all_nodes(graph.node) for name in (*node.input, *node.output)} | set(
        tensors
    )
    for copy_index, (node, input_index) in enumerate(_shared_weights(graph)):
        name = f"{node.input[input_index]}.own{copy_index}"
        while name in used_names:
            name += "_"
        new = graph.initializer.add()
        new.CopyFrom(tensors[node.input[input_index]])
        new.name = node.input[input_index] = name
        used_names.add(name)
    read_names = {value.name for value in graph.output}.union(*(node_inputs(node) for node in graph.node))
    for tensor in [tensor for tensor in graph.initializer if tensor.name not in read_names]:
        graph.initializer.remove(tensor)


def _convert_opset(model: Any, opset: int, is_set: bool) -> Any:
    """Return the model in another opset; unchanged if onnx cannot convert it and only scales need it.

    Raises:
        InputError: the opset was set, or 4-bit weights or blocks need it.
    """
    from onnx import checker, helper, version_converter

    before = _onnx_opset(model)
    if before == opset:
        return model
    try:
        converted = version_converter.convert_version(model, opset)
        checker.check_model(converted)
    except Exception as error:  # the converter does not support an operator, or it is not a standard one
        if not is_set and opset == PER_CHANNEL_OPSET:
            return model
        advice = "Remove opset, or set another one." if is_set else "Remove quant_format and group_size."
        raise InputError(
            f"onnx cannot convert the graph from opset {before} to {opset}:"
            f" {_unconvertible_node(model, str(error))}. {advice}",
            code="opset-not-convertible",
            setting="opset" if is_set else None,
        ) from error
    converted.ir_version = max(model.ir_version, helper.find_min_ir_version_for(converted.opset_import, True))
    return converted


def _unconvertible_node(model: Any, reason: str) -> str:
    """Return the node whose operator the converter's error names, and the end of that error."""
    tokens = {token for part in re.findall(r"\w+", reason) for token in (part, *part.split("_"))}
    nodes = list(all_nodes(model.graph.node))
    operators = {node.op_type for node in nodes}
    named = operators & tokens or {name for name in operators if name.lower() in tokens}
    text = " ".join(reason.rsplit("failed:", maxsplit=1)[-1].split())[:200].rstrip(".")
    node = next((node for node in nodes if node.op_type in named), None)
    return text if node is None else f"node {node_label(node)}: {text}"


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
    reasons = unquantizable_nodes(model.graph, kinds, operators)
    for node_index, node in enumerate(model.graph.node):
        if node.op_type in operators and masked & {*node.input, *node.output}:
            reasons[node_index] = "a mask"
    return reasons


def unquantizable_nodes(graph: Any, kinds: Mapping[str, int], operators: Collection[str]) -> dict[int, str]:
    """Return the indices of the nodes of a graph that the quantizers do not support, each with the reason."""
    # for a sum over nothing ONNX Runtime's int8 operators return uninitialized memory
    empty = {tensor.name for tensor in graph.initializer if 0 in tensor.dims}
    nodes = ((node_index, node) for node_index, node in enumerate(graph.node) if node.op_type in operators)
    reasons = (
        (
            node_index,
            "an empty weight"
            if empty & {*node.input}
            else _unquantizable_type(node, kinds) or _foreign_domain(node),
        )
        for node_index, node in nodes
    )
    return {node_index: reason for node_index, reason in reasons if reason}


def unfused_activations(graph: Any, operators: Collection[str]) -> dict[int, str]:
    """Return the indices of the ReLU and Clip that the static quantizer must skip, each with the reason.

    It removes them after a convolution, because the range of the convolution's output, which includes 0,
    clips in the same way. A bound on the other side of 0, or a computed one, is then lost; and inner graphs
    (If, Loop, Scan) still read the removed value. If the convolution's output is an output of the graph, the
    quantizer keeps the activation, but gives both values the activation's range (onnxruntime 1.31,
    quantization/base_quantizer.py, adjust_tensor_ranges, which counts only nodes as readers).
    """
    outputs = {value.name for value in graph.output}
    subgraph_inputs = {name for node in graph.node if subgraphs(node) for name in node_inputs(node)}
    constants = {name: value for name, value in _float_constants(graph) if value.size == 1}
    reasons = {}
    for node_index, node in enumerate(graph.node):
        if node.op_type not in ("Relu", "Clip") or node.op_type not in operators:
            continue
        if subgraph_inputs & {node.input[0], node.output[0]}:
            reasons[node_index] = "used in If, Loop or Scan"
        elif node.input[0] in outputs:
            reasons[node_index] = "its input is an output of the graph"
        elif node.op_type == "Clip" and not _clips_around_zero(node, constants):
            reasons[node_index] = "bounds are computed or do not include 0"
    return reasons


def _clips_around_zero(node: Any, constants: Mapping[str, NDArray[Any]]) -> bool:
    """Return whether a Clip has constant bounds, the lower one at most 0 and the upper one at least 0."""
    low, high = [*node.input[1:3], "", ""][:2]
    if any(name and name not in constants for name in (low, high)):
        return False
    attributes = {attribute.name: attribute.f for attribute in node.attribute}  # before opset 11
    lower_bound = float(constants[low].item()) if low else attributes.get("min", -np.inf)
    upper_bound = float(constants[high].item()) if high else attributes.get("max", np.inf)
    return lower_bound <= 0 <= upper_bound


def masked_values(graph: Any) -> set[str]:
    """Return the values that contain the fill value of a mask, or may contain it."""
    return {*_mask_constants(graph), *_between_mask_and_softmax(graph)}


def has_huge_values(values: NDArray[Any]) -> bool:
    """Return whether an array contains infinite or very large values, which int8 scales cannot represent."""
    return bool((np.abs(values) > np.finfo(np.float32).max / 1e8).any())


def _unquantizable_type(node: Any, kinds: Mapping[str, int]) -> str | None:
    from onnx import TensorProto

    type_texts: dict[int, str] = {
        TensorProto.FLOAT16: "float16",
        TensorProto.BFLOAT16: "bfloat16",
        TensorProto.DOUBLE: "float64",
    }
    return next((type_texts[kinds[name]] for name in node.input if kinds.get(name) in type_texts), None)


def _foreign_domain(node: Any) -> str | None:
    """Return the node's own domain if the quantizer, which compares only names, assumes another one."""
    expected_domain = _RUNTIME if node.op_type in _OF_RUNTIME else ""
    domain = normalized_domain(node.domain)
    return None if domain == expected_domain else f"{node.op_type} of {domain or 'ONNX'}"


def _mask_constants(graph: Any) -> set[str]:
    """Return the values that are computed from a constant which is the fill value of a mask."""
    constants = dict(_float_constants(graph))
    mask_values = {name for name, value in constants.items() if _is_mask_fill(value)}
    for node in graph.node:
        if node.op_type not in _MASK_CHAIN_OPS:
            continue
        bounds = constants if node.op_type in _CLIP_OPS else ()
        if any(name in mask_values and name not in bounds for name in node.input):
            mask_values.update(node.output)
    return mask_values - set(constants)


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
    nonzero = value[value != 0]
    return bool(nonzero.size and ((nonzero <= _MASK_FILL) | (nonzero >= _HUGE_VALUE)).all())


def _between_mask_and_softmax(graph: Any) -> set[str]:
    """Return the values between a mask and a Softmax, where the mask may be computed or an input.

    Searched from each Softmax back through elementwise operators up to the operator that computes the scores:
    a value is masked if two non-constant values were combined before it.
    """
    constants = {name for name, _ in _float_constants(graph)} | {tensor.name for tensor in graph.initializer}
    producers = {name: node for node in graph.node for name in node.output}
    pending = [node.input[0] for node in graph.node if node.op_type in _SOFTMAX]
    chain_values: set[str] = set()
    while pending:
        name = pending.pop()
        if name not in chain_values and name in producers and producers[name].op_type in _MASK_CHAIN_OPS:
            chain_values.add(name)
            pending += producers[name].input
    order = {name: node_index for node_index, node in enumerate(graph.node) for name in node.output}
    masked: set[str] = set()
    for name in sorted(chain_values, key=order.__getitem__):
        node = producers[name]
        variable_inputs = [
            input_name for input_name in node.input if input_name and input_name not in constants
        ]
        combines = node.op_type in _COMBINE_OPS and len(variable_inputs) > 1
        if combines or masked & set(node.input):
            masked.add(name)
    return masked


_INPUT, _MATRIX, _BIAS = 0, 1, 2


def gemms_with_factors(graph: Any) -> list[Any]:
    """Return the float Gemm nodes whose alpha or beta is not 1."""
    nodes = (node for node in graph.node if node.op_type == "Gemm" and not normalized_domain(node.domain))
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
        kept_attributes = [
            attribute for attribute in node.attribute if attribute.name not in ("alpha", "beta")
        ]
        del node.attribute[:]
        node.attribute.extend(kept_attributes)


def _gemm_factor(node: Any, name: str) -> float:
    return next((float(attribute.f) for attribute in node.attribute if attribute.name == name), 1.0)


def _scale_input(graph: Any, node: Any, input_index: int, factor: float, tensors: dict[str, Any]) -> None:
    """Multiply an input of a node: in its constant, else with a node before it."""
    from onnx import helper, numpy_helper

    name = node.input[input_index]
    if factor == 1:
        return
    if name in tensors:
        value = numpy_helper.to_array(tensors[name])
        tensors[name].CopyFrom(numpy_helper.from_array((value * factor).astype(value.dtype), name))
        return
    kind = _gemm_dtype(graph, node, tensors)
    used_names = {value_name for other in graph.node for value_name in (*other.input, *other.output)} | set(
        tensors
    )
    new = [f"{name}.{suffix}{input_index}" for suffix in ("factor", "scaled")]
    while used_names & set(new):
        new = [f"{suffix}_" for suffix in new]
    tensors[new[0]] = graph.initializer.add()
    tensors[new[0]].CopyFrom(numpy_helper.from_array(np.asarray(factor, kind), new[0]))
    node_index = next(
        node_index
        for node_index, candidate in enumerate(graph.node)
        if candidate is node or candidate.output[0] == node.output[0]
    )
    graph.node.insert(node_index, helper.make_node("Mul", [name, new[0]], [new[1]], f"{new[1]}.mul"))
    graph.node[node_index + 1].input[input_index] = new[1]


def _gemm_dtype(graph: Any, node: Any, tensors: dict[str, Any]) -> Any:
    """Return the numpy type of a Gemm node's values, float32 if unknown."""
    from onnx import helper

    types_by_name = {
        value.name: value.type.tensor_type.elem_type
        for value in (*graph.input, *graph.value_info, *graph.output)
    }
    types_by_name |= {name: tensor.data_type for name, tensor in tensors.items()}
    known_types = (types_by_name[name] for name in (*node.input, *node.output) if types_by_name.get(name))
    element_type = next(known_types, None)
    return np.float32 if element_type is None else helper.tensor_dtype_to_np_dtype(element_type)


def gemms_with_matrix_bias(graph: Any) -> list[Any]:
    """Return the Gemm nodes whose constant bias is not a vector with one value per output."""
    sizes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    nodes = (node for node in graph.node if node.op_type == "Gemm" and not normalized_domain(node.domain))
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
            expanded = np.broadcast_to(value.ravel(), (outputs,))
            bias.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(expanded), bias.name))
            continue
        used_names = {name for node in graph.node for name in (*node.input, *node.output)} | set(tensors)
        product = f"{node.output[0]}.product"
        while product in used_names:
            product += "_"
        node_index = next(
            node_index
            for node_index, candidate in enumerate(graph.node)
            if candidate.output[:] == node.output[:]
        )
        added = helper.make_node("Add", [product, bias.name], [node.output[0]], f"{product}.add")
        graph.node.insert(node_index + 1, added)
        graph.node[node_index].output[0] = product
        del graph.node[node_index].input[_BIAS]


def _output_size(node: Any, sizes: dict[str, tuple[int, ...]]) -> int:
    is_transposed = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
    matrix = sizes[node.input[_MATRIX]]
    return matrix[0 if is_transposed else -1]
