"""Check the tensors of a graph's files, and read the graph's inputs and outputs.

External data must be readable and complete, and each tensor must have as many values as its shape requires.
Inputs and outputs must be numpy arrays.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

from smelt.core.messages import Message, error_message
from smelt.runtimes.graph_walk import (
    all_nodes,
    external_data_fields,
    is_external,
    iter_initializers,
    iter_model_tensors,
)
from smelt.runtimes.onnx_import.signature import GraphSignature, TensorSpec


class GraphFileError(ValueError):
    """A file of a graph cannot be used; the message is why, as the end of a sentence.

    Args:
        message: what is wrong.
        code: a slug that names the kind of problem.
    """

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class ExternalLocation(NamedTuple):
    """File and position of a tensor's bytes."""

    file: Path
    offset: int
    length: int


def resolve_external_data(tensor: Any, graph: Path, expected: int) -> ExternalLocation:
    """Return the location of the `expected` bytes of a tensor of the graph in the file `graph`.

    Raises:
        GraphFileError: the location leaves the folder, is not a file, or has another size.
    """
    fields = external_data_fields(tensor)
    name = fields.get("location", "")
    file = _sibling_file(name, graph)
    offset, length = _integer_field(fields, "offset", 0), _integer_field(fields, "length", expected)
    if length != expected:
        raise GraphFileError(
            f"its shape needs {expected:,} bytes, but {length:,} are declared in {name}",
            code="external-data-wrong-length",
        )
    size = file.stat().st_size
    if offset + length > size:
        raise GraphFileError(
            f"{name} has {size:,} bytes, but this tensor ends at {offset + length:,}: the file is truncated",
            code="external-data-truncated",
        )
    return ExternalLocation(file, offset, length)


def _sibling_file(name: str, graph: Path) -> Path:
    """Return the file `name` next to the graph.

    A link may lead to the folder of the graph's own file, as in the cache of a hub, and nowhere else.
    """
    parts = PurePosixPath(name.replace("\\", "/")).parts
    absolute = PurePosixPath(name).is_absolute() or bool(PureWindowsPath(name).drive)
    if not parts or ".." in parts or absolute or "\0" in name:
        raise GraphFileError(
            f"its values are declared in {name!r}, which is not a file name in the folder",
            code="external-data-outside-folder",
        )
    file = graph.parent / name
    if not os.path.lexists(file):
        raise GraphFileError(
            f"its values are in {name}, which is missing from the graph's folder",
            code="external-data-missing",
        )
    real_path = Path(os.path.realpath(file))
    allowed_folders = (Path(os.path.realpath(graph.parent)), Path(os.path.realpath(graph)).parent)
    if not any(real_path.is_relative_to(allowed_folder) for allowed_folder in allowed_folders):
        raise GraphFileError(
            f"its values are declared in {name}, a link that leads out of the folder",
            code="external-data-link-outside-folder",
        )
    if not real_path.is_file():
        raise GraphFileError(
            f"its values are declared in {name}, which is not a file", code="external-data-not-a-file"
        )
    return real_path


def _integer_field(fields: Mapping[str, str], key: str, default: int) -> int:
    text = fields.get(key)
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise GraphFileError(
            f"its {key} in {fields.get('location')} is {text[:40]!r}, which is not a number of bytes",
            code="external-data-not-a-number",
        )
    return int(text)


# Bits of a value, by the name of its type in ONNX. Texts have no fixed size.
BITS_BY_TYPE = {
    "FLOAT": 32, "UINT8": 8, "INT8": 8, "UINT16": 16, "INT16": 16, "INT32": 32, "INT64": 64, "BOOL": 8,
    "FLOAT16": 16, "DOUBLE": 64, "UINT32": 32, "UINT64": 64, "COMPLEX64": 64, "COMPLEX128": 128,
    "BFLOAT16": 16,
    "FLOAT8E4M3FN": 8, "FLOAT8E4M3FNUZ": 8, "FLOAT8E5M2": 8, "FLOAT8E5M2FNUZ": 8, "UINT4": 4, "INT4": 4,
    "FLOAT4E2M1": 4, "FLOAT8E8M0": 8, "UINT2": 2, "INT2": 2,
}  # fmt: skip
# Maximum number of values of a tensor; a terabyte of bytes.
_MAX_VALUES = 1 << 40
_TYPED_FIELDS = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data")


def tensor_problems(model: Any, path: Path) -> Iterator[Message]:
    """Yield what is wrong with the tensors of the file `path`; equal problems of several tensors once."""
    tensors_by_problem: dict[Message, list[str]] = {}
    for tensor in iter_model_tensors(model):
        if problem := _tensor_problem(tensor, path):
            tensors_by_problem.setdefault(problem, []).append(tensor.name or "a constant")
    for problem, names in tensors_by_problem.items():
        others_text = {1: "", 2: " and one more"}.get(len(names), f" and {len(names) - 1} more")
        yield problem.with_prefix(f"the tensor '{names[0]}'{others_text}: ")


def _tensor_problem(tensor: Any, path: Path) -> Message | None:
    from onnx import TensorProto

    dims = list(tensor.dims)
    kind = (
        TensorProto.DataType.Name(tensor.data_type)
        if tensor.data_type in TensorProto.DataType.values()
        else ""
    )
    if kind not in BITS_BY_TYPE and kind != "STRING":
        return error_message(
            "unsupported-tensor-type",
            f"its type is {tensor.data_type}, which this version of onnx does not support",
        )
    if any(size < 0 for size in dims):
        return error_message("negative-size", f"its shape is {_format_dims(dims)}, with a size below 0")
    count = math.prod(dims)
    if count > _MAX_VALUES:
        return error_message("tensor-too-large", f"its shape is {_format_dims(dims)}: {count:.3g} values")
    if kind != "STRING" and is_external(tensor):
        return _external_problem(tensor, path, -(-count * BITS_BY_TYPE[kind] // 8))
    present, unit, valid_counts = _inline_values(tensor, kind, count)
    if present in valid_counts:
        return None
    text = f"its shape is {_format_dims(dims)}, but it has {present:,} {unit}"
    return error_message("wrong-tensor-size", text)


def _external_problem(tensor: Any, path: Path, expected: int) -> Message | None:
    try:
        resolve_external_data(tensor, path, expected)
    except GraphFileError as error:
        return error_message(error.code, str(error))
    except OSError as error:
        return error_message("unreadable-file", f"its file cannot be read: {error}")
    return None


def _inline_values(tensor: Any, kind: str, count: int) -> tuple[int, str, set[int]]:
    """Return the number of values (or bytes) of a tensor in its message, and the allowed numbers."""
    if kind == "STRING":
        return len(tensor.string_data), "values", {count}
    expected = -(-count * BITS_BY_TYPE[kind] // 8)
    if tensor.raw_data:
        return len(tensor.raw_data), "bytes", {expected}
    present = max(len(getattr(tensor, field)) for field in _TYPED_FIELDS)
    # complex numbers are two values each; types below a byte may be packed
    if kind.startswith("COMPLEX"):
        return present, "values", {2 * count}
    return present, "values", {count, expected} if BITS_BY_TYPE[kind] < 8 else {count}


def _format_dims(dims: list[int]) -> str:
    return str(dims[:8])[:-1] + (", ...]" if len(dims) > 8 else "]")


# uint8, int8, the float8 types, uint4, int4, float4, uint2, int2, as numbers in onnx.TensorProto
QUANTIZED_DTYPES = frozenset({2, 3, 17, 18, 19, 20, 21, 22, 23, 25, 26})


def count_quantized_tensors(model: Any) -> int:
    """Return the number of tensors of 8 bits or fewer that operators of a quantized model read."""
    dtypes = QUANTIZED_DTYPES
    nodes = list(all_nodes([*model.graph.node, *(node for f in model.functions for node in f.node)]))
    tensors = {tensor.name: tensor for tensor in iter_initializers(model.graph) if tensor.data_type in dtypes}
    for node in nodes:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].t.data_type in dtypes:
            tensors[node.output[0]] = node.attribute[0].t
    names = {name for name, tensor in tensors.items() if math.prod(tensor.dims) > 1}
    quantized = (node for node in nodes if any(part in node.op_type.lower() for part in _QUANTIZED_OP_WORDS))
    return len({name for node in quantized for name in node.input if name in names})


# DequantizeLinear, QLinearConv, MatMulInteger, MatMulNBits, MatMulBnb4, QAttention and the like
_QUANTIZED_OP_WORDS = (
    *("quant", "qlinear", "integer", "nbits", "bnb4"),
    *("qattention", "qgemm", "qembed", "qmoe"),
)


NON_FLOAT32_DTYPES = ("float16", "bfloat16", "float64")


def dominant_float_type(model: Any) -> str | None:
    """Return the type of most of the floating-point weights: float32, float16, bfloat16, float64; or None."""
    kinds = {1: "float32", 10: "float16", 11: "float64", 16: "bfloat16"}
    counts = Counter[str]()
    for tensor in iter_model_tensors(model):
        if tensor.data_type in kinds:
            counts[kinds[tensor.data_type]] += math.prod(tensor.dims)
    return counts.most_common(1)[0][0] if counts else None


def count_graph_parameters(model: Any) -> int:
    """Return the number of parameters of a model: floating-point ones, and integers that are weights."""
    kinds = {1, 10, 11, 16}  # float, float16, double, bfloat16
    counts = ((tensor.data_type in kinds, math.prod(tensor.dims)) for tensor in iter_model_tensors(model))
    return sum(count for floating, count in counts if floating or count >= 64)


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
    for direction, values in (("input", _required_inputs(model)), ("output", model.graph.output)):
        for value in values:
            kind = value.type.WhichOneof("value")
            if kind not in ("tensor_type", None):
                type_word = str(kind).removesuffix("_type")
                zipped = (
                    " (of scikit-learn: to_onnx(..., options={'zipmap': False}))"
                    if type_word == "sequence"
                    else ""
                )
                yield error_message(
                    "not-a-tensor",
                    f"its {direction} '{value.name}' is a {type_word}: export it as a tensor{zipped}",
                )
            elif kind and _type_name(value) is None:
                yield error_message(
                    "unsupported-type",
                    f"its {direction} '{value.name}' has the type {_type_label(value)}, unsupported by numpy",
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
    tensor_type = value.type.tensor_type
    shape = tuple(_dimension(d) for d in tensor_type.shape.dim) if tensor_type.HasField("shape") else None
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
