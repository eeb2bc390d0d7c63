"""Rules on numbers, inputs and sizes: what overflowed, what is no input any more, what has too many axes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from smelt.export.tensorrt.rules.graph import REEXPORT, Found, Graph, at, attribute, given

_MOST_IN_HALF = 65504.0
_MOST_AXES = 8
_FP16 = "Weights above 65504 do not fit fp16: export with dtype: fp32."


def external_data(model: Any, path: Path) -> Iterator[Found]:
    """Weights that should lie beside the file and do not, or lie outside of its folder."""
    folder = path.parent.resolve()
    for tensor in model.graph.initializer:
        for entry in (e for e in tensor.external_data if e.key == "location"):
            file = path.parent / entry.value
            name = f"the weights of '{tensor.name}'"
            if not (folder / entry.value).resolve().is_relative_to(folder):
                yield Found(name, f"they are said to lie in {entry.value}, outside of the graph's folder.",
                            "Store the model anew with its weights beside it.")  # fmt: skip
                return
            if not file.is_file():
                yield Found(name, f"they should lie in {file}.", "Copy that file too.")
                return


def infinite(graph: Graph) -> Iterator[Found]:
    """What overflowed on the way to half precision; TensorRT builds it without a word."""
    for name, kind, values in graph.not_finite:
        if not _is_mask(values):
            import numpy as np

            count = int((~np.isfinite(values)).sum())
            yield Found(
                f"the constant '{name}' ({kind})", f"it holds {count} infinite or undefined numbers;"
                " TensorRT would build it silently.", _FP16,
            )  # fmt: skip


def masks(graph: Graph) -> Iterator[Found]:
    """Constants of 0 and -inf, which may be meant."""
    for name, kind, values in graph.not_finite:
        if _is_mask(values):
            yield Found(
                f"the constant '{name}' ({kind})", "it is a mask with -inf; a row that is wholly"
                " masked gives NaN.", "",
            )  # fmt: skip


def _is_mask(values: Any) -> bool:
    import numpy as np

    return bool(np.isin(values, (0.0, -np.inf)).all())


def overflowing_casts(graph: Graph) -> Iterator[Found]:
    """Constants that a Cast to float16 makes infinite: the usual -3.4e38 of a mask."""
    from onnx import TensorProto

    for node in graph.of("Cast"):
        if attribute(node, "to") != TensorProto.FLOAT16 or given(node, 0) not in graph.constants:
            continue
        values = graph.values(node.input[0]).astype("float64")
        if values.size and abs(values).max() > _MOST_IN_HALF:
            yield Found(
                at(node), f"the constant '{node.input[0]}' holds {values.flat[abs(values).argmax()]:.3g},"
                " which is infinite in float16.", "Use -65504 or less far from 0, or keep the sum float32.",
            )  # fmt: skip


def norms_in_half(graph: Graph) -> Iterator[Found]:
    """A mean of squares in float16: infinite for values above 256. TensorRT warns and builds it."""
    from onnx import TensorProto

    for node in graph.of("ReduceMean"):
        maker = graph.makers.get(given(node, 0))
        if maker is None or graph.kind(node.input[0]) != TensorProto.FLOAT16:
            continue
        squares = maker.op_type == "Mul" and len(set(maker.input)) == 1
        if maker.op_type == "Pow" or squares:
            yield Found(
                at(node), "the mean of squares of a norm in float16, where the square of 256 is infinite.",
                "Export again with onnx: {target: tensorrt}, whose norms stay float32.",
            )  # fmt: skip


def default_inputs(graph: Graph) -> Iterator[Found]:
    """Inputs with a default: to TensorRT the default is a constant, and the input is gone."""
    for value in graph.model.graph.input:
        if value.name in {tensor.name for tensor in graph.model.graph.initializer}:
            yield Found(
                f"the input '{value.name}'", "it has a default; to TensorRT this is a constant, and the"
                " engine has no such input.", "Remove the default where the input shall stay. " + REEXPORT,
            )  # fmt: skip


def unnamed_sizes(graph: Graph) -> Iterator[Found]:
    """Dynamic sizes without a name, for which no profile can be made."""
    for value in graph.model.graph.input:
        kind = value.type.tensor_type
        if value.name in graph.constants:
            continue
        unknown = [at for at, d in enumerate(kind.shape.dim) if not (d.dim_param or d.HasField("dim_value"))]
        if unknown or not kind.HasField("shape"):
            what = f"the sizes at {unknown} have no name" if unknown else "it has no shape at all"
            yield Found(
                f"the input '{value.name}'", f"{what}, so no lengths can be given for them.",
                "Name dynamic axes at export, or give them numbers.",
            )  # fmt: skip


def axes(graph: Graph) -> Iterator[Found]:
    """Tensors with more than 8 axes."""
    mend = "Join some of its axes."
    for name, tensor in graph.constants.items():
        if len(tensor.dims) > _MOST_AXES:
            yield Found(f"the constant '{name}'", f"{len(tensor.dims)} axes; TensorRT takes 8.", mend)
    for value in graph.model.graph.input:
        if len(value.type.tensor_type.shape.dim) > _MOST_AXES:
            count = len(value.type.tensor_type.shape.dim)
            yield Found(f"the input '{value.name}'", f"{count} axes; TensorRT takes 8.", mend)
    for node in graph.of("Reshape"):
        shape = graph.values(given(node, 1))
        if shape is not None and shape.size > _MOST_AXES:
            yield Found(at(node), f"to {shape.size} axes; TensorRT takes 8.", mend)
