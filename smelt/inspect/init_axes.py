"""Infer the batch axes of an ONNX model from dimension names, array sizes and a trial run."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from smelt.core.errors import InputError
from smelt.core.readers.npz_arrays import read_npz_headers
from smelt.inspect.onnx_files import ThirdPartyModel
from smelt.runtime.third_party.detect_batch_axes import detect_output_axes
from smelt.runtime.third_party.signature import GraphSignature, TensorSpec

BatchAxes = dict[str, int | None]
_MAX_AXIS_TRIALS = 8  # trial runs if several axes have the length of the batch


def infer_batch_axes(onnx_model: ThirdPartyModel, file: Path) -> tuple[BatchAxes, list[str]]:
    """Return the axes that a recipe must set for the arrays in `file`, and the outputs without batch axis.

    Raises:
        InputError: an output of a graph with a fixed batch size above 1 has no batch axis (`unclear-rows`).
    """
    signature = onnx_model.signature
    shapes = read_npz_headers(file)
    sizes = {value.name: shapes[value.name].shape for value in signature.inputs if value.name in shapes}
    choices = _candidate_axes(signature, sizes)
    likely: BatchAxes = {name: axes[0] for name, axes in choices.items()}
    is_open = _is_ambiguous(signature, likely) or any(len(axes) > 1 for axes in choices.values())
    if onnx_model.details.get("random") or not is_open:  # random outputs do not depend on the inputs
        return _axes_to_write(signature, likely), []
    inputs, outputs = _try_axes(onnx_model, file, choices) or (likely, {})
    known = signature.with_batch_axes(inputs)
    _require_batch_outputs(onnx_model.file, known, outputs)
    defaults = {value.name: value.axis for value in known.outputs}
    changed: BatchAxes = {
        name: axes[0] for name, axes in outputs.items() if axes and defaults.get(name) not in axes
    }
    without = [name for name, axes in outputs.items() if axes is None]
    return _axes_to_write(signature, inputs) | changed, without


def _axes_to_write(signature: GraphSignature, found: BatchAxes) -> BatchAxes:
    """Return the input axes that differ from the defaults; all axes if that would be ambiguous."""
    changed = {name: axis for name, axis in found.items() if axis != signature.input_batch_axes[name]}
    return found if list(signature.with_batch_axes(changed).ambiguous_axes(changed)) else changed


def _candidate_axes(
    signature: GraphSignature, sizes: Mapping[str, Sequence[int]]
) -> dict[str, list[int | None]]:
    """Return the possible batch axes of each input, most likely first."""
    axes = signature.input_batch_axes
    counts = [d[axis] for name, d in sizes.items() if (axis := axes[name]) is not None and axis < len(d)]
    # the most frequent length of the default axes
    rows = max(counts, key=lambda c: (counts.count(c), sum(c in d for d in sizes.values()), c > 1), default=0)
    names = {value.name: _batch_name(value) for value in signature.inputs}
    found: dict[str, list[int | None]] = {}
    for value in signature.inputs:
        dims = sizes.get(value.name)
        if not dims:
            continue
        said, shape = axes[value.name], value.shape or ()
        places: list[int | None] = [axis for axis, size in enumerate(dims) if size == rows]
        if said in places and names[value.name]:
            places = [said]  # the dimension's name defines it
        # inputs that share the name of the batch dimension must have a batch axis
        one_name = names[value.name] and list(names.values()).count(names[value.name]) > 1
        fixed = {axis for axis, size in enumerate(shape) if isinstance(size, int)}
        ordered = sorted(places, key=lambda axis: (axis in fixed, axis != said, axis))
        found[value.name] = ordered or [said if one_name else None]
    return found


def _batch_name(value: TensorSpec) -> str | None:
    """Return the name of the batch dimension; None if it has none."""
    size = value.shape[value.axis] if value.shape and value.axis is not None else None
    return size if isinstance(size, str) else None


def _is_ambiguous(signature: GraphSignature, inputs: BatchAxes) -> bool:
    """Return whether dimension names do not determine the batch axis of some output."""
    known = signature.with_batch_axes(inputs)
    named = {_batch_name(value) for value in known.inputs} - {None}
    return any(_batch_name(value) not in named for value in known.outputs if value.shape != ())


def _try_axes(
    onnx_model: ThirdPartyModel, file: Path, choices: Mapping[str, list[int | None]]
) -> tuple[BatchAxes, dict[str, list[int] | None]] | None:
    """Return input axes for which all outputs have a batch axis, and the output axes.

    If there are none, return the most likely axes with which the graph runs; None if it never runs.
    """
    first = None
    for axes in itertools.islice(itertools.product(*choices.values()), _MAX_AXIS_TRIALS):
        inputs: BatchAxes = dict(zip(choices, axes, strict=True))
        outputs = detect_output_axes(onnx_model.file, onnx_model.signature, file, inputs)
        if outputs is None:
            continue
        with_rows = [found for found in outputs.values() if found is not None]
        if with_rows and all(with_rows):
            return inputs, outputs
        first = first or (inputs, outputs)
    return first


def _require_batch_outputs(
    file: Path, known: GraphSignature, outputs: Mapping[str, list[int] | None]
) -> None:
    """Require that all outputs have a batch axis if the graph has a fixed batch size above 1.

    Raises:
        InputError: some have not (`unclear-rows`).
    """
    without = [name for name, axes in outputs.items() if axes is None]
    if without and known.fixed_batch_size not in (None, 1):
        names = ", ".join(f"'{name}'" for name in without)
        raise InputError(
            f"{file}: the graph has a fixed batch size of {known.fixed_batch_size}, but the output {names}"
            " has no batch"
            " axis. Export the graph with a dynamic batch size or with 1, or without this output.",
            code="unclear-rows",
        )
