"""What a graph takes and gives: names, types, shapes; and rows of arrays made fit for it.

An artifact of the task `custom` holds it as `signature.json`, so that its graph can be fed without being
asked first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from smelt.core.errors import InputError, nearest
from smelt.core.files import load_json, write_json
from smelt.core.rows.arrays import Arrays, Axes, Shape
from smelt.runtime.foreign.row_axes import axis_problems, row_axes

FILE = "signature.json"
# What becomes what without a word: numpy makes float64 and int64 where nobody says otherwise.
_FITTING = {
    "float16": ("float32", "float64"),
    "float32": ("float64", "float16"),
    "float64": ("float32",),
    "int32": ("int64", "int16", "int8", "uint8"),
    "int64": ("int32", "int16", "int8", "uint8"),
}


class Value(BaseModel):
    """An input or output of a graph.

    dtype: numpy's word, `str` for texts. shape: of each axis its size, its name, or None where it has none;
    None where not even their number is known. axis: the one that holds the rows; None where no axis does.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    dtype: str
    shape: tuple[int | str | None, ...] | None
    axis: int | None = 0

    def described(self) -> str:
        """Return for example `x float32 [batch, 4]`."""
        sizes = "?" if self.shape is None else ", ".join("?" if s is None else str(s) for s in self.shape)
        return f"{self.name} {self.dtype} [{sizes}]"


class Signature(BaseModel):
    """The inputs that a graph must be given, and its outputs."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]

    @property
    def batch(self) -> int | None:
        """How many rows every call takes; None where a call takes any number."""
        sizes = {
            size
            for v in self.inputs
            if v.shape and v.axis is not None and isinstance(size := v.shape[v.axis], int)
        }
        return min(sizes) if sizes else None

    @property
    def axes(self) -> dict[str, int | None]:
        """Which axis of each input holds the rows."""
        return {value.name: value.axis for value in self.inputs}

    @property
    def by_name(self) -> frozenset[str]:
        """The inputs whose rows the same name counts as those of another one."""
        names = {v.name: v.shape[v.axis] for v in self.inputs if v.shape and v.axis is not None}
        counted = [name for name in names.values() if isinstance(name, str)]
        return frozenset(value for value, name in names.items() if counted.count(str(name)) > 1)

    def with_axes(self, given: Axes) -> Signature:
        """Return the signature with the axes of its rows: `given`, else by the names of dimensions."""
        axes = row_axes(self.inputs, self.outputs, given)
        return Signature(
            inputs=tuple(value.model_copy(update={"axis": axes[value.name]}) for value in self.inputs),
            outputs=tuple(value.model_copy(update={"axis": axes[value.name]}) for value in self.outputs),
        )

    def unclear_axes(self, given: Axes) -> Iterator[str]:
        """Yield why axes have to be given besides those that are."""
        yield from axis_problems(self.inputs, self.axes, given)

    def wrong_axes(self, given: Axes) -> Iterator[str]:
        """Yield what is wrong with axes that a user gives."""
        values = {value.name: value for value in (*self.outputs, *self.inputs)}
        for name, axis in given.items():
            if name not in values:
                known = ", ".join(values)
                yield f"'{name[:80]}' is no input of the graph; there are {known}.{nearest(name, values)}"
            elif axis is not None and (shape := values[name].shape) is not None and len(shape) <= axis:
                most = f"its axes are 0 to {len(shape) - 1}" if shape else "it has no axes"
                yield f"'{name}' is {values[name].described()}: {most}, and {axis} is none of them."

    def problems(self, shapes: Mapping[str, Shape]) -> Iterator[str]:
        """Yield what keeps arrays of these types and shapes from being rows of the graph's inputs."""
        for value in self.inputs:
            shape = shapes.get(value.name)
            if shape is None:
                known = ", ".join(shapes)
                yield (
                    f"no array '{value.name}', which is an input of the graph ({value.described()}); there"
                    f" are: {known}.{nearest(value.name, shapes)}"
                )
            elif problem := _misfit(value, shape):
                yield f"the array '{value.name}' is {shape.dtype} {list(shape.dims)}, and {problem}"
            elif value.axis is not None and shape.dims and value.axis >= len(shape.dims):
                yield f"the array '{value.name}' is {list(shape.dims)}: no axis {value.axis} for the rows."

    def unread(self, names: Sequence[str]) -> list[str]:
        """Return which of `names` are no inputs."""
        return [name for name in names if name not in {value.name for value in self.inputs}]

    def feeds(self, arrays: Arrays, begin: int, end: int) -> dict[str, NDArray[Any]]:
        """Return what the graph is fed for the rows from `begin` to before `end`, in its own types."""
        found = {}
        for value in self.inputs:
            whole = arrays.values[value.name]
            part = whole
            if not arrays.is_shared(value.name):
                part = np.moveaxis(whole[begin:end], 0, value.axis or 0)
            kind = object if value.dtype == "str" else np.dtype(value.dtype)
            found[value.name] = np.ascontiguousarray(part.astype(kind, copy=False)).reshape(part.shape)
        return found


def _misfit(value: Value, shape: Shape) -> str | None:
    """Say why an array of this type and shape is no input `value`, or None."""
    if shape.dtype != value.dtype and shape.dtype not in _FITTING.get(value.dtype, ()):
        return f"the graph takes {value.described()}. Convert it: array.astype('{value.dtype}')."
    if value.shape is None:
        return None
    sizes = enumerate(zip(value.shape, shape.dims, strict=False))
    fixed = all(
        not isinstance(said, int) or said == size or axis == value.axis for axis, (said, size) in sizes
    )
    if len(value.shape) != len(shape.dims) or not fixed:
        return f"the graph takes {value.described()}."
    return None


def read_signature(folder: Path) -> Signature:
    """Return what stands in `folder`.

    Raises:
        InputError: there is none, or it is damaged.
    """
    path = folder / FILE
    try:
        return Signature.model_validate(load_json(path))
    except (OSError, ValueError, ValidationError, RecursionError) as error:
        raise InputError(
            f"{path}: not what this version of smelt reads: {error}", code="damaged-file"
        ) from error


def row_axes_in(folder: Path) -> dict[str, int | None]:
    """Return which axis of each input and output holds the rows; nothing where no graph of arrays lies there.

    Raises:
        InputError: the signature in the folder is damaged.
    """
    if not (folder / FILE).is_file():
        return {}
    signature = read_signature(folder)
    return {value.name: value.axis for value in (*signature.outputs, *signature.inputs)}


def write_signature(folder: Path, signature: Signature) -> None:
    """Write `signature` into `folder`."""
    write_json(folder / FILE, signature.model_dump(mode="json"))
