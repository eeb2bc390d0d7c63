"""Rules on explicit quantization: QuantizeLinear, DequantizeLinear and the codes that stand before them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from smelt.export.tensorrt.rules.graph import Found, Graph, at, attribute, given, word

_PAIRS = ("QuantizeLinear", "DequantizeLinear")
_FITS = frozenset({"int8", "uint8", "int4", "float8e4m3fn", "float4e2m1"})


def codes(graph: Graph) -> Iterator[Found]:
    """Codes of a type that TensorRT does not quantize to; int32 is what a quantized bias has.

    Of uint8 see `unsigned_codes`.
    """
    for node in graph.of(*_PAIRS):
        kind = _type_of_codes(node, graph)
        if kind and word(kind) == "int32":
            yield Found(
                at(node), "a quantized bias (int32); TensorRT quantizes weights and activations only."
            )
        elif kind and word(kind) not in _FITS:
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


def codes_without_scale(graph: Graph) -> Iterator[Found]:
    """int8 constants that something else than DequantizeLinear reads."""
    from onnx import TensorProto

    for node in graph.of():
        if node.op_type in _PAIRS:
            continue
        for name in node.input:
            tensor = graph.constants.get(name)
            if tensor is not None and tensor.data_type == TensorProto.INT8 and len(tensor.dims):
                yield Found(
                    at(node), f"it reads the int8 constant '{name}'; TensorRT takes such a constant only"
                    " before DequantizeLinear.", "Dequantize before, or store it as int32.",
                )  # fmt: skip


def _type_of_codes(node: Any, graph: Graph) -> int:
    """Return the type of the codes of a pair; a QuantizeLinear says it by zero point or `output_dtype`."""
    from onnx import TensorProto

    if node.op_type == "DequantizeLinear":
        return graph.kind(given(node, 0))
    if zero := given(node, 2):
        return graph.kind(zero)
    return int(attribute(node, "output_dtype") or TensorProto.UINT8)
