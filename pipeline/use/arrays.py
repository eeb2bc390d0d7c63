"""What commands do with artifacts of the task `tensors`: rows are of an `.npz` file, answers are arrays."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.artifact import Artifact, read_artifact
from smelt.core.data import TENSORS, Split
from smelt.core.data import Columns as _Columns
from smelt.core.errors import InputError, RunError, together
from smelt.core.messages import mistake
from smelt.core.rows.arrays import Arrays, Shape, word_of
from smelt.core.rows.examples import read_split
from smelt.runtime.foreign.signature import Signature, read_signature

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from smelt.runtime.foreign.runner import GraphRunner


def reads_arrays(folder: Path) -> bool:
    """Say whether the artifact in `folder` takes arrays."""
    return read_artifact(folder).manifest.task == TENSORS


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
    split = read_split(str(path), TENSORS, _Columns(), Path.cwd())
    assert split.arrays is not None
    require_fit(signature, split.arrays, str(path))
    return split


def require_fit(signature: Signature, arrays: Arrays, origin: str) -> None:
    """Require that `arrays` are rows of the graph's inputs.

    Raises:
        InputError: they are not; every reason, one per line.
    """
    shapes = {name: Shape(word_of(v.dtype), v.shape) for name, v in arrays.values.items()}
    problems = [mistake("does-not-fit-graph", f"{origin}: {text}") for text in signature.problems(shapes)]
    if problems:
        raise together(problems)


def run_rows(runner: GraphRunner, arrays: Arrays, batch_size: int) -> dict[str, NDArray[Any]]:
    """Return the outputs for all rows, those of the batches one behind the other.

    Raises:
        RunError: the graph fails, or gives outputs of other sizes for other batches.
    """
    import numpy as np

    from smelt.runtime.foreign.runner import batches

    parts = [found for _, found in batches(runner, arrays, batch_size)]
    if len(parts) == 1:
        return parts[0]
    for name, first in parts[0].items():
        other = next((p[name] for p in parts if p[name].shape[1:] != first.shape[1:]), None)
        if other is not None:
            raise RunError(
                f"{runner.folder}: the output '{name}' is {list(first.shape)} for some rows and"
                f" {list(other.shape)} for others, which cannot be put one behind the other. Give fewer rows"
                " in a call, or a larger batch_size.",
                code="shape-mismatch",
            )
    return {name: np.concatenate([np.atleast_1d(part[name]) for part in parts]) for name in parts[0]}


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
        raise InputError(f"not all that was given are arrays: {error}", code="not-an-array") from error
    counts = {len(value) for value in values.values() if value.ndim}
    if len(counts) != 1 or counts == {0}:
        raise InputError(
            f"all arrays need as many rows (axis 0), at least one; read {sorted(counts)}.",
            code="count-mismatch",
        )
    found = Arrays(values, counts.pop())
    require_fit(signature, found, "arrays")
    return found


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
    from smelt.runtime.backends.open_runner import open_runner
    from smelt.runtime.foreign.runner import by_row
    from smelt.runtime.foreign.tried import require_safe

    artifact = read_artifact(folder)
    artifact.verify()
    require_safe(artifact)
    rows = read_rows(None if texts else data, artifact).arrays
    assert rows is not None
    with open_runner(artifact, threads, device) as runner:
        found = by_row(runner, rows, batch_size)  # type: ignore[arg-type]
    for at, outputs in enumerate(found, start=1):
        said = {name: value.tolist() for name, value in outputs.items()}
        yield json.dumps({"row": at, "outputs": said} if as_json else said, ensure_ascii=False)
