"""What a graph says of its inputs and outputs, and whether arrays can be that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from smelt.runtime.foreign.signature import Signature, Value

# numpy's words for the types that it has
_WORDS = {
    "FLOAT": "float32", "UINT8": "uint8", "INT8": "int8", "UINT16": "uint16", "INT16": "int16",
    "INT32": "int32", "INT64": "int64", "STRING": "str", "BOOL": "bool", "FLOAT16": "float16",
    "DOUBLE": "float64", "UINT32": "uint32", "UINT64": "uint64",
}  # fmt: skip
# what exporters write for an axis that has no name (paddle2onnx a question mark)
NAMELESS = ("", "?", "-1", "None")


def value_problems(model: Any) -> Iterator[str]:
    """Yield the inputs and outputs of an onnx.ModelProto that are no arrays of numpy."""
    if not _inputs(model):
        yield (
            "it has no inputs, or each has a default, so it computes the same in every call: export it with"
            " what it is to be fed as an input"
        )
    for what, values in (("input", _inputs(model)), ("output", model.graph.output)):
        for value in values:
            kind = value.type.WhichOneof("value")
            if kind not in ("tensor_type", None):
                word = str(kind).removesuffix("_type")
                zipped = (
                    " (of scikit-learn: to_onnx(..., options={'zipmap': False}))"
                    if word == "sequence"
                    else ""
                )
                yield f"its {what} '{value.name}' is a {word}: export it as a tensor{zipped}"
            elif kind and _word(value) is None:
                yield f"its {what} '{value.name}' is of the type {_name(value)}, which numpy has not"


def signature_of(model: Any) -> Signature:
    """Return the inputs that have no default, and all outputs."""
    return Signature(
        inputs=tuple(_value(value) for value in _inputs(model)),
        outputs=tuple(_value(value) for value in model.graph.output),
    ).with_axes({})


def _inputs(model: Any) -> list[Any]:
    defaults = {tensor.name for tensor in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in defaults]


def _value(value: Any) -> Value:
    said = value.type.tensor_type
    shape = tuple(_size(d) for d in said.shape.dim) if said.HasField("shape") else None
    return Value(name=value.name, dtype=_word(value) or "float32", shape=shape)


def _size(dimension: Any) -> int | str | None:
    if dimension.HasField("dim_value") and dimension.dim_value > 0:
        return int(dimension.dim_value)
    return None if dimension.dim_param in NAMELESS else str(dimension.dim_param)


def _name(value: Any) -> str:
    from onnx import TensorProto

    kind = value.type.tensor_type.elem_type
    return str(TensorProto.DataType.Name(kind)) if kind in TensorProto.DataType.values() else str(kind)


def _word(value: Any) -> str | None:
    return _WORDS.get(_name(value))
