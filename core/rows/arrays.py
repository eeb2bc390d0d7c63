"""Rows that are arrays: an `.npz` file with an array for each input of a graph, a row per place of axis 0.

Nothing is unpickled, and what a file would take of memory is known from its headers before it is read.
"""

from __future__ import annotations

import hashlib
import io
import math
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from smelt.core.errors import InputError, nearest
from smelt.core.files import hash_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SUFFIX = ".npz"
_MEMBER = ".npy"
_LONGEST = 1 << 16  # bytes of a header; numpy itself takes 10,000 letters
_MAKE = "Write it with numpy.savez(FILE, **arrays), an array for each input of the graph."


class Shape(NamedTuple):
    """What the header of an array says. dtype: numpy's word, `float32`; `str` for texts of any length."""

    dtype: str
    dims: tuple[int, ...]
    item_bytes: int = 0


@dataclass(frozen=True)
class Arrays:
    """Arrays by name. Those of rank 0 belong to all rows, the others hold one row per place of axis 0."""

    values: Mapping[str, NDArray[Any]] = field(repr=False)
    rows: int

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over names, types, shapes and values."""
        return hash_of(
            [
                [name, str(v.dtype), list(v.shape), hashlib.sha256(v.tobytes()).hexdigest()]
                for name, v in sorted(self.values.items())
            ]
        )

    def some(self, places: Sequence[int]) -> Arrays:
        """Return the rows at `places`."""
        values = {name: v if v.ndim == 0 else v[list(places)] for name, v in self.values.items()}
        return Arrays(values, len(places))


def read_arrays(path: Path, name: str = "test") -> Arrays:
    """Read all arrays of the `.npz` file `path`; `name` is what the rows are for.

    Raises:
        InputError: no such file, no `.npz`, a broken one, more than the memory holds, objects of Python, or
            arrays with different numbers of rows.
    """
    import numpy as np

    from smelt.core.memory import available_bytes

    shapes = shapes_in(path, name)
    needed, free = sum(s.item_bytes * math.prod(s.dims) for s in shapes.values()), available_bytes()
    if needed > free:
        raise InputError(
            f"{path}: its arrays take {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free."
            " Write fewer rows.",
            code="out-of-memory",
            file=str(path),
        )
    values: dict[str, NDArray[Any]] = {}
    try:
        with zipfile.ZipFile(path) as file:  # numpy.load would take `x` for `x.npy`, where both are there
            for key in shapes:
                with file.open(key + _MEMBER) as stream:
                    values[key] = np.lib.format.read_array(stream, allow_pickle=False)
    except Exception as error:  # those of numpy and of the ways to pack have no other base
        raise InputError(
            f"{path}: cannot be read: {error}. {_MAKE}", code="damaged-file", file=str(path)
        ) from error
    return Arrays(values, rows_of(shapes, path))


def shapes_in(path: Path, name: str = "test") -> dict[str, Shape]:
    """Return the type and shape of each array in `path`, from their headers alone.

    Raises:
        InputError: see `read_arrays`.
    """
    if not path.is_file():
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise InputError(
            f"{path}: no such file (data for '{name}').{nearest(path.name, beside)}",
            code="missing-file",
            file=str(path),
        )
    if path.suffix != SUFFIX:
        raise InputError(
            f"{path}: expected an {SUFFIX} file of the graph's inputs. {_MAKE}",
            code="wrong-format",
            file=str(path),
        )
    found: dict[str, Shape] = {}
    try:
        with zipfile.ZipFile(path) as file:
            for member in file.infolist():
                if member.filename.endswith(_MEMBER):
                    with file.open(member) as stream:
                        found[member.filename.removesuffix(_MEMBER)] = _header(stream, member.filename)
    except InputError as error:
        raise InputError(f"{path}: {error}", code=error.code, file=str(path)) from error
    except Exception as error:  # those of numpy and of the ways to pack have no other base
        raise InputError(
            f"{path}: not an {SUFFIX} file that can be read: {error}. {_MAKE}",
            code="damaged-file",
            file=str(path),
        ) from error
    if not found:
        raise InputError(f"{path}: no arrays in this file. {_MAKE}", code="missing-array", file=str(path))
    rows_of(found, path)
    return found


def rows_of(shapes: Mapping[str, Shape], path: Path) -> int:
    """Return how many rows arrays of these shapes hold.

    Raises:
        InputError: none, or not all as many.
    """
    counts = {name: shape.dims[0] for name, shape in shapes.items() if shape.dims}
    if len(set(counts.values())) > 1:
        said = ", ".join(f"{name} has {rows:,}" for name, rows in counts.items())
        raise InputError(
            f"{path}: all arrays need as many rows (axis 0), but {said}.",
            code="count-mismatch",
            file=str(path),
        )
    rows = next(iter(counts.values()), 0)
    if not rows:
        raise InputError(
            f"{path}: no rows in this file; axis 0 of each array counts them.",
            code="empty-data",
            file=str(path),
        )
    return rows


def _header(stream: Any, name: str) -> Shape:
    import numpy as np

    start = io.BytesIO(stream.read(_LONGEST))  # numpy would read gigabytes, if a header says it has them
    version = np.lib.format.read_magic(start)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    dims, _, dtype = read(start)
    if dtype.hasobject:
        raise InputError(
            f"the array '{name.removesuffix(_MEMBER)}' holds objects of Python, which are never unpickled."
            " Give it a type of numbers, or of texts (dtype=str).",
            code="pickled-objects",
        )
    if any(size < 0 for size in dims):
        raise ValueError(f"the array '{name.removesuffix(_MEMBER)}' has the shape {dims}")
    return Shape(word_of(dtype), tuple(int(size) for size in dims), int(dtype.itemsize))


def word_of(dtype: np.dtype[Any]) -> str:
    """Return numpy's word for a type; `str` for texts."""
    return "str" if dtype.kind in "US" else dtype.name
