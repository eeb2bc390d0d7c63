"""Rules on explicit quantization: QuantizeLinear, DequantizeLinear and the codes that stand before them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from smelt.export.tensorrt.rules.graph import Found, Graph, at, attribute, given, word

_PAIRS = ("QuantizeLinear", "DequantizeLinear")
# names in onnx.TensorProto
_FITS = ("INT8", "UINT8", "INT4", "FLOAT8E4M3FN", "FLOAT4E2M1")
# NVIDIA's TensorRT documentation, "Quantization Schemes"
_BLOCKS = (64, 128)


def codes(graph: Graph) -> Iterator[Found]:
    """Codes of a type that TensorRT does not quantize to; int32 is what a quantized bias has.

    Of uint8 see `unsigned_codes`.
    """
    from onnx import TensorProto

    fits = [TensorProto.DataType.Value(name) for name in _FITS]
    for node in graph.of(*_PAIRS):
        kind = _type_of_codes(node, graph)
        if kind and word(kind) == "int32":
            yield Found(
                at(node), "a quantized bias (int32); TensorRT quantizes weights and activations only."
            )
        elif kind and kind not in fits:
            yield Found(at(node), f"{word(kind)} codes; TensorRT wants int8.")


def unsigned_codes(graph: Graph) -> Iterator[Found]:
    """uint8 codes with zero point 0: TensorRT reads them as int8, and what is above 127 is cut."""
    for node in graph.of(*_PAIRS):
        if word(_type_of_codes(node, graph)) == "uint8":
            yield Found(at(node), "uint8 codes; TensorRT wants int8, and reads them as if they were.")


def zero_points(graph: Graph) -> Iterator[Found]:
    """Zero points that are not 0: asymmetric quantization."""
    for node in graph.of(*_PAIRS):
        zero = graph.values(given(node, 2))
        if zero is not None and zero.astype("float64").any():
            yield Found(at(node), "a zero point that is not 0 (asymmetric); TensorRT wants symmetric codes.")


def scales(graph: Graph) -> Iterator[Found]:
    """Scales of 0 or below."""
    for node in graph.of(*_PAIRS):
        scale = graph.values(given(node, 1))
        if scale is not None and not (scale.astype("float64") > 0).all():
            yield Found(at(node), "a scale that is not positive.")


def blocks(graph: Graph) -> Iterator[Found]:
    """Blocks along an axis that is none of the last two, or that do not fill it."""
    for node in graph.of("DequantizeLinear"):
        if not (cut := _cut(node, graph)):
            continue
        axis, count, sizes = cut
        if axis < len(sizes) - 2:
            yield Found(
                at(node), f"blocks along axis {axis} of {len(sizes)}; TensorRT takes the last two.",
                "Move that axis behind the others before the codes are made.",
            )  # fmt: skip
        elif count < 1 or sizes[axis] % count:
            yield Found(
                at(node), f"{count} scales along an axis of {sizes[axis]}; TensorRT wants whole blocks.",
                "Fill the axis up with zeros to a multiple of the block size.",
            )  # fmt: skip


def other_blocks(graph: Graph) -> Iterator[Found]:
    """Blocks that TensorRT for RTX builds, and that TensorRT's documentation does not have."""
    from onnx import TensorProto

    for node in graph.of("DequantizeLinear"):
        kind, cut = _type_of_codes(node, graph), _cut(node, graph)
        if kind == TensorProto.INT8 and cut:
            yield Found(
                at(node), "int8 codes with a scale for each block; TensorRT documents blocks of 4-bit codes"
                " alone.", "Take one scale for each output, or 4-bit codes.",
            )  # fmt: skip
        elif kind == TensorProto.INT4 and given(node, 0) not in graph.constants:
            yield Found(
                at(node), "4-bit codes of activations; TensorRT documents them for weights alone.",
                "Leave activations float, or take int8.",
            )  # fmt: skip
        elif kind == TensorProto.INT4 and _size(cut) not in _BLOCKS:
            found = f"in blocks of {_size(cut)}" if cut else "without blocks"
            yield Found(
                at(node), f"4-bit codes {found}; TensorRT documents blocks of 64 and of 128.",
                "Quantize with group_size: 64 or 128.",
            )  # fmt: skip


def codes_without_scale(graph: Graph) -> Iterator[Found]:
    """int8 and int4 constants that something else than DequantizeLinear reads."""
    from onnx import TensorProto

    for node in graph.of():
        if node.op_type in _PAIRS:
            continue
        for name in node.input:
            tensor = graph.constants.get(name)
            kinds = (TensorProto.INT8, TensorProto.INT4)
            if tensor is not None and tensor.data_type in kinds and len(tensor.dims):
                yield Found(
                    at(node), f"it reads the {word(tensor.data_type)} constant '{name}'; TensorRT takes such"
                    " a constant only before DequantizeLinear.", "Dequantize before, or store it as int32.",
                )  # fmt: skip


def _type_of_codes(node: Any, graph: Graph) -> int:
    """Return the type of the codes of a pair; a QuantizeLinear says it by zero point or `output_dtype`."""
    from onnx import TensorProto

    if node.op_type == "DequantizeLinear":
        return graph.kind(given(node, 0))
    if zero := given(node, 2):
        return graph.kind(zero)
    return int(attribute(node, "output_dtype") or TensorProto.UINT8)


def _cut(node: Any, graph: Graph) -> tuple[int, int, list[int]] | None:
    """Return axis, number of blocks along it, and the sizes of constant codes with scales for blocks."""
    codes, scales = (graph.constants.get(given(node, place)) for place in (0, 1))
    if codes is None or scales is None or not len(codes.dims) == len(scales.dims) > 1:
        return None
    axis = attribute(node, "axis")
    axis = (1 if axis is None else axis) % len(codes.dims)
    return axis, scales.dims[axis], list(codes.dims)


def _size(cut: tuple[int, int, list[int]] | None) -> int:
    """Return how long a block is; 0 where there are none."""
    if cut is None or not cut[1]:
        return 0
    axis, count, sizes = cut
    return sizes[axis] // count
