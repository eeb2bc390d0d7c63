"""What TensorRT would refuse, or build into a wrong engine without a word, found in the ONNX file first.

TensorRT's parser stops at the first import error and names it by an assertion; some mistakes (an
infinite constant, a profile longer than the position table) it does not mention at all. These checks
find all of them at once and say which node and what to do. Numbers and rules: TensorRT 11
(https://docs.nvidia.com/deeplearning/tensorrt), tried with 11.4.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from smelt.core.errors import RunError
from smelt.export.tensorrt.profile import DIMENSIONS, Shapes

OPSETS = range(9, 26)
_REEXPORT = "Export again with onnx: {target: tensorrt}."


class Problem(NamedTuple):
    """One finding. An error stops the build, a warning goes into the report."""

    severity: Literal["error", "warning"]
    text: str


def load_graph(path: Path) -> Any:
    """Read an ONNX file without its external weights.

    Raises:
        RunError: it is damaged.
    """
    import onnx

    try:
        return onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf raises several kinds, all meaning the same
        raise RunError(f"{path}: not an ONNX file that can be read: {error}") from error


def preflight(model: Any, path: Path) -> list[Problem]:
    """Look for everything in the graph that TensorRT 11 would not take."""
    problems = list(_external_data(model, path))
    if any(p.severity == "error" for p in problems):
        return problems
    constants = _constants(model, path.parent)
    types = _types(model)
    for found in (
        _opset(model),
        _operators(model),
        _mixed_types(model, types),
        _quantization(model, constants, types),
        _infinite(model, constants),
    ):
        problems += found
    return [Problem(p.severity, f"{path.name}: {p.text}") for p in problems]


def check_profile(model: Any, shapes: Shapes, position_limit: int | None) -> list[Problem]:
    """Check that inputs which share a dimension agree, and that no length goes beyond the position table.

    Args:
        model: the ONNX model.
        shapes: min, opt and max shape by input name.
        position_limit: entries of the model's position table; None where it has none.
    """
    problems: list[Problem] = []
    inputs = {value.name: value.type.tensor_type.shape.dim for value in model.graph.input}
    for name in shapes.keys() - inputs.keys():
        known = ", ".join(inputs)
        problems.append(Problem("error", f"the profile names the input '{name}'; the graph has {known}"))
    seen: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, dimensions in inputs.items():
        dynamic = [at for at, d in enumerate(dimensions) if d.dim_param]
        if dynamic and name not in shapes:
            problems.append(
                Problem("error", f"the input '{name}' is dynamic and has no entry in the profile")
            )
            continue
        for at in dynamic:
            word = dimensions[at].dim_param
            sizes = tuple(shape[at] for shape in shapes[name])
            other, expected = seen.setdefault(word, (name, sizes))
            if sizes != expected:
                text = f"'{name}' and '{other}' share the dimension '{word}' but get {sizes} and {expected}"
                problems.append(Problem("error", text))
    return problems + list(_too_long(seen, position_limit))


def _too_long(seen: Mapping[str, tuple[str, tuple[int, ...]]], limit: int | None) -> Iterator[Problem]:
    if limit is None:
        return
    for word, (name, sizes) in seen.items():
        longest = sizes[-1] + (word in DIMENSIONS["past"])  # the cache, and the token that is added to it
        # the sum of cache and tokens looks nothing up
        if word not in (*DIMENSIONS["batch"], *DIMENSIONS["total"]) and longest > limit:
            yield Problem(
                "error",
                f"the profile lets '{name}' be {longest} tokens long, but the model has {limit} positions;"
                f" TensorRT would build it and read beyond the table. Lower tensorrt: {{lengths: ...}}",
            )


def _external_data(model: Any, path: Path) -> Iterator[Problem]:
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            file = path.parent / entry.value
            if entry.key == "location" and not file.is_file():
                yield Problem("error", f"{path.name}: the weights of '{tensor.name}' should lie in {file}")
                return


def _opset(model: Any) -> Iterator[Problem]:
    for entry in model.opset_import:
        if entry.domain in ("", "ai.onnx") and entry.version not in OPSETS:
            yield Problem(
                "error",
                f"opset {entry.version}; TensorRT 11 takes {OPSETS[0]} to {OPSETS[-1]}."
                f" Export again with onnx: {{target: tensorrt, opset: {OPSETS[-1] - 4}}}.",
            )


_QUANTIZED_OPERATORS = {
    "DynamicQuantizeLinear", "MatMulInteger", "ConvInteger", "QLinearMatMul", "QLinearConv",
}  # fmt: skip


def _operators(model: Any) -> Iterator[Problem]:
    for node in nodes_of(model.graph):
        if node.domain not in ("", "ai.onnx"):
            word = f"{node.domain}::{node.op_type}"
            reason = (
                "is an operator of another runtime"
                if node.domain == "com.microsoft"
                else "is a custom operator"
            )
            yield Problem(
                "error", f"node '{node.name}': {word} {reason}, which TensorRT does not have. {_REEXPORT}"
            )
        elif node.op_type in _QUANTIZED_OPERATORS:
            yield Problem(
                "error",
                f"node '{node.name}': {node.op_type}; TensorRT takes int8 as QuantizeLinear/DequantizeLinear"
                f" pairs only. {_REEXPORT}",
            )


def nodes_of(graph: Any) -> Iterator[Any]:
    """Yield the nodes of a graph and of the graphs inside its If, Loop and Scan nodes."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from nodes_of(attribute.g)


def _types(model: Any) -> dict[str, int]:
    """Return the element type of every value, inferred where the file does not say."""
    import onnx

    try:
        # without values: only types are of interest
        inferred = onnx.shape_inference.infer_shapes(model, check_type=False, strict_mode=False)
    except Exception as error:  # inference is a help, not a requirement
        raise RunError(f"the types of the graph cannot be inferred: {error}") from error
    graph = inferred.graph
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        types.setdefault(value.name, value.type.tensor_type.elem_type)
    return types


# Operators whose tensors of numbers must all have one type, and which inputs those are (None: all).
_ONE_TYPE: dict[str, tuple[int, ...] | None] = {
    "MatMul": None, "Gemm": None, "Conv": None, "Add": None, "Sub": None, "Mul": None, "Div": None,
    "Pow": None, "Max": None, "Min": None, "Concat": None, "Where": (1, 2), "LayerNormalization": None,
    "Equal": None, "Less": None, "Greater": None, "Einsum": None,
}  # fmt: skip


def _mixed_types(model: Any, types: Mapping[str, int]) -> Iterator[Problem]:
    from onnx import TensorProto

    for node in nodes_of(model.graph):
        if node.op_type not in _ONE_TYPE or node.domain not in ("", "ai.onnx"):
            continue
        places = _ONE_TYPE[node.op_type] or range(len(node.input))
        named = [(node.input[i], types.get(node.input[i], 0)) for i in places if i < len(node.input)]
        known = {kind: name for name, kind in named if name and kind}
        if len(known) > 1:
            words = " and ".join(f"{TensorProto.DataType.Name(k).lower()} ('{n}')" for k, n in known.items())
            yield Problem(
                "error",
                f"node '{node.name}' ({node.op_type}): {words} meet in one operator. TensorRT's networks are"
                " strongly typed: put a Cast there, or export again with one dtype.",
            )


def _constants(model: Any, folder: Path) -> dict[str, Any]:
    """Return initializers and Constant nodes by name, as protos; their values are read when needed."""
    import onnx

    found = {tensor.name: tensor for tensor in model.graph.initializer}
    for tensor in found.values():
        if tensor.external_data:
            onnx.external_data_helper.load_external_data_for_tensor(tensor, str(folder))
    for node in nodes_of(model.graph):
        if node.op_type == "Constant":
            for attribute in node.attribute:
                if attribute.name == "value":
                    found[node.output[0]] = attribute.t
    return found


def _quantization(model: Any, constants: Mapping[str, Any], types: Mapping[str, int]) -> Iterator[Problem]:
    for node in nodes_of(model.graph):
        if node.op_type in ("QuantizeLinear", "DequantizeLinear") and node.domain in ("", "ai.onnx"):
            for text in _quantization_of(node, constants, types):
                yield Problem("error", f"node '{node.name}' ({node.op_type}): {text} {_REEXPORT}")


def _quantization_of(node: Any, constants: Mapping[str, Any], types: Mapping[str, int]) -> Iterator[str]:
    from onnx import TensorProto, numpy_helper

    unsigned = (TensorProto.UINT8, TensorProto.UINT4, TensorProto.UINT16)
    zero = node.input[2] if len(node.input) > 2 and node.input[2] else None
    kind = (
        types.get(node.input[0], 0) if node.op_type == "DequantizeLinear" else _output_type(node, zero, types)
    )
    if kind == TensorProto.INT32:
        yield "a quantized bias (int32); TensorRT quantizes weights and activations only."
    elif kind in unsigned:
        yield f"{TensorProto.DataType.Name(kind).lower()} codes; TensorRT wants int8."
    if (
        zero is not None
        and zero in constants
        and numpy_helper.to_array(constants[zero]).astype("float64").any()
    ):
        yield "a zero point that is not 0 (asymmetric); TensorRT wants symmetric codes."
    scale = constants.get(node.input[1])
    if scale is not None and not (numpy_helper.to_array(scale).astype("float64") > 0).all():
        yield "a scale that is not positive."


def _output_type(node: Any, zero: str | None, types: Mapping[str, int]) -> int:
    """Return the type that a QuantizeLinear gives: its zero point's, else `output_dtype`, else uint8."""
    from onnx import TensorProto

    if zero is not None:
        return types.get(zero, 0)
    given = [a.i for a in node.attribute if a.name == "output_dtype" and a.i]
    return int(given[0]) if given else int(TensorProto.UINT8)


def _infinite(model: Any, constants: Mapping[str, Any]) -> Iterator[Problem]:
    """Find what overflowed on the way to fp16; a mask of 0 and -inf may be meant."""
    import numpy as np
    from onnx import TensorProto, numpy_helper

    floating = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
    for name, tensor in constants.items():
        if tensor.data_type not in floating:
            continue
        values = numpy_helper.to_array(tensor).astype(np.float32)
        if np.isfinite(values).all():
            continue
        word = TensorProto.DataType.Name(tensor.data_type).lower()
        if bool(np.isin(values, (0.0, -np.inf)).all()):
            text = (
                f"the constant '{name}' ({word}) is a mask with -inf; a row that is wholly masked gives NaN"
            )
            yield Problem("warning", text)
        else:
            count = int((~np.isfinite(values)).sum())
            yield Problem(
                "error",
                f"the constant '{name}' ({word}) holds {count} infinite or undefined numbers; TensorRT would"
                " build it silently. Weights above 65504 do not fit fp16: export with dtype: fp32.",
            )
