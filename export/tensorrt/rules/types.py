"""Rules on element types: which there are, where they may stand, which may meet.

TensorRT's networks are strongly typed: nothing is converted but where a Cast says so.
"""

from __future__ import annotations

from collections.abc import Iterator

from smelt.export.tensorrt.rules.graph import Found, Graph, at, attribute, given, word

_MISSING = frozenset({
    "int16", "uint16", "uint32", "uint64", "string", "complex64", "complex128", "uint4", "int2", "uint2",
    "float8e4m3fnuz", "float8e5m2", "float8e5m2fnuz",
})  # fmt: skip
# Operators whose tensors of numbers must all have one type, and which inputs those are (None: all).
_ONE_TYPE: dict[str, tuple[int, ...] | None] = {
    "MatMul": None, "Gemm": None, "Conv": None, "Add": None, "Sub": None, "Mul": None, "Div": None,
    "Max": None, "Min": None, "Concat": None, "Where": (1, 2), "LayerNormalization": None, "PRelu": None,
    "Equal": None, "Less": None, "Greater": None, "Einsum": None,
}  # fmt: skip
# What the parser refuses although the ONNX standard has it: operator -> types of its first input.
_REFUSED: dict[str, tuple[str, ...]] = {
    "MatMul": ("int32", "int64"), "Gemm": ("int32", "int64"), "Einsum": ("int32", "int64"),
    "ReduceL2": ("int32", "int64"), "ReduceMax": ("bool",), "ReduceMin": ("bool",), "Relu": ("int32",),
}  # fmt: skip
_CAST = "TensorRT's networks are strongly typed: put a Cast there, or export again with one dtype."


def missing_types(graph: Graph) -> Iterator[Found]:
    """Element types that TensorRT does not have, in inputs, constants, casts and codes."""
    for place, kind in _declared(graph):
        if kind and (word(kind) in _MISSING or word(kind).startswith("type ")):
            yield Found(place, f"the type {word(kind)}, which TensorRT does not have.",
                        "Cast to float, int32 or int64 before the graph, or in the model.")  # fmt: skip


def _declared(graph: Graph) -> Iterator[tuple[str, int]]:
    for value in graph.model.graph.input:
        if value.name not in graph.constants:
            yield f"the input '{value.name}'", value.type.tensor_type.elem_type
    for name, tensor in graph.constants.items():
        if name not in graph.codes:  # of which the rules on quantization speak
            yield f"the constant '{name}'", tensor.data_type
    for node in graph.of("Cast"):
        yield at(node), int(attribute(node, "to") or 0)


def mixed_types(graph: Graph) -> Iterator[Found]:
    """Two types that meet in one operator."""
    for node in graph.of(*_ONE_TYPE):
        places = _ONE_TYPE[node.op_type] or range(len(node.input))
        named = [(node.input[i], _as_read(graph.kind(node.input[i]))) for i in places if i < len(node.input)]
        known = {kind: name for name, kind in named if name and kind}
        if len(known) > 1:
            words = " and ".join(f"{word(kind)} ('{name}')" for kind, name in known.items())
            yield Found(at(node), f"{words} meet in one operator.", _CAST)


def _as_read(kind: int) -> int:
    """Return the type as which TensorRT reads a value: of doubles it makes floats."""
    from onnx import TensorProto

    return int(TensorProto.FLOAT) if kind == TensorProto.DOUBLE else kind


def refused_types(graph: Graph) -> Iterator[Found]:
    """Operators on types that ONNX allows and TensorRT does not: products of integers, largest of bools."""
    for node in graph.of(*_REFUSED):
        kind = graph.kind(given(node, 0))
        if kind and word(kind) in _REFUSED[node.op_type]:
            yield Found(
                at(node), f"TensorRT does not compute it in {word(kind)}.", "Cast to float before it."
            )


def uint8_inside(graph: Graph) -> Iterator[Found]:
    """uint8 between operators; TensorRT takes it as an input or output of the network only."""
    from onnx import TensorProto

    outputs = {value.name for value in graph.model.graph.output}
    for node in graph.of():
        made = [n for n in node.output if graph.kind(n) == TensorProto.UINT8 and n not in outputs]
        if made and node.op_type not in ("QuantizeLinear", "DynamicQuantizeLinear", "Constant"):
            yield Found(at(node), "it gives uint8 to other operators; TensorRT has uint8 at the network's"
                        " inputs and outputs only.", "Cast to int32 instead.")  # fmt: skip
        fed = [n for n in _inputs(graph) if n in node.input and graph.kind(n) == TensorProto.UINT8]
        if fed and node.op_type not in ("Cast", "DequantizeLinear", "Identity"):
            yield Found(at(node), f"it computes with the input '{fed[0]}' in uint8.", "Cast that first.")


def _inputs(graph: Graph) -> list[str]:
    return [value.name for value in graph.model.graph.input if value.name not in graph.constants]


def casts_to_float8(graph: Graph) -> Iterator[Found]:
    """A Cast to float8; TensorRT makes float8 by QuantizeLinear only."""
    for node in graph.of("Cast"):
        if word(int(attribute(node, "to") or 0)).startswith("float8e4m3fn"):
            yield Found(at(node), "TensorRT makes float8 by QuantizeLinear only.", "Quantize with a scale.")


def doubles(graph: Graph) -> Iterator[Found]:
    """double, which TensorRT reads as float without a word."""
    from onnx import TensorProto

    mend = "Export in float where the digits do not matter; keep the sum outside where they do."
    for value in (*graph.model.graph.input, *graph.model.graph.output):
        if value.type.tensor_type.elem_type == TensorProto.DOUBLE:
            yield Found(f"'{value.name}'", "double; TensorRT computes in float, and binds it as float.", mend)
    for name, tensor in graph.constants.items():
        if tensor.data_type == TensorProto.DOUBLE:
            yield Found(f"the constant '{name}'", "double; TensorRT rounds it to float.", mend)
    for node in graph.of("Cast"):
        if attribute(node, "to") == TensorProto.DOUBLE:
            yield Found(at(node), "to double; TensorRT computes on in float.", mend)
