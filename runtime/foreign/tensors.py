"""The tensors that a file holds: whether each has as many values as its shape says, wherever they lie."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from smelt.runtime.foreign.outside import is_outside, place_of

# Bits of a value, by the name of its type in ONNX. Texts have no fixed number.
BITS = {
    "FLOAT": 32, "UINT8": 8, "INT8": 8, "UINT16": 16, "INT16": 16, "INT32": 32, "INT64": 64, "BOOL": 8,
    "FLOAT16": 16, "DOUBLE": 64, "UINT32": 32, "UINT64": 64, "COMPLEX64": 64, "COMPLEX128": 128,
    "BFLOAT16": 16,
    "FLOAT8E4M3FN": 8, "FLOAT8E4M3FNUZ": 8, "FLOAT8E5M2": 8, "FLOAT8E5M2FNUZ": 8, "UINT4": 4, "INT4": 4,
    "FLOAT4E2M1": 4, "FLOAT8E8M0": 8, "UINT2": 2, "INT2": 2,
}  # fmt: skip
# Values that a tensor may have at all; a terabyte of bytes.
_MOST = 1 << 40
_TYPED = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data")


def tensors_in(graph: Any) -> Iterator[Any]:
    """Yield every tensor of an onnx.GraphProto: initializers, values of attributes, those of inner graphs."""
    waiting = [graph]
    while waiting:
        graph = waiting.pop()
        yield from graph.initializer
        for sparse in graph.sparse_initializer:
            yield from (sparse.values, sparse.indices)
        yield from _of_attributes(_attributes(graph.node), waiting)


def tensors_of(model: Any) -> Iterator[Any]:
    """Yield every tensor of an onnx.ModelProto, those of its functions too."""
    yield from tensors_in(model.graph)
    for function in model.functions:
        waiting: list[Any] = []
        yield from _of_attributes(_attributes(function.node), waiting)
        yield from _of_attributes(function.attribute_proto, waiting)  # where a call gives none
        for graph in waiting:
            yield from tensors_in(graph)


def _attributes(nodes: Any) -> Iterator[Any]:
    for node in nodes:
        yield from node.attribute


def _of_attributes(attributes: Any, waiting: list[Any]) -> Iterator[Any]:
    for attribute in attributes:
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors
        alone = [attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else []
        for sparse in (*alone, *attribute.sparse_tensors):
            yield from (sparse.values, sparse.indices)
        if attribute.HasField("g"):
            waiting.append(attribute.g)
        waiting.extend(attribute.graphs)


def tensor_problems(model: Any, path: Path) -> Iterator[str]:
    """Yield what is wrong with the tensors of the file `path`; what is wrong with several alike, once."""
    alike: dict[str, list[str]] = {}
    for tensor in tensors_of(model):
        if problem := _problem(tensor, path):
            alike.setdefault(problem, []).append(tensor.name or "a constant")
    for problem, names in alike.items():
        others = {1: "", 2: " and one more"}.get(len(names), f" and {len(names) - 1} more")
        yield f"the tensor '{names[0]}'{others}: {problem}"


def _problem(tensor: Any, path: Path) -> str | None:
    from onnx import TensorProto

    dims = list(tensor.dims)
    kind = (
        TensorProto.DataType.Name(tensor.data_type)
        if tensor.data_type in TensorProto.DataType.values()
        else ""
    )
    if kind not in BITS and kind != "STRING":
        return f"its type is {tensor.data_type}, which this version of onnx does not know"
    if any(size < 0 for size in dims):
        return f"its shape is {_listed(dims)}, with a size below 0"
    count = math.prod(dims)
    if count > _MOST:
        return f"its shape is {_listed(dims)}: {count:.3g} values"
    if kind != "STRING" and is_outside(tensor):
        return _outside(tensor, path, -(-count * BITS[kind] // 8))
    there, what, fitting = _inside(tensor, kind, count)
    return None if there in fitting else _wrong(dims, there, what)


def _outside(tensor: Any, path: Path, expected: int) -> str | None:
    try:
        place_of(tensor, path, expected)
    except (ValueError, OSError) as error:
        return str(error)
    return None


def _inside(tensor: Any, kind: str, count: int) -> tuple[int, str, set[int]]:
    """Return how many values (or bytes) of a tensor its message holds, and how many may be there."""
    if kind == "STRING":
        return len(tensor.string_data), "values", {count}
    expected = -(-count * BITS[kind] // 8)
    if tensor.raw_data:
        return len(tensor.raw_data), "bytes", {expected}
    there = max(len(getattr(tensor, field)) for field in _TYPED)
    # complex numbers are two values each; what is below a byte may be packed
    if kind.startswith("COMPLEX"):
        return there, "values", {2 * count}
    return there, "values", {count, expected} if BITS[kind] < 8 else {count}


def _wrong(dims: list[int], there: int, what: str) -> str:
    return f"its shape is {_listed(dims)}, and {there:,} {what} of it are there"


def _listed(dims: list[int]) -> str:
    return str(dims[:8])[:-1] + (", ...]" if len(dims) > 8 else "]")


def codes(model: Any) -> int:
    """Return how many tensors of 8 or 4 bits operators of a quantized model read."""
    kinds = {2, 3, 21, 22, 25, 26}  # uint8, int8, uint4, int4, uint2, int2
    names = {t.name for t in model.graph.initializer if t.data_type in kinds and math.prod(t.dims) > 1}
    quantized = (node for node in model.graph.node if any(word in node.op_type for word in _OF_CODES))
    return len({name for node in quantized for name in node.input if name in names})


# DequantizeLinear, QLinearConv, MatMulInteger, MatMulNBits, QAttention and the like
_OF_CODES = ("Quant", "QLinear", "Integer", "NBits", "QAttention", "QGemm", "QEmbed")


def stored_floats(model: Any) -> str | None:
    """Return the type of most of the floating weights: float32, float16, bfloat16, float64; None of none."""
    kinds = {1: "float32", 10: "float16", 11: "float64", 16: "bfloat16"}
    counts = Counter[str]()
    for tensor in tensors_of(model):
        if tensor.data_type in kinds:
            counts[kinds[tensor.data_type]] += math.prod(tensor.dims)
    return counts.most_common(1)[0][0] if counts else None


def parameters(model: Any) -> int:
    """Return how many numbers a model holds: floating ones, and integers that are codes and not shapes."""
    kinds = {1, 10, 11, 16}  # float, float16, double, bfloat16
    counts = ((tensor.data_type in kinds, math.prod(tensor.dims)) for tensor in tensors_of(model))
    return sum(count for floating, count in counts if floating or count >= 64)
