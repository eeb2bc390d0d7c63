"""What a graph takes and gives: names, types, shapes; and rows of arrays made fit for it.

An artifact of the task `tensors` holds it as `signature.json`, so that its graph can be fed without being
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
from smelt.core.rows.arrays import Arrays, Shape

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
    None where not even their number is known.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    dtype: str
    shape: tuple[int | str | None, ...] | None

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
        sizes = {v.shape[0] for v in self.inputs if v.shape and isinstance(v.shape[0], int)}
        return min(sizes) if sizes else None

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
        rows = next((s.dims[0] for s in shapes.values() if s.dims), 0)
        if self.batch and rows % self.batch:
            yield (
                f"{rows:,} rows, and the graph takes exactly {self.batch} in a call: give a multiple of that,"
                " or export the graph with a dynamic batch."
            )

    def unread(self, names: Sequence[str]) -> list[str]:
        """Return which of `names` are no inputs."""
        return [name for name in names if name not in {value.name for value in self.inputs}]

    def feeds(self, arrays: Arrays, begin: int, end: int) -> dict[str, NDArray[Any]]:
        """Return what the graph is fed for the rows from `begin` to before `end`, in its own types."""
        found = {}
        for value in self.inputs:
            whole = arrays.values[value.name]
            part = whole if whole.ndim == 0 else whole[begin:end]
            kind = object if value.dtype == "str" else np.dtype(value.dtype)
            found[value.name] = np.ascontiguousarray(part.astype(kind, copy=False)).reshape(part.shape)
        return found


def _misfit(value: Value, shape: Shape) -> str | None:
    """Say why an array of this type and shape is no input `value`, or None."""
    if shape.dtype != value.dtype and shape.dtype not in _FITTING.get(value.dtype, ()):
        return f"the graph takes {value.described()}. Convert it: array.astype('{value.dtype}')."
    if value.shape is None:
        return None
    sizes = zip(value.shape[1:], shape.dims[1:], strict=False)
    fixed = all(not isinstance(said, int) or said == size for said, size in sizes)
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
        raise InputError(f"{path}: not what this version of smelt reads: {error}") from error


def write_signature(folder: Path, signature: Signature) -> None:
    """Write `signature` into `folder`."""
    write_json(folder / FILE, signature.model_dump(mode="json"))
