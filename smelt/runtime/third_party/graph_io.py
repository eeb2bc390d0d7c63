"""Inputs and outputs of a graph, and whether they can be numpy arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from smelt.core.messages import Message, error_message
from smelt.runtime.third_party.signature import GraphSignature, TensorSpec

# numpy's names of its types
_NUMPY_NAMES = {
    "FLOAT": "float32", "UINT8": "uint8", "INT8": "int8", "UINT16": "uint16", "INT16": "int16",
    "INT32": "int32", "INT64": "int64", "STRING": "str", "BOOL": "bool", "FLOAT16": "float16",
    "DOUBLE": "float64", "UINT32": "uint32", "UINT64": "uint64",
}  # fmt: skip
# exporters' markers of an unnamed axis (paddle2onnx a question mark)
UNNAMED_DIMENSIONS = ("", "?", "-1", "None")


def graph_io_problems(model: Any) -> Iterator[Message]:
    """Yield the inputs and outputs of an onnx.ModelProto that cannot be numpy arrays."""
    if not _required_inputs(model):
        yield error_message(
            "no-inputs",
            "it has no inputs without a default, so it computes the same in every call: export it with its"
            " data as an input",
        )
    for what, values in (("input", _required_inputs(model)), ("output", model.graph.output)):
        for value in values:
            kind = value.type.WhichOneof("value")
            if kind not in ("tensor_type", None):
                word = str(kind).removesuffix("_type")
                zipped = (
                    " (of scikit-learn: to_onnx(..., options={'zipmap': False}))"
                    if word == "sequence"
                    else ""
                )
                yield error_message(
                    "not-a-tensor", f"its {what} '{value.name}' is a {word}: export it as a tensor{zipped}"
                )
            elif kind and _type_name(value) is None:
                yield error_message(
                    "unsupported-type",
                    f"its {what} '{value.name}' has the type {_type_label(value)}, unsupported by numpy",
                )


def graph_signature(model: Any) -> GraphSignature:
    """Return the inputs without a default, and all outputs."""
    return GraphSignature(
        inputs=tuple(_tensor_spec(value) for value in _required_inputs(model)),
        outputs=tuple(_tensor_spec(value) for value in model.graph.output),
    ).with_batch_axes({})


def _required_inputs(model: Any) -> list[Any]:
    defaults = {tensor.name for tensor in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in defaults]


def _tensor_spec(value: Any) -> TensorSpec:
    said = value.type.tensor_type
    shape = tuple(_dimension(d) for d in said.shape.dim) if said.HasField("shape") else None
    return TensorSpec(name=value.name, dtype=_type_name(value) or "float32", shape=shape)


def _dimension(dimension: Any) -> int | str | None:
    if dimension.HasField("dim_value") and dimension.dim_value > 0:
        return int(dimension.dim_value)
    return None if dimension.dim_param in UNNAMED_DIMENSIONS else str(dimension.dim_param)


def _type_label(value: Any) -> str:
    from onnx import TensorProto

    kind = value.type.tensor_type.elem_type
    return str(TensorProto.DataType.Name(kind)) if kind in TensorProto.DataType.values() else str(kind)


def _type_name(value: Any) -> str | None:
    return _NUMPY_NAMES.get(_type_label(value))
