"""Rules on values, inputs and sizes: overflow, inputs that became constants, too many axes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from smelt.export.tensorrt.rules.checked_graph import (
    TENSORRT_REEXPORT_HINT,
    CheckedGraph,
    RuleFinding,
    input_name,
    node_attribute,
    node_location,
)

_FP16_MAX = 65504.0
_MAX_AXES = 8
_FP16_HINT = "Weights above 65504 do not fit into fp16: export with dtype: fp32."


def missing_external_data(model: Any, path: Path) -> Iterator[RuleFinding]:
    """Find external weights that are missing, or outside of the file's folder."""
    folder = path.parent.resolve()
    for tensor in model.graph.initializer:
        for entry in (e for e in tensor.external_data if e.key == "location"):
            file = path.parent / entry.value
            name = f"the weights of '{tensor.name}'"
            if not (folder / entry.value).resolve().is_relative_to(folder):
                yield RuleFinding(
                    name,
                    f"their location {entry.value} is outside of the graph's folder.",
                    "Save the model again with its weights next to it.",
                )
                return
            if not file.is_file():
                yield RuleFinding(name, f"the file {file} is missing.", "Copy that file too.")
                return


def non_finite_values(graph: CheckedGraph) -> Iterator[RuleFinding]:
    """Find constants that overflowed in half precision; TensorRT builds them silently."""
    for name, kind, values in graph.non_finite_constants:
        if not _is_mask(values):
            import numpy as np

            count = int((~np.isfinite(values)).sum())
            yield RuleFinding(
                f"the constant '{name}' ({kind})",
                f"it contains {count} infinite or NaN values; TensorRT would build it silently.",
                _FP16_HINT,
            )


def mask_constants(graph: CheckedGraph) -> Iterator[RuleFinding]:
    """Find constants of 0 and -inf, which may be intended masks."""
    for name, kind, values in graph.non_finite_constants:
        if _is_mask(values):
            yield RuleFinding(
                f"the constant '{name}' ({kind})",
                "it is a mask with -inf; a fully masked row gives NaN.",
                "",
            )


def _is_mask(values: Any) -> bool:
    import numpy as np

    return bool(np.isin(values, (0.0, -np.inf)).all())


def overflowing_casts(graph: CheckedGraph) -> Iterator[RuleFinding]:
    """Find constants that a Cast to float16 makes infinite: usually the -3.4e38 of a mask."""
    from onnx import TensorProto

    for node in graph.nodes_of_type("Cast"):
        if node_attribute(node, "to") != TensorProto.FLOAT16 or input_name(node, 0) not in graph.constants:
            continue
        values = graph.constant_value(node.input[0]).astype("float64")
        if values.size and abs(values).max() > _FP16_MAX:
            yield RuleFinding(
                node_location(node),
                f"the constant '{node.input[0]}' contains {values.flat[abs(values).argmax()]:.3g},"
                " which is infinite in float16.",
                "Use -65504 or a smaller magnitude, or keep the sum in float32.",
            )


def norms_in_fp16(graph: CheckedGraph) -> Iterator[RuleFinding]:
    """Find a mean of squares in float16: infinite for values above 256. TensorRT warns and builds it."""
    from onnx import TensorProto

    for node in graph.nodes_of_type("ReduceMean"):
        maker = graph.producers.get(input_name(node, 0))
        if maker is None or graph.element_type(node.input[0]) != TensorProto.FLOAT16:
            continue
        squares = maker.op_type == "Mul" and len(set(maker.input)) == 1
        if maker.op_type == "Pow" or squares:
            yield RuleFinding(
                node_location(node),
                "the mean of squares of a norm in float16 overflows: the square of 256 is infinite.",
                "Export again with onnx: {target: tensorrt}, which keeps norms in float32.",
            )


def default_inputs(graph: CheckedGraph) -> Iterator[RuleFinding]:
    """Find inputs with a default: TensorRT makes the default a constant and removes the input."""
    for value in graph.model.graph.input:
        if value.name in {tensor.name for tensor in graph.model.graph.initializer}:
            yield RuleFinding(
                f"the input '{value.name}'",
                "it has a default; TensorRT makes it a constant, and the engine has no such input.",
                "Remove the default if the input is needed. " + TENSORRT_REEXPORT_HINT,
            )


def unnamed_sizes(graph: CheckedGraph) -> Iterator[RuleFinding]:
    """Find dynamic sizes without a name, for which no profile can be made."""
    for value in graph.model.graph.input:
        kind = value.type.tensor_type
        if value.name in graph.constants:
            continue
        unknown = [at for at, d in enumerate(kind.shape.dim) if not (d.dim_param or d.HasField("dim_value"))]
        if unknown or not kind.HasField("shape"):
            what = f"the sizes at {unknown} have no name" if unknown else "it has no shape"
            yield RuleFinding(
                f"the input '{value.name}'",
                f"{what}, so no lengths can be set for them.",
                "Name dynamic axes at export, or fix their sizes.",
            )


def too_many_axes(graph: CheckedGraph) -> Iterator[RuleFinding]:
    """Find tensors with more than 8 axes."""
    hint = "Merge some of its axes."
    for name, tensor in graph.constants.items():
        if len(tensor.dims) > _MAX_AXES:
            yield RuleFinding(
                f"the constant '{name}'", f"{len(tensor.dims)} axes; TensorRT supports at most 8.", hint
            )
    for value in graph.model.graph.input:
        if len(value.type.tensor_type.shape.dim) > _MAX_AXES:
            count = len(value.type.tensor_type.shape.dim)
            yield RuleFinding(
                f"the input '{value.name}'", f"{count} axes; TensorRT supports at most 8.", hint
            )
    for node in graph.nodes_of_type("Reshape"):
        shape = graph.constant_value(input_name(node, 1))
        if shape is not None and shape.size > _MAX_AXES:
            yield RuleFinding(node_location(node), f"{shape.size} axes; TensorRT supports at most 8.", hint)
