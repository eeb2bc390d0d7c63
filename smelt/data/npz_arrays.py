"""Read samples that are arrays: an `.npz` file with an array for each input of a graph.

In the file the samples are on axis 0 of each array, or on the one that `axes` names; here always on axis 0.
In a folder of `.npz` files each file is a sample: the inputs of a whole call, whose shapes may differ.

Nothing is unpickled, and the memory that a file needs is computed from its headers before it is read.
"""

from __future__ import annotations

import hashlib
import io
import math
import zipfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from smelt.core.errors import InputError, did_you_mean
from smelt.core.files import json_hash

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NPZ_SUFFIX = ".npz"
_NPY_SUFFIX = ".npy"
_MAX_HEADER_BYTES = 1 << 16  # bytes of a header; numpy itself accepts 10,000 characters
_WRITE_HINT = "Write it with numpy.savez(FILE, **arrays), an array for each input of the graph."


# By array: the axis of its samples; None if it is shared by all samples.
SampleAxes = Mapping[str, int | None]
NO_SAMPLE_AXES: SampleAxes = {}


class ArrayHeader(NamedTuple):
    """The header of an array. dtype: numpy's name, such as `float32`; `str` for texts of any length."""

    dtype: str
    shape: tuple[int, ...]
    item_bytes: int = 0


@dataclass(frozen=True)
class SampleArrays:
    """Arrays by name. Those of rank 0 and `shared` belong to all samples; others have samples on axis 0.

    values: inputs of the graph, and arrays that only metrics read (`labels`), with the sample axis moved to
        the front.
    """

    values: Mapping[str, NDArray[Any]] = field(repr=False)
    num_samples: int
    shared: frozenset[str] = frozenset()
    labels: frozenset[str] = frozenset()

    def is_shared(self, name: str) -> bool:
        """Return whether an array belongs to all samples."""
        return name in self.shared or self.values[name].ndim == 0

    @property
    def max_batch_size(self) -> int | None:
        """The largest number of samples in a call; None if there is no limit."""
        return None

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over names, types, shapes and values."""
        content = _content_hash(self.values)
        return json_hash([content, *sorted(self.shared)]) if self.shared else content

    @property
    def sample_hashes(self) -> tuple[str, ...]:
        """SHA-256 of the inputs of each sample."""
        names = [name for name in sorted(self.values) if not self.is_shared(name) and name not in self.labels]
        parts = [self.values[name] for name in names]
        contents = (b"".join(value[index].tobytes() for value in parts) for index in range(self.num_samples))
        return tuple(hashlib.sha256(row).hexdigest() for row in contents)

    def sample(self, index: int) -> dict[str, NDArray[Any]]:
        """Return the arrays of one sample, without the sample axis."""
        return {name: v if self.is_shared(name) else v[index] for name, v in self.values.items()}

    def padded_to(self, size: int) -> SampleArrays:
        """Return at least `size` samples: the last one is repeated."""
        num_missing = size - self.num_samples
        return (
            self
            if num_missing <= 0
            else self.select([*range(self.num_samples), *[self.num_samples - 1] * num_missing])
        )

    def select(self, places: Sequence[int]) -> SampleArrays:
        """Return the samples at `places`."""
        values = {n: v if self.is_shared(n) else v[list(places)] for n, v in self.values.items()}
        return replace(self, values=values, num_samples=len(places))


@dataclass(frozen=True)
class CallArrays(SampleArrays):
    """Samples that are the inputs of a whole call, by name; their shapes may differ.

    names: of the samples' files, without suffix.
    """

    calls: tuple[Mapping[str, NDArray[Any]], ...] = field(default=(), repr=False)
    names: tuple[str, ...] = ()

    @property
    def max_batch_size(self) -> int:
        """One: samples of different shapes cannot share a call."""
        return 1

    def is_shared(self, name: str) -> bool:
        """Return False: every sample has its own arrays."""
        return False

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over names, types, shapes and values."""
        return json_hash(["calls", *(_content_hash(call) for call in self.calls)])

    @property
    def sample_hashes(self) -> tuple[str, ...]:
        """SHA-256 of the inputs of each sample."""
        return tuple(
            _content_hash({name: value for name, value in call.items() if name not in self.labels})
            for call in self.calls
        )

    def sample(self, index: int) -> dict[str, NDArray[Any]]:
        """Return the arrays of one sample."""
        return dict(self.calls[index])

    def padded_to(self, size: int) -> CallArrays:
        """Return the samples: each is a call of its own."""
        return self

    def select(self, places: Sequence[int]) -> CallArrays:
        """Return the samples at `places`."""
        names = [self.names[index] for index in places]
        return call_arrays([self.calls[index] for index in places], names, self.labels)


def call_arrays(
    calls: Sequence[Mapping[str, NDArray[Any]]], names: Sequence[str], labels: Collection[str] = ()
) -> CallArrays:
    """Return samples that are whole calls."""
    return CallArrays({}, len(calls), labels=frozenset(labels), calls=tuple(calls), names=tuple(names))


def _content_hash(arrays: Mapping[str, NDArray[Any]]) -> str:
    return json_hash(
        [
            [name, str(value.dtype), list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
            for name, value in sorted(arrays.items())
        ]
    )


def are_calls(path: Path, axes: SampleAxes = NO_SAMPLE_AXES) -> bool:
    """Return whether samples in `path` are whole calls: those in a folder, or all of a graph without axes."""
    return path.is_dir() or (bool(axes) and all(axis is None for axis in axes.values()))


def call_files(path: Path, name: str = "test") -> list[Path]:
    """Return the `.npz` files of samples that are whole calls, by name; `path` is a folder, or one of them.

    Raises:
        InputError: a folder without such files.
    """
    if not path.is_dir():
        return [path]
    files = sorted(path.glob(f"*{NPZ_SUFFIX}"))
    if not files:
        raise InputError(
            f"{path}: no {NPZ_SUFFIX} file in this folder (data for '{name}'), of which each is a sample.",
            code="empty-data",
            file=str(path),
        )
    return files


def read_samples(
    path: Path, name: str = "test", axes: SampleAxes = NO_SAMPLE_AXES, labels: Collection[str] = ()
) -> SampleArrays:
    """Return the samples in the `.npz` file `path`, or in a folder of such files; arguments as `read_npz`.

    Raises:
        InputError: see `read_npz` and `call_files`.
    """
    if not are_calls(path, axes):
        return read_npz(path, name, axes, labels)
    files = call_files(path, name)
    shapes = [read_npz_headers(file, name) for file in files]
    selected = [{key: shape for key, shape in s.items() if not axes or key in axes} for s in shapes]
    _require_memory(path, [shape for part in selected for shape in part.values()])
    calls = [_read_values(file, list(part)) for file, part in zip(files, selected, strict=True)]
    return call_arrays(calls, [file.stem for file in files], labels)


def read_npz(
    path: Path, name: str = "test", axes: SampleAxes = NO_SAMPLE_AXES, labels: Collection[str] = ()
) -> SampleArrays:
    """Return the arrays of the `.npz` file `path`; `name` is the split, for messages.

    axes: if it names any, other arrays are not read. labels: arrays in `axes` that are no inputs.

    Raises:
        InputError: no such file, not a valid `.npz`, not enough memory, Python objects, or
            arrays with different numbers of samples.
    """
    shapes = {key: shape for key, shape in read_npz_headers(path, name).items() if not axes or key in axes}
    num_samples = count_array_samples(shapes, path, axes)
    _require_memory(path, shapes.values())
    return samples_first(_read_values(path, list(shapes)), num_samples, axes, labels)


def _require_memory(path: Path, shapes: Iterable[ArrayHeader]) -> None:
    from smelt.core.system import available_bytes

    needed, free = sum(s.item_bytes * math.prod(s.shape) for s in shapes), available_bytes()
    if needed > free:
        raise InputError(
            f"{path}: the arrays need {needed / 1e9:.1f} GB of memory, but only {free / 1e9:.1f} GB"
            " are free. Write fewer samples to this file.",
            code="out-of-memory",
            file=str(path),
        )


def _read_values(path: Path, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    import numpy as np

    values: dict[str, NDArray[Any]] = {}
    try:
        with zipfile.ZipFile(path) as file:  # numpy.load would confuse `x` and `x.npy` if both exist
            for key in names:
                with file.open(key + _NPY_SUFFIX) as stream:
                    values[key] = np.lib.format.read_array(stream, allow_pickle=False)
    except Exception as error:  # errors of numpy and of compression have no other common base
        raise InputError(
            f"{path}: cannot be read: {error}. {_WRITE_HINT}", code="damaged-file", file=str(path)
        ) from error
    return values


def write_samples(path: Path, arrays: SampleArrays) -> Path:
    """Write samples for `read_samples`: as the file `path`, or as a folder of that name without suffix."""
    if not isinstance(arrays, CallArrays):
        write_npz(path, arrays.values)
        return path
    folder = path.with_suffix("")
    folder.mkdir()
    for index, call in enumerate(arrays.calls):
        write_npz(folder / f"{index:08}{NPZ_SUFFIX}", call)
    return folder


def write_npz(path: Path, values: Mapping[str, NDArray[Any]]) -> None:
    """Write arrays of any names to an `.npz` file: numpy.savez accepts no array called `file`."""
    import numpy as np

    with zipfile.ZipFile(path, "w") as file:
        for name, value in values.items():
            with file.open(name + _NPY_SUFFIX, "w", force_zip64=True) as stream:
                texts = value.astype(str) if value.dtype == object else value
                np.lib.format.write_array(stream, np.asanyarray(texts), allow_pickle=False)


def samples_first(
    values: Mapping[str, NDArray[Any]], rows: int, axes: SampleAxes, labels: Collection[str] = ()
) -> SampleArrays:
    """Return arrays with the sample axis moved to the front."""
    import numpy as np

    shared = frozenset(name for name in values if axes.get(name, 0) is None)
    moved_arrays = {
        name: np.moveaxis(value, axis, 0) if (axis := axes.get(name, 0)) and value.ndim > axis else value
        for name, value in values.items()
    }
    return SampleArrays(moved_arrays, rows, shared, frozenset(labels))


def read_npz_headers(path: Path, name: str = "test") -> dict[str, ArrayHeader]:
    """Return the type and shape of each array in `path`, from the headers only.

    Raises:
        InputError: see `read_npz`.
    """
    if not path.is_file():
        names = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise InputError(
            f"{path}: no such file (data for '{name}').{did_you_mean(path.name, names)}",
            code="missing-file",
            file=str(path),
        )
    if path.suffix != NPZ_SUFFIX:
        raise InputError(
            f"{path}: expected an {NPZ_SUFFIX} file with the graph's inputs. {_WRITE_HINT}",
            code="wrong-format",
            file=str(path),
        )
    headers: dict[str, ArrayHeader] = {}
    try:
        with zipfile.ZipFile(path) as file:
            for member in file.infolist():
                if member.filename.endswith(_NPY_SUFFIX):
                    with file.open(member) as stream:
                        headers[member.filename.removesuffix(_NPY_SUFFIX)] = _read_header(
                            stream, member.filename
                        )
    except InputError as error:
        raise InputError(f"{path}: {error}", code=error.code, file=str(path)) from error
    except Exception as error:  # errors of numpy and of compression have no other common base
        raise InputError(
            f"{path}: not a readable {NPZ_SUFFIX} file: {error}. {_WRITE_HINT}",
            code="damaged-file",
            file=str(path),
        ) from error
    if not headers:
        raise InputError(
            f"{path}: this file contains no arrays. {_WRITE_HINT}", code="missing-array", file=str(path)
        )
    return headers


def count_array_samples(
    shapes: Mapping[str, ArrayHeader],
    path: Path | str,
    axes: SampleAxes = NO_SAMPLE_AXES,
    by_name: Collection[str] = (),
    of_artifact: bool = False,
) -> int:
    """Return the number of samples in arrays of these shapes.

    Args:
        shapes: by array.
        path: of the file, for messages.
        axes: as in `read_npz`.
        by_name: arrays whose samples are counted together by the names of the graph's dimensions.
        of_artifact: the axes are those of an artifact, which no recipe can change.

    Raises:
        InputError: no samples, or different numbers of samples (`unequal-rows`).
    """
    sample_axes = {name: axis for name in shapes if (axis := axes.get(name, 0)) is not None}
    counts = {
        name: shapes[name].shape[axis] for name, axis in sample_axes.items() if axis < len(shapes[name].shape)
    }
    if len(set(counts.values())) > 1:
        summary = ", ".join(
            f"{n} has {num_samples:,} (axis {sample_axes[n]})" for n, num_samples in counts.items()
        )
        advice = _sample_axis_hint(shapes, counts, by_name, of_artifact)
        raise InputError(
            f"{path}: all arrays must have the same number of samples, but {summary}.{advice}",
            code="unequal-rows",
            file=str(path),
        )
    num_samples = next(iter(counts.values()), 0)
    if not num_samples:
        raise InputError(
            f"{path}: this file has no samples. Samples are counted along axis 0 of each array, or"
            " along the axis set in data.axes.",
            code="empty-data",
            file=str(path),
        )
    return num_samples


def arrays_of_equal_length(shapes: Mapping[str, ArrayHeader], axes: SampleAxes) -> set[str]:
    """Return the arrays that have as many samples on axis 0 as those in `axes`, and those in `axes`."""
    counts = {
        shapes[name].shape[axis]
        for name, axis in axes.items()
        if axis is not None and name in shapes and axis < len(shapes[name].shape)
    }
    return {
        name
        for name, header in shapes.items()
        if name in axes or not counts or not header.shape or header.shape[0] in counts
    }


def _sample_axis_hint(
    shapes: Mapping[str, ArrayHeader], counts: Mapping[str, int], by_name: Collection[str], of_artifact: bool
) -> str:
    """Return what to do if the samples of an array may be on another axis, or it may have none."""
    numbers = list(counts.values())
    num_samples = max(numbers, key=numbers.count)  # the first of the most frequent
    name = next((name for name, count in counts.items() if count != num_samples), None)
    if name is None:
        return ""
    dims = shapes[name].shape
    axis = next((axis_index for axis_index, size in enumerate(dims) if size == num_samples), None)
    if axis is None and (name in by_name or of_artifact):
        return " The graph needs one of each per sample: write the same number of samples of all."
    if axis is not None and of_artifact:
        return f" '{name}' is {list(dims)}; if its samples are on axis {axis}, move them: numpy.moveaxis."
    condition = "is shared by all samples" if axis is None else f"has its samples on axis {axis}"
    setting_text = f"data: {{axes: {{{name}: {'null' if axis is None else axis}}}}}"
    return f" '{name}' is {list(dims)}; if it {condition}, add {setting_text} to the recipe."


def _read_header(stream: Any, name: str) -> ArrayHeader:
    import numpy as np

    start = io.BytesIO(stream.read(_MAX_HEADER_BYTES))  # numpy would allocate any size that a header claims
    version = np.lib.format.read_magic(start)
    read_header = (
        np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    )
    dims, _, dtype = read_header(start)
    if dtype.hasobject:
        raise InputError(
            f"the array '{name.removesuffix(_NPY_SUFFIX)}' contains Python objects, which smelt does"
            " not unpickle. Convert it to numbers, or to strings (dtype=str).",
            code="pickled-objects",
        )
    if any(size < 0 for size in dims):
        raise ValueError(f"the array '{name.removesuffix(_NPY_SUFFIX)}' has the shape {dims}")
    return ArrayHeader(dtype_name(dtype), tuple(int(size) for size in dims), int(dtype.itemsize))


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return numpy's name of a type; `str` for texts."""
    return "str" if dtype.kind in "US" else dtype.name
