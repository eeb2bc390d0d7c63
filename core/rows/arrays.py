"""Rows that are arrays: an `.npz` file with an array for each input of a graph.

In the file the samples are on axis 0 of each array, or on the one that `axes` names; here always on axis 0.

Nothing is unpickled, and what a file would take of memory is known from its headers before it is read.
"""

from __future__ import annotations

import hashlib
import io
import math
import zipfile
from collections.abc import Collection, Mapping, Sequence
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


# Of an array by its name: the axis of its samples; None where it is the same for all of them.
Axes = Mapping[str, int | None]
NO_AXES: Axes = {}


class Shape(NamedTuple):
    """What the header of an array says. dtype: numpy's word, `float32`; `str` for texts of any length."""

    dtype: str
    dims: tuple[int, ...]
    item_bytes: int = 0


@dataclass(frozen=True)
class Arrays:
    """Arrays by name. Those of rank 0 and `shared` belong to all rows; of others axis 0 are the rows.

    values: whatever the graph takes, with the axis of the rows moved to the front.
    """

    values: Mapping[str, NDArray[Any]] = field(repr=False)
    rows: int
    shared: frozenset[str] = frozenset()

    def is_shared(self, name: str) -> bool:
        """Say whether an array belongs to all rows."""
        return name in self.shared or self.values[name].ndim == 0

    @property
    def by_row(self) -> dict[str, NDArray[Any]]:
        """The arrays that have a part for each row, on axis 0."""
        return {name: value for name, value in self.values.items() if not self.is_shared(name)}

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over names, types, shapes and values."""
        return hash_of(
            [
                [name, str(v.dtype), list(v.shape), hashlib.sha256(v.tobytes()).hexdigest()]
                for name, v in sorted(self.values.items())
            ]
        )

    @property
    def row_hashes(self) -> tuple[str, ...]:
        """SHA-256 of what each row holds."""
        parts = [value for _, value in sorted(self.by_row.items())]
        rows = (b"".join(value[at].tobytes() for value in parts) for at in range(self.rows))
        return tuple(hashlib.sha256(row).hexdigest() for row in rows)

    def filled(self, size: int) -> Arrays:
        """Return at least `size` rows: behind the last one that again."""
        lacking = size - self.rows
        return self if lacking <= 0 else self.some([*range(self.rows), *[self.rows - 1] * lacking])

    def some(self, places: Sequence[int]) -> Arrays:
        """Return the rows at `places`."""
        values = {n: v if self.is_shared(n) else v[list(places)] for n, v in self.values.items()}
        return Arrays(values, len(places), self.shared)


def read_arrays(path: Path, name: str = "test", axes: Axes = NO_AXES) -> Arrays:
    """Read arrays of the `.npz` file `path`; `name` is what the rows are for.

    axes: where it names any, other arrays are not read.

    Raises:
        InputError: no such file, no `.npz`, a broken one, more than the memory holds, objects of Python, or
            arrays with different numbers of rows.
    """
    import numpy as np

    from smelt.core.memory import available_bytes

    shapes = {key: shape for key, shape in shapes_in(path, name).items() if not axes or key in axes}
    rows = rows_of(shapes, path, axes)
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
    return arranged(values, rows, axes)


def write_arrays(path: Path, values: Mapping[str, NDArray[Any]]) -> None:
    """Write arrays as an `.npz` file, whatever their names: numpy.savez takes no array called `file`."""
    import numpy as np

    with zipfile.ZipFile(path, "w") as file:
        for name, value in values.items():
            with file.open(name + _MEMBER, "w", force_zip64=True) as stream:
                texts = value.astype(str) if value.dtype == object else value
                np.lib.format.write_array(stream, np.asanyarray(texts), allow_pickle=False)


def arranged(values: Mapping[str, NDArray[Any]], rows: int, axes: Axes) -> Arrays:
    """Return arrays with the axis of their rows moved to the front."""
    import numpy as np

    shared = frozenset(name for name in values if axes.get(name, 0) is None)
    moved = {
        name: np.moveaxis(value, axis, 0) if (axis := axes.get(name, 0)) and value.ndim > axis else value
        for name, value in values.items()
    }
    return Arrays(moved, rows, shared)


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
    return found


def rows_of(
    shapes: Mapping[str, Shape],
    path: Path | str,
    axes: Axes = NO_AXES,
    by_name: Collection[str] = (),
    of_artifact: bool = False,
) -> int:
    """Return how many rows arrays of these shapes hold.

    Args:
        shapes: by array.
        path: where they are, for messages.
        axes: as in `read_arrays`.
        by_name: arrays whose rows the names of the graph's dimensions count together.
        of_artifact: the axes are those of an artifact, which no recipe changes any more.

    Raises:
        InputError: none, or not all as many (`unequal-rows`).
    """
    places = {name: axis for name in shapes if (axis := axes.get(name, 0)) is not None}
    counts = {name: shapes[name].dims[axis] for name, axis in places.items() if axis < len(shapes[name].dims)}
    if len(set(counts.values())) > 1:
        said = ", ".join(f"{n} has {rows:,} (axis {places[n]})" for n, rows in counts.items())
        advice = _elsewhere(shapes, counts, by_name, of_artifact)
        raise InputError(
            f"{path}: all arrays need as many rows, but {said}.{advice}",
            code="unequal-rows",
            file=str(path),
        )
    rows = next(iter(counts.values()), 0)
    if not rows:
        raise InputError(
            f"{path}: no rows in this file; axis 0 of each array counts them, or that in data.axes.",
            code="empty-data",
            file=str(path),
        )
    return rows


def _elsewhere(
    shapes: Mapping[str, Shape], counts: Mapping[str, int], by_name: Collection[str], of_artifact: bool
) -> str:
    """Say what to do where the rows of an array may be on another axis, or it may have none."""
    numbers = list(counts.values())
    rows = max(numbers, key=numbers.count)  # the first of those that are most frequent
    name = next((name for name, count in counts.items() if count != rows), None)
    if name is None:
        return ""
    dims = shapes[name].dims
    axis = next((at for at, size in enumerate(dims) if size == rows), None)
    if axis is None and (name in by_name or of_artifact):
        return " The graph takes one of each for a row: write as many rows of all."
    if axis is not None and of_artifact:
        return f" '{name}' is {list(dims)}; if its rows are on axis {axis}, move them: numpy.moveaxis."
    what = "is the same for all rows" if axis is None else f"has its rows on axis {axis}"
    written = f"data: {{axes: {{{name}: {'null' if axis is None else axis}}}}}"
    return f" '{name}' is {list(dims)}; if it {what}, write {written} into the recipe."


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
