"""Quantize only the weights of a graph: int8 or int4 in the file, float activations.

`qdq`: standard operators, one DequantizeLinear for each weight before its float operator:

    weights int8 [K, N], scales float32 [N]               -- DequantizeLinear, axis 1 -- MatMul, Gemm, Conv
    weights int8 or int4 [K, N], scales float32 [K / g, N] -- DequantizeLinear, axis 0, blocks of g

scale = max |w| / (2^(b - 1) - 1), as onnxruntime.quantization computes symmetric weights, and for 4 bits as
NVIDIA's Model Optimizer does. int8 zero points are written although all are 0: without VNNI ONNX Runtime 1.31
converts int8 weights to uint8, adds a single zero point, and then rejects it (quantize_linear.cc,
PrepareForQDQ).

`qoperator`: MatMulNBits of ONNX Runtime, by its own MatMulNBitsQuantizer.

Shapes: K = inputs, N = outputs, g = inputs that share a scale, b = bits.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.export.onnx_models.normalize_graph import make_node_names_unique, unused_name, value_names
from smelt.export.onnx_models.ort_quantizers import name_float_nodes
from smelt.export.onnx_models.prepare_for_quantizer import unquantizable_nodes
from smelt.export.onnx_models.settings import RECURRENT_OPS, QuantizeOnnxSettings
from smelt.runtimes.graph_walk import all_nodes, content_key, iter_graphs
from smelt.stage import Context

_NODE_BYTES = 300  # of a DequantizeLinear or MatMulNBits with its tensors, without their values
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class _Weight:
    """A constant matrix of a node. index: of the input. channels: its axis of outputs.

    inputs: its axis of inputs, None where it has no blocks.
    """

    node: Any
    index: int
    channels: int
    inputs: int | None

    @property
    def name(self) -> str:
        return str(self.node.input[self.index])


def quantize_weights(source: Path, target: Path, settings: QuantizeOnnxSettings, ctx: Context) -> None:
    """Write the graph `source` with quantized weights as `target`.

    Args:
        source: a graph as `prepare_for_quantizer` returns it.
        target: in a folder for temporary files.
        settings: of the stage, with a weight-only scheme.
        ctx: gets a warning of the nodes that remain float.
    """
    from smelt.export.graph_files import read_graph, write_graph

    model = read_graph(source)
    if settings.uses_nbits:  # which its quantizer excludes by their names
        make_node_names_unique(model.graph, set(settings.exclude), value_names(model.graph))
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    weights = []
    for graph in iter_graphs(model.graph):
        kinds = {name: tensor.data_type for name, tensor in tensors.items()}
        reasons = unquantizable_nodes(graph, kinds, settings.quantized_op_types)
        candidates = list(_constant_weights(graph, tensors, settings))
        reasons |= {
            index: reason
            for index, weight in candidates
            if (reason := _obstacle(weight, tensors[weight.name], settings)) is not None
        }
        name_float_nodes(graph, reasons, ctx)
        weights += [
            weight
            for index, weight in candidates
            if index not in reasons and weight.node.name not in settings.exclude
        ]
    read_elsewhere = _values_read_elsewhere(model.graph, weights, tensors)
    weights = [
        weight
        for weight in weights
        if content_key(tensors[weight.name]) not in read_elsewhere
        and _is_smaller(weight, tensors[weight.name], settings)
    ]
    if settings.uses_nbits:
        model = _to_nbits(model, {weight.node.name for weight in weights}, settings)
    else:
        _dequantize_weights(model.graph, weights, settings)
    write_graph(model, target)


def _values_read_elsewhere(graph: Any, weights: list[_Weight], tensors: dict[str, Any]) -> set[bytes]:
    """Return the content of weights that other nodes read as floats: a second form would add to the file."""
    quantized = {(weight.node.output[0], weight.index) for weight in weights}
    contents = {weight.name: content_key(tensors[weight.name]) for weight in weights}
    shapes = {tuple(tensors[name].dims) for name in contents}
    others: set[bytes] = set()
    for node in all_nodes(graph.node):
        for index, name in enumerate(node.input):
            tensor = tensors.get(name)
            if tensor is None or (node.output[0], index) in quantized:
                continue
            if tuple(tensor.dims) in shapes:
                others.add(contents.get(name) or content_key(tensor))
    return others


def _constant_weights(
    graph: Any, tensors: dict[str, Any], settings: QuantizeOnnxSettings
) -> Iterator[tuple[int, _Weight]]:
    """Yield the nodes of a graph with a constant float32 matrix, each with its index."""
    from onnx import TensorProto

    for node_index, node in enumerate(graph.node):
        if node.op_type not in settings.quantized_op_types or node.domain:
            continue
        both = node.op_type == "MatMul" and not settings.uses_nbits
        for input_index in (1, 0) if both else (1, 2) if node.op_type in RECURRENT_OPS else (1,):
            tensor = tensors.get(node.input[input_index])
            if tensor is None or tensor.data_type != TensorProto.FLOAT or len(tensor.dims) < 2:
                continue
            if settings.uses_nbits and math.prod(tensor.dims[:-2]) != 1:
                continue
            yield node_index, _Weight(node, input_index, *_weight_axes(node, input_index, len(tensor.dims)))
            if both:
                break


def _weight_axes(node: Any, input_index: int, rank: int) -> tuple[int, int | None]:
    """Return the axes of outputs and of inputs; the latter is None for a convolution, which has no blocks."""
    if node.op_type in ("Conv", "ConvTranspose"):
        return int(node.op_type == "ConvTranspose"), None
    if node.op_type in RECURRENT_OPS:  # [directions, gates * H, inputs]
        return 1, None
    transposed = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
    rows_are_outputs = transposed if node.op_type == "Gemm" else input_index == 0
    return (rank - 2, rank - 1) if rows_are_outputs else (rank - 1, rank - 2)


def _obstacle(weight: _Weight, tensor: Any, settings: QuantizeOnnxSettings) -> str | None:
    """Return why a weight cannot be quantized."""
    from onnx import numpy_helper

    if not np.isfinite(numpy_helper.to_array(tensor)).all():
        return "infinite or NaN weights"
    size = settings.block_size
    if (
        settings.target == "tensorrt"
        and size
        and weight.inputs is not None
        and tensor.dims[weight.inputs] % size
    ):
        return f"{tensor.dims[weight.inputs]} inputs are no multiple of {size}"
    return None


def _is_smaller(weight: _Weight, tensor: Any, settings: QuantizeOnnxSettings) -> bool:
    """Return whether the quantized weight takes fewer bytes than the float one."""
    count, size = math.prod(tensor.dims), settings.block_size
    if not count:
        return False
    if weight.inputs is None or not size:
        scales, padded = tensor.dims[weight.channels], count
    else:
        inputs = tensor.dims[weight.inputs]
        scales = count // inputs * -(-inputs // size)
        padded = scales * size if settings.uses_nbits else count
    quantized = padded * settings.bits / 8 + scales * (_FLOAT_BYTES + 1) + _NODE_BYTES
    return bool(quantized < _FLOAT_BYTES * count)


def quantize_symmetric(
    values: NDArray[Any], bits: int, axis: int | None, block_size: int = 0
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return integers in the shape of `values`, int8, and float32 scales.

    Args:
        values: finite float32.
        bits: 4 or 8.
        axis: of the outputs, each with a scale; with `block_size` that of the inputs; None: one scale.
        block_size: values along `axis` that share a scale; 0: no blocks.
    """
    largest_code = np.float32(2 ** (bits - 1) - 1)
    magnitudes = np.abs(values)
    if block_size and axis is not None:
        starts = np.arange(0, values.shape[axis], block_size)
        largest = np.maximum.reduceat(magnitudes, starts, axis)
    elif axis is not None:
        largest = magnitudes.max(axis=tuple(other for other in range(values.ndim) if other != axis))
    else:
        largest = magnitudes.max()
    scales = np.asarray(np.where(largest > 0, largest / largest_code, 1), np.float32)
    scales = np.where(scales > 0, scales, np.float32(1))  # of a magnitude below the smallest float32
    if block_size and axis is not None:
        spread = np.repeat(scales, block_size, axis).take(range(values.shape[axis]), axis)
    else:
        spread = scales if axis is None else np.expand_dims(
            scales, tuple(other for other in range(values.ndim) if other != axis)
        )  # fmt: skip
    return np.clip(np.rint(values / spread), -largest_code, largest_code).astype(np.int8), scales


def _dequantize_weights(graph: Any, weights: list[_Weight], settings: QuantizeOnnxSettings) -> None:
    """Replace the weights by integers with DequantizeLinear; equal weights are stored once."""
    from onnx import TensorProto, helper, numpy_helper

    from smelt.export.simplify_graph import drop_unused_constants

    tensors = {tensor.name: tensor for tensor in graph.initializer}
    used_names = value_names(graph)
    replaced = {weight.name for weight in weights}
    outputs: dict[tuple[Any, ...], str] = {}
    nodes = []
    for weight in weights:
        values = numpy_helper.to_array(tensors[weight.name])
        size = settings.block_size
        is_blocked = bool(size) and weight.inputs is not None and values.shape[weight.inputs] > size
        axis = weight.inputs if is_blocked else weight.channels if settings.is_per_channel else None
        key = (hashlib.sha256(values.tobytes()).digest(), values.shape, axis)
        if key not in outputs:
            codes, scales = quantize_symmetric(values, settings.bits, axis, size * is_blocked)
            names = [
                unused_name(f"{weight.name}.{kind}", used_names)
                for kind in (f"int{settings.bits}", "scale", "zero_point", "dequantized")
            ]
            tensor_type = TensorProto.INT8 if settings.bits == 8 else TensorProto.INT4
            dtype = helper.tensor_dtype_to_np_dtype(tensor_type)
            parts = (codes.astype(dtype), scales, np.zeros(scales.shape, dtype))
            graph.initializer.extend(
                numpy_helper.from_array(part, name) for part, name in zip(parts, names[:3], strict=True)
            )
            options: dict[str, Any] = {} if axis is None else {"axis": axis}
            options |= {"block_size": size} if is_blocked else {}
            nodes.append(helper.make_node("DequantizeLinear", names[:3], names[3:], names[3], **options))
            outputs[key] = names[3]
        weight.node.input[weight.index] = outputs[key]
    others = list(graph.node)
    del graph.node[:]
    graph.node.extend([*nodes, *others])
    read_inside = {name for node in all_nodes(graph.node) for name in node.input}
    drop_unused_constants(graph, replaced - read_inside)


def _to_nbits(model: Any, names: Collection[str], settings: QuantizeOnnxSettings) -> Any:
    """Return the model with MatMulNBits instead of the MatMul and Gemm nodes `names`."""
    from onnxruntime.quantization.onnx_model import ONNXModel

    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    root.handlers[:], root.level = handlers, level  # which the import changes

    wrapped = ONNXModel(model)
    wrapped.replace_gemm_with_matmul()
    chosen = {*names, *(f"{name}_MatMul" for name in names)}
    products = [node.name for node in all_nodes(wrapped.model.graph.node) if node.op_type == "MatMul"]
    quantizer = MatMulNBitsQuantizer(
        wrapped.model, settings.bits, settings.block_size, settings.symmetric, settings.accuracy_level,
        nodes_to_exclude=[name for name in products if name not in chosen],
    )  # fmt: skip
    quantizer.process()
    result = quantizer.model.model
    for graph in iter_graphs(result.graph):  # of a weight with several readers it writes several
        first = {tensor.name: tensor for tensor in reversed(graph.initializer)}
        unique = list(reversed(first.values()))
        del graph.initializer[:]
        graph.initializer.extend(unique)
    return result
