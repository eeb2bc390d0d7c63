"""The signature of a graph: names, types, shapes and batch axes; and conversion of arrays to its inputs.

An artifact of the task `custom` has it as `signature.json`, so that inputs can be prepared without opening
the graph.

The axis of each input and output that holds the samples is 0, unless the dimension's name differs: in
`x [batch, time, 8]` and `state [layers, batch, 16]` the samples of `state` are on axis 1. A recipe's
`data: {axes: ...}` overrides both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from smelt.core.errors import InputError, did_you_mean
from smelt.core.files import load_json, write_json
from smelt.data.npz_arrays import ArrayHeader, CallArrays, SampleArrays, SampleAxes

_MAX_NAMED = 4  # inputs in a message
_BATCH = re.compile(r"\w*batch\w*", re.IGNORECASE)  # no `batch*heads`, which is a product


class _GraphValue(Protocol):
    """The properties of an input or output that are used."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int | str | None, ...] | None: ...

    def describe(self) -> str: ...


def batch_axes(
    inputs: Sequence[_GraphValue], outputs: Sequence[_GraphValue], user_axes: SampleAxes
) -> dict[str, int | None]:
    """Return by name of each input and output the axis of the samples.

    None: it has none. An input is then the same in every call; an output cannot be
    divided into samples.

    Args:
        inputs: of the graph, with their known shapes.
        outputs: likewise.
        user_axes: axes set by the user, of inputs or outputs.
    """
    batch = _batch_dimension_names(inputs, outputs, user_axes)
    axes_by_name: dict[str, int | None] = {}
    for value in inputs:
        axis_guess = None if value.shape == () else _named_batch_axis(value, batch) or 0
        axes_by_name[value.name] = user_axes.get(value.name, axis_guess)
    # named axes of the inputs that are not the batch: a time, a number of tokens
    other_axes = {
        size
        for value in inputs
        for axis, size in enumerate(value.shape or ())
        if isinstance(size, str) and axis != axes_by_name[value.name]
    }
    for value in (
        value for value in outputs if value.name not in axes_by_name
    ):  # an input may be an output too
        axis_guess = _named_batch_axis(value, batch)
        if axis_guess is None and None in (value.shape or ()):
            axis_guess = next(
                (
                    axes_by_name[other_input.name]
                    for other_input in inputs
                    if other_input.shape == value.shape
                ),
                None,
            )
        if axis_guess is None and value.shape != () and not (value.shape and value.shape[0] in other_axes):
            axis_guess = 0
        axes_by_name[value.name] = user_axes.get(value.name, axis_guess)
    return axes_by_name


def batch_axis_problems(
    inputs: Sequence[_GraphValue], axes: SampleAxes, user_axes: SampleAxes
) -> Iterator[str]:
    """Yield why the sample axes of the inputs are ambiguous.

    Args:
        inputs: of the graph.
        axes: the result of `batch_axes`.
        user_axes: axes set by the user, which are used unchanged.
    """
    sizes = {
        value.name: value.shape[axis]
        for value in inputs
        if value.shape and (axis := axes[value.name]) is not None and axis < len(value.shape)
    }
    fixed = {size for size in sizes.values() if isinstance(size, int)}
    open_sizes = any(not isinstance(size, int) for size in sizes.values())
    sizes_differ = len(fixed) > 1 or (max(fixed, default=1) > 1 and open_sizes)
    ambiguous = [v for v in inputs if sizes_differ and isinstance(sizes.get(v.name), int)]
    ambiguous += [v for v in inputs if v not in ambiguous and _may_be_other_axis(v, inputs, axes, sizes)]
    unspecified = [value for value in ambiguous if value.name not in user_axes]
    if unspecified:
        dims = _first_items([value.describe() for value in inputs], "; ")
        names = _first_items([f"'{value.name}'" for value in unspecified])
        axes_text = _first_items(
            [f"{value.name}: {_likely_axis(value, inputs, sizes)}" for value in unspecified], more=", ..."
        )
        example = f"data: {{axes: {{{axes_text}}}}}"
        yield (
            f"the first axes of the inputs disagree ({dims}), so it is not clear which axis of {names} holds"
            f" the samples. Set it, for example {example}; null for an array that is the same in every call."
        )


def _first_items(items: Sequence[str], separator: str = ", ", more: str | None = None) -> str:
    """Return the first items; more: instead of the number of the others."""
    others = len(items) - _MAX_NAMED
    rest = "" if others <= 0 else f" and {others} more" if more is None else more
    return separator.join(items[:_MAX_NAMED]) + rest


def _batch_dimension_names(
    inputs: Sequence[_GraphValue], outputs: Sequence[_GraphValue], user_axes: SampleAxes
) -> list[str]:
    """Return the names of the batch dimension, the most likely first."""
    values = [*inputs, *outputs]
    given_names = [
        _dimension_at(value, axis) for value in values if (axis := user_axes.get(value.name)) is not None
    ]
    names = [size for value in values for size in value.shape or () if isinstance(size, str)]
    batch_names = [name for name in names if _BATCH.fullmatch(name)]
    first = [size for value in values if isinstance(size := _dimension_at(value, 0), str)]
    of_inputs = {size for value in inputs if isinstance(size := _dimension_at(value, 0), str)}
    candidates = sorted(
        (name for name in dict.fromkeys(first) if name in of_inputs),
        key=lambda name: (-first.count(name), -names.count(name)),
    )[:1]
    by_name = sorted(dict.fromkeys(batch_names), key=lambda name: -names.count(name))
    return [name for name in dict.fromkeys([*given_names, *by_name]) if isinstance(name, str)] or candidates


def _dimension_at(value: _GraphValue, axis: int) -> int | str | None:
    return value.shape[axis] if value.shape and axis < len(value.shape) else None


def _named_batch_axis(value: _GraphValue, batch: Sequence[str]) -> int | None:
    """Return the axis of a value with one of these names."""
    shape = value.shape or ()
    return next((shape.index(name) for name in batch if name in shape), None)


def _may_be_other_axis(
    value: _GraphValue, inputs: Sequence[_GraphValue], axes: SampleAxes, sizes: Mapping[str, int | str | None]
) -> bool:
    """Return whether the axis of a value has another name than in an input whose dimensions it shares."""
    size = sizes.get(value.name)
    if not isinstance(size, str) or _BATCH.fullmatch(size):
        return False
    dim_names = {name for name in value.shape or () if isinstance(name, str)}
    for other_input in inputs:
        other_size = sizes.get(other_input.name)
        if other_input is value or not isinstance(other_size, str) or other_size == size:
            continue
        # ambiguous is the one whose dimension others lack: position ids [tokens] for ids [batch, tokens]
        if dim_names & {name for name in other_input.shape or () if isinstance(name, str)}:
            return sum(s == size for s in sizes.values()) <= sum(s == other_size for s in sizes.values())
    return False


def _likely_axis(
    value: _GraphValue, inputs: Sequence[_GraphValue], sizes: Mapping[str, int | str | None]
) -> int | str:
    """Return the most likely axis of a value for the user to set, or `null`."""
    other_inputs = [other_input for other_input in inputs if other_input is not value]
    shape = value.shape or ()
    size = sizes.get(value.name)
    if isinstance(size, int) and any(size in (other_input.shape or ())[1:] for other_input in other_inputs):
        return 0
    batches = {sizes.get(other_input.name) for other_input in other_inputs}
    same_size_axes = [axis for axis, size in enumerate(shape) if axis and size in batches]
    open_axes = [axis for axis, size in enumerate(shape) if axis and not isinstance(size, int)]
    return next(iter([*same_size_axes, *open_axes]), "null")


SIGNATURE_FILE = "signature.json"
# Silent conversions: numpy creates float64 and int64 by default.
_CONVERTIBLE_DTYPES = {
    "float16": ("float32", "float64"),
    "float32": ("float64", "float16"),
    "float64": ("float32",),
    "int32": ("int64", "int16", "int8", "uint8"),
    "int64": ("int32", "int16", "int8", "uint8"),
}


class TensorSpec(BaseModel):
    """An input or output of a graph.

    dtype: numpy's name, `str` for texts. shape: for each axis its size, its name, or None where it has none;
    None where not even their number is known. axis: the sample axis; None where there is none.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    dtype: str
    shape: tuple[int | str | None, ...] | None
    axis: int | None = 0

    def describe(self) -> str:
        """Return for example `x float32 [batch, 4]`."""
        sizes = "?" if self.shape is None else ", ".join("?" if s is None else str(s) for s in self.shape)
        return f"{self.name} {self.dtype} [{sizes}]"


class GraphSignature(BaseModel):
    """The required inputs of a graph, and its outputs."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @property
    def fixed_batch_size(self) -> int | None:
        """Return the fixed batch size; None where a call takes any number of samples."""
        sizes = {
            size
            for v in self.inputs
            if v.shape and v.axis is not None and isinstance(size := v.shape[v.axis], int)
        }
        return min(sizes) if sizes else None

    @property
    def without_batch_axes(self) -> GraphSignature:
        """The signature for samples that are the inputs of a whole call each."""
        return self.with_batch_axes(dict.fromkeys((v.name for v in (*self.inputs, *self.outputs)), None))

    @property
    def input_batch_axes(self) -> dict[str, int | None]:
        """Return the sample axis of each input."""
        return {value.name: value.axis for value in self.inputs}

    @property
    def output_shapes(self) -> dict[str, tuple[int | str | None, ...] | None]:
        """The shapes of the outputs, with a batch axis: metrics count axes from the last one."""
        return {
            v.name: v.shape if v.axis is not None or v.shape is None else (None, *v.shape)
            for v in self.outputs
        }

    @property
    def shared_batch_inputs(self) -> frozenset[str]:
        """Return the inputs whose sample dimension has the same name as that of another one."""
        names = {v.name: v.shape[v.axis] for v in self.inputs if v.shape and v.axis is not None}
        dim_names = [name for name in names.values() if isinstance(name, str)]
        return frozenset(value for value, name in names.items() if dim_names.count(str(name)) > 1)

    def with_batch_axes(self, user_axes: SampleAxes) -> GraphSignature:
        """Return the signature with sample axes: `user_axes`, else by the names of dimensions."""
        axes = batch_axes(self.inputs, self.outputs, user_axes)
        return GraphSignature(
            inputs=tuple(value.model_copy(update={"axis": axes[value.name]}) for value in self.inputs),
            outputs=tuple(value.model_copy(update={"axis": axes[value.name]}) for value in self.outputs),
        )

    def ambiguous_axes(self, user_axes: SampleAxes) -> Iterator[str]:
        """Yield why more axes must be given."""
        yield from batch_axis_problems(self.inputs, self.input_batch_axes, user_axes)

    def invalid_axes(self, user_axes: SampleAxes) -> Iterator[str]:
        """Yield what is wrong with axes given by a user."""
        values = {value.name: value for value in (*self.outputs, *self.inputs)}
        declared_scalars = {value.name for value in self.outputs if value.shape == ()}
        for name, axis in user_axes.items():
            if name not in values:
                inputs = ", ".join(values)
                yield f"'{name[:80]}' is no input of the graph; inputs: {inputs}.{did_you_mean(name, values)}"
            elif name in declared_scalars:  # some exporters declare no axes where there are some
                continue
            elif axis is not None and (shape := values[name].shape) is not None and len(shape) <= axis:
                most = f"its axes are 0 to {len(shape) - 1}" if shape else "it has no axes"
                yield f"'{name}' is {values[name].describe()}: {most}; axis {axis} does not exist."

    def shape_problems(self, shapes: Mapping[str, ArrayHeader]) -> Iterator[str]:
        """Yield why arrays of these types and shapes do not match the graph's inputs."""
        for value in self.inputs:
            shape = shapes.get(value.name)
            if shape is None:
                array_names = ", ".join(shapes)
                yield (
                    f"no array '{value.name}', which is an input of the graph ({value.describe()}); the"
                    f" arrays are {array_names}.{did_you_mean(value.name, shapes)}"
                )
            elif problem := _mismatch(value, shape):
                yield f"the array '{value.name}' is {shape.dtype} {list(shape.shape)}, but {problem}"
            elif value.axis is not None and shape.shape and value.axis >= len(shape.shape):
                yield f"the array '{value.name}' is {list(shape.shape)}: no sample axis {value.axis}."

    def unknown_inputs(self, names: Sequence[str]) -> list[str]:
        """Return which of `names` are not inputs."""
        return [name for name in names if name not in {value.name for value in self.inputs}]

    def make_feeds(self, arrays: SampleArrays, begin: int, end: int) -> dict[str, NDArray[Any]]:
        """Return the graph's inputs for the samples from `begin` to before `end`, in its own types."""
        feeds = {}
        for value in self.inputs:
            if isinstance(arrays, CallArrays):
                assert end == begin + 1, "samples of different shapes share no call"
                selected = arrays.calls[begin][value.name]
            elif arrays.is_shared(value.name):
                selected = arrays.values[value.name]
            else:
                selected = np.moveaxis(arrays.values[value.name][begin:end], 0, value.axis or 0)
            kind = object if value.dtype == "str" else np.dtype(value.dtype)
            feeds[value.name] = np.ascontiguousarray(selected.astype(kind, copy=False)).reshape(
                selected.shape
            )
        return feeds


def _mismatch(value: TensorSpec, shape: ArrayHeader) -> str | None:
    """Return why an array of this type and shape does not match `value`, or None."""
    if shape.dtype != value.dtype and shape.dtype not in _CONVERTIBLE_DTYPES.get(value.dtype, ()):
        return f"the graph takes {value.describe()}. Convert it: array.astype('{value.dtype}')."
    if value.shape is None:
        return None
    sizes = enumerate(zip(value.shape, shape.shape, strict=False))
    fixed = all(
        not isinstance(expected, int) or expected == size or axis == value.axis
        for axis, (expected, size) in sizes
    )
    if len(value.shape) != len(shape.shape) or not fixed:
        return f"the graph takes {value.describe()}."
    return None


def read_signature(folder: Path) -> GraphSignature:
    """Return the signature in `folder`.

    Raises:
        InputError: it is missing, or damaged.
    """
    path = folder / SIGNATURE_FILE
    try:
        return GraphSignature.model_validate(load_json(path))
    except (OSError, ValueError, ValidationError, RecursionError) as error:
        raise InputError(
            f"{path}: this version of smelt cannot read this file: {error}", code="damaged-file"
        ) from error


def read_batch_axes(folder: Path) -> dict[str, int | None]:
    """Return the sample axis of each input and output; empty for a folder without a signature.

    Raises:
        InputError: the signature in the folder is damaged.
    """
    if not (folder / SIGNATURE_FILE).is_file():
        return {}
    signature = read_signature(folder)
    return {value.name: value.axis for value in (*signature.outputs, *signature.inputs)}


def write_signature(folder: Path, signature: GraphSignature) -> None:
    """Write `signature` into `folder`."""
    write_json(folder / SIGNATURE_FILE, signature.model_dump(mode="json"))
