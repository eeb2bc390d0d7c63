"""Rules on explicit quantization: QuantizeLinear, DequantizeLinear and the quantized values before them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from smelt.export.tensorrt.rules.checked_graph import (
    CheckedGraph,
    RuleFinding,
    input_name,
    node_attribute,
    node_location,
    type_name,
)

_QDQ_OPS = ("QuantizeLinear", "DequantizeLinear")
# names in onnx.TensorProto
_SUPPORTED_TYPES = ("INT8", "UINT8", "INT4", "FLOAT8E4M3FN", "FLOAT4E2M1")
# NVIDIA's TensorRT documentation, "Quantization Schemes"
_BLOCK_SIZES = (64, 128)


def quantized_types(graph: CheckedGraph) -> Iterator[RuleFinding]:
    """Find quantized types that TensorRT does not support; an int32 one is a quantized bias.

    For uint8 see `unsigned_types`.
    """
    from onnx import TensorProto

    fits = [TensorProto.DataType.Value(name) for name in _SUPPORTED_TYPES]
    for node in graph.nodes_of_type(*_QDQ_OPS):
        kind = _quantized_type(node, graph)
        if kind and type_name(kind) == "int32":
            yield RuleFinding(
                node_location(node),
                "a quantized bias (int32); TensorRT supports quantized weights and activations only.",
            )
        elif kind and kind not in fits:
            yield RuleFinding(
                node_location(node), f"quantized values of type {type_name(kind)}; TensorRT requires int8."
            )


def unsigned_types(graph: CheckedGraph) -> Iterator[RuleFinding]:
    """Find uint8 values with zero point 0: TensorRT reads them as int8, and values above 127 are clipped."""
    for node in graph.nodes_of_type(*_QDQ_OPS):
        if type_name(_quantized_type(node, graph)) == "uint8":
            yield RuleFinding(
                node_location(node), "uint8 values; TensorRT requires int8 and reads them as int8."
            )


def zero_points(graph: CheckedGraph) -> Iterator[RuleFinding]:
    """Find zero points other than 0: asymmetric quantization."""
    for node in graph.nodes_of_type(*_QDQ_OPS):
        zero = graph.constant_value(input_name(node, 2))
        if zero is not None and zero.astype("float64").any():
            yield RuleFinding(
                node_location(node),
                "a zero point other than 0 (asymmetric); TensorRT requires symmetric quantization.",
            )


def non_positive_scales(graph: CheckedGraph) -> Iterator[RuleFinding]:
    """Find scales that are not positive."""
    for node in graph.nodes_of_type(*_QDQ_OPS):
        scale = graph.constant_value(input_name(node, 1))
        if scale is not None and not (scale.astype("float64") > 0).all():
            yield RuleFinding(node_location(node), "a scale that is not positive.")


def unsupported_blocks(graph: CheckedGraph) -> Iterator[RuleFinding]:
    """Find blocks along an axis before the last two, or that do not fill their axis."""
    for node in graph.nodes_of_type("DequantizeLinear"):
        if not (cut := _block_layout(node, graph)):
            continue
        axis, count, sizes = cut
        if axis < len(sizes) - 2:
            yield RuleFinding(
                node_location(node),
                f"blocks along axis {axis} of {len(sizes)}; TensorRT supports the last two.",
                "Move that axis to the end before quantizing.",
            )
        elif count < 1 or sizes[axis] % count:
            yield RuleFinding(
                node_location(node),
                f"{count} scales along an axis of {sizes[axis]}; TensorRT requires whole blocks.",
                "Pad the axis with zeros to a multiple of the block size.",
            )


def undocumented_blocks(graph: CheckedGraph) -> Iterator[RuleFinding]:
    """Find blocks that TensorRT for RTX builds, but TensorRT's documentation does not list."""
    from onnx import TensorProto

    for node in graph.nodes_of_type("DequantizeLinear"):
        kind, cut = _quantized_type(node, graph), _block_layout(node, graph)
        if kind == TensorProto.INT8 and cut:
            yield RuleFinding(
                node_location(node),
                "int8 values with one scale per block; TensorRT documents blocks only for 4-bit values.",
                "Use one scale per output, or 4-bit weights.",
            )
        elif kind == TensorProto.INT4 and input_name(node, 0) not in graph.constants:
            yield RuleFinding(
                node_location(node),
                "4-bit activations; TensorRT documents 4-bit values only for weights.",
                "Keep activations in float, or use int8.",
            )
        elif kind == TensorProto.INT4 and _block_size(cut) not in _BLOCK_SIZES:
            found = f"in blocks of {_block_size(cut)}" if cut else "without blocks"
            yield RuleFinding(
                node_location(node),
                f"4-bit values {found}; TensorRT documents blocks of 64 and of 128.",
                "Quantize with group_size: 64 or 128.",
            )


def constants_without_scale(graph: CheckedGraph) -> Iterator[RuleFinding]:
    """Find int8 and int4 constants with readers other than DequantizeLinear."""
    from onnx import TensorProto

    for node in graph.nodes_of_type():
        if node.op_type in _QDQ_OPS:
            continue
        for name in node.input:
            tensor = graph.constants.get(name)
            kinds = (TensorProto.INT8, TensorProto.INT4)
            if tensor is not None and tensor.data_type in kinds and len(tensor.dims):
                yield RuleFinding(
                    node_location(node),
                    f"it reads the {type_name(tensor.data_type)} constant '{name}'; TensorRT supports such"
                    " constants only as inputs of DequantizeLinear.",
                    "Dequantize it first, or store it as int32.",
                )


def _quantized_type(node: Any, graph: CheckedGraph) -> int:
    """Return the quantized type of a pair; of QuantizeLinear that of its zero point or `output_dtype`."""
    from onnx import TensorProto

    if node.op_type == "DequantizeLinear":
        return graph.element_type(input_name(node, 0))
    if zero := input_name(node, 2):
        return graph.element_type(zero)
    return int(node_attribute(node, "output_dtype") or TensorProto.UINT8)


def _block_layout(node: Any, graph: CheckedGraph) -> tuple[int, int, list[int]] | None:
    """Return axis, number of blocks and sizes of a constant with one scale per block."""
    codes, scales = (graph.constants.get(input_name(node, place)) for place in (0, 1))
    if codes is None or scales is None or not len(codes.dims) == len(scales.dims) > 1:
        return None
    axis = node_attribute(node, "axis")
    axis = (1 if axis is None else axis) % len(codes.dims)
    return axis, scales.dims[axis], list(codes.dims)


def _block_size(layout: tuple[int, int, list[int]] | None) -> int:
    """Return the length of a block, 0 if there are none."""
    if layout is None or not layout[1]:
        return 0
    axis, count, sizes = layout
    return sizes[axis] // count
