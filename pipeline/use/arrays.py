"""What commands do with artifacts of the task `custom`: rows are of an `.npz` file, answers are arrays."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.artifact import Artifact, read_artifact
from smelt.core.data import CUSTOM, Split
from smelt.core.data import Columns as _Columns
from smelt.core.errors import InputError, RunError, together
from smelt.core.messages import mistake
from smelt.core.rows.arrays import (
    SUFFIX,
    Arrays,
    Shape,
    arranged,
    rows_of,
    shapes_in,
    word_of,
    write_arrays,
)
from smelt.core.rows.examples import read_split
from smelt.runtime.foreign.signature import Signature, read_signature

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from smelt.runtime.foreign.runner import GraphRunner


def reads_arrays(folder: Path) -> bool:
    """Say whether the artifact in `folder` takes arrays."""
    return read_artifact(folder).manifest.task == CUSTOM


def read_rows(path: Path | None, artifact: Artifact) -> Split:
    """Read the rows of the `.npz` file `path` for `artifact`.

    Raises:
        InputError: no file is named, or it does not hold the graph's inputs.
    """
    signature = read_signature(artifact.path)
    if path is None:
        names = ", ".join(f"{value.name}=..." for value in signature.inputs)
        raise InputError(
            "this artifact takes arrays and no texts: give --data FILE.npz, written with"
            f" numpy.savez(FILE, {names}).",
            code="missing-data",
        )
    shapes, axes = shapes_in(path), signature.axes
    require_fit(signature, shapes, str(path))
    rows_of({name: shapes[name] for name in axes}, path, axes, of_artifact=True)
    return read_split(str(path), CUSTOM, _Columns(), Path.cwd(), axes=signature.axes)


def require_fit(signature: Signature, shapes: Mapping[str, Shape], origin: str) -> None:
    """Require that arrays of these shapes are rows of the graph's inputs.

    Raises:
        InputError: they are not; every reason, one per line.
    """
    problems = [mistake("does-not-fit-graph", f"{origin}: {text}") for text in signature.problems(shapes)]
    if problems:
        raise together(problems)


def run_rows(runner: GraphRunner, arrays: Arrays, batch_size: int) -> dict[str, NDArray[Any]]:
    """Return the outputs for all rows, those of the batches one after the other.

    Where calls of one row give an output that has no axis of rows, the result has a new axis 0 for them.

    Raises:
        RunError: the graph fails, gives outputs of other sizes for other batches, or an output of several
            rows does not have a part for each of them (`unclear-rows`).
    """
    from smelt.runtime.foreign.runner import batches, row_axis

    parts = list(batches(runner, arrays, batch_size))
    if len(parts) == 1:
        return parts[0][1]
    axes = {
        name: [row_axis(runner, name, found[name], rows) for rows, found in parts] for name in parts[0][1]
    }
    return {name: _joined(name, [p[name] for _, p in parts], axes[name]) for name in axes}


def _joined(name: str, parts: Sequence[NDArray[Any]], axes: Sequence[int | None]) -> NDArray[Any]:
    """Return the parts of an output one after the other, on the axis of its rows or a new one."""
    import numpy as np

    first = parts[0]
    axis = None if None in axes else axes[0]
    shapes = {part.shape if axis is None else part.shape[:axis] + part.shape[axis + 1 :] for part in parts}
    if len(shapes) > 1:
        other = next(part for part in parts if part.shape != first.shape)
        raise RunError(
            f"the output '{name}' is {list(first.shape)} for some rows and"
            f" {list(other.shape)} for others, which cannot be put one after the other. Give fewer rows"
            " in a call, or a larger batch size; `smelt predict` without --out prints each row's.",
            code="shape-mismatch",
        )
    return np.stack(parts) if axis is None else np.concatenate(parts, axis)


def arrays_of(given: Any, signature: Signature) -> Arrays:
    """Return what a caller in Python gave as rows of the graph's inputs.

    Raises:
        InputError: it is no mapping of names to arrays, or does not fit the graph.
    """
    import numpy as np

    if not isinstance(given, Mapping):
        names = ", ".join(f"'{value.name}'" for value in signature.inputs)
        raise InputError(
            f"expected arrays by the names of the inputs ({names}), read {type(given).__name__}.",
            code="wrong-value",
        )
    try:
        values = {str(name): np.asarray(value) for name, value in given.items()}
    except ValueError as error:  # lists of several lengths
        raise InputError(f"not all that was given are arrays: {error}", code="wrong-type") from error
    shapes = {name: Shape(word_of(value.dtype), value.shape) for name, value in values.items()}
    axes = signature.axes
    if not any(value.ndim and value.size for value in values.values()):
        sizes = sorted(len(value) for value in values.values() if value.ndim)
        raise InputError(f"all arrays need as many rows, at least one; read {sizes}.", code="unequal-rows")
    require_fit(signature, shapes, "arrays")
    taken = {name: value for name, value in values.items() if name in axes}
    return arranged(
        taken, rows_of({name: shapes[name] for name in taken}, "arrays", axes, of_artifact=True), axes
    )


@contextlib.contextmanager
def _opened(
    folder: Path, data: Path | None, threads: int | None, device: str
) -> Iterator[tuple[GraphRunner, Arrays]]:
    """Yield a runner of the artifact in `folder`, and its rows in `data`."""
    from smelt.runtime.backends.open_runner import open_runner
    from smelt.runtime.foreign.runner import GraphRunner
    from smelt.runtime.foreign.tried import require_safe

    artifact = read_artifact(folder)
    artifact.verify()
    require_safe(artifact)
    rows = read_rows(data, artifact).arrays
    assert rows is not None
    with open_runner(artifact, threads, device) as runner:
        assert isinstance(runner, GraphRunner)
        yield runner, rows


def predict_to_file(
    folder: Path, data: Path, out: Path, threads: int | None, device: str, batch_size: int
) -> int:
    """Write the graph's outputs for all rows of `data` as the `.npz` file `out`; return how many rows.

    Raises:
        InputError: no artifact there, rows that do not fit it, or `out` is no such file or exists.
    """
    if out.suffix != SUFFIX:
        raise InputError(
            f"--out {out}: outputs are arrays; expected a file name that ends with {SUFFIX}.",
            code="wrong-format",
        )
    if out.exists():
        raise InputError(f"--out {out}: this file exists. Name another, or remove it.", code="out-exists")
    if not out.absolute().parent.is_dir():
        raise InputError(f"--out {out}: there is no folder {out.parent}.", code="missing-folder")
    with _opened(folder, data, threads, device) as (runner, rows):
        found = run_rows(runner, rows, batch_size)
    write_arrays(out, found)
    return rows.rows


def predicted_lines(
    folder: Path,
    data: Path | None,
    as_json: bool,
    threads: int | None,
    device: str,
    batch_size: int,
    texts: bool = False,
) -> Iterator[str]:
    """Yield for each row of `data` what the graph makes of it, as a line of JSON.

    texts: whether texts, or columns of such, were given, which means nothing here.

    Raises:
        InputError: no artifact there, or rows that do not fit it.
    """
    from smelt.runtime.foreign.runner import by_row

    with _opened(folder, None if texts else data, threads, device) as (runner, rows):
        found = by_row(runner, rows, batch_size)
    for at, outputs in enumerate(found, start=1):
        said = {name: value.tolist() for name, value in outputs.items()}
        yield json.dumps({"row": at, "outputs": said} if as_json else said, ensure_ascii=False)
