"""The signature of a graph: names, types, shapes; and conversion of arrays to its inputs.

An artifact of the task `custom` has it as `signature.json`, so that inputs can be prepared without opening
the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from smelt.core.errors import InputError, did_you_mean
from smelt.core.files import load_json, write_json
from smelt.core.readers.npz_arrays import ArrayHeader, SampleArrays, SampleAxes
from smelt.runtime.third_party.batch_axes import batch_axes, batch_axis_problems

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
    def input_batch_axes(self) -> dict[str, int | None]:
        """Return the sample axis of each input."""
        return {value.name: value.axis for value in self.inputs}

    @property
    def shared_batch_inputs(self) -> frozenset[str]:
        """Return the inputs whose sample dimension has the same name as that of another one."""
        names = {v.name: v.shape[v.axis] for v in self.inputs if v.shape and v.axis is not None}
        counted = [name for name in names.values() if isinstance(name, str)]
        return frozenset(value for value, name in names.items() if counted.count(str(name)) > 1)

    def with_batch_axes(self, given: SampleAxes) -> GraphSignature:
        """Return the signature with sample axes: `given`, else by the names of dimensions."""
        axes = batch_axes(self.inputs, self.outputs, given)
        return GraphSignature(
            inputs=tuple(value.model_copy(update={"axis": axes[value.name]}) for value in self.inputs),
            outputs=tuple(value.model_copy(update={"axis": axes[value.name]}) for value in self.outputs),
        )

    def ambiguous_axes(self, given: SampleAxes) -> Iterator[str]:
        """Yield why more axes must be given."""
        yield from batch_axis_problems(self.inputs, self.input_batch_axes, given)

    def invalid_axes(self, given: SampleAxes) -> Iterator[str]:
        """Yield what is wrong with axes given by a user."""
        values = {value.name: value for value in (*self.outputs, *self.inputs)}
        for name, axis in given.items():
            if name not in values:
                known = ", ".join(values)
                yield f"'{name[:80]}' is no input of the graph; inputs: {known}.{did_you_mean(name, values)}"
            elif axis is not None and (shape := values[name].shape) is not None and len(shape) <= axis:
                most = f"its axes are 0 to {len(shape) - 1}" if shape else "it has no axes"
                yield f"'{name}' is {values[name].describe()}: {most}; axis {axis} does not exist."

    def shape_problems(self, shapes: Mapping[str, ArrayHeader]) -> Iterator[str]:
        """Yield why arrays of these types and shapes do not match the graph's inputs."""
        for value in self.inputs:
            shape = shapes.get(value.name)
            if shape is None:
                known = ", ".join(shapes)
                yield (
                    f"no array '{value.name}', which is an input of the graph ({value.describe()}); the"
                    f" arrays are {known}.{did_you_mean(value.name, shapes)}"
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
        found = {}
        for value in self.inputs:
            whole = arrays.values[value.name]
            part = whole
            if not arrays.is_shared(value.name):
                part = np.moveaxis(whole[begin:end], 0, value.axis or 0)
            kind = object if value.dtype == "str" else np.dtype(value.dtype)
            found[value.name] = np.ascontiguousarray(part.astype(kind, copy=False)).reshape(part.shape)
        return found


def _mismatch(value: TensorSpec, shape: ArrayHeader) -> str | None:
    """Return why an array of this type and shape does not match `value`, or None."""
    if shape.dtype != value.dtype and shape.dtype not in _CONVERTIBLE_DTYPES.get(value.dtype, ()):
        return f"the graph takes {value.describe()}. Convert it: array.astype('{value.dtype}')."
    if value.shape is None:
        return None
    sizes = enumerate(zip(value.shape, shape.shape, strict=False))
    fixed = all(
        not isinstance(said, int) or said == size or axis == value.axis for axis, (said, size) in sizes
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
