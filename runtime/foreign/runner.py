"""A graph of any kind: one call from arrays to arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from smelt.core.errors import InputError, RunError
from smelt.core.rows.arrays import Arrays
from smelt.core.stage import Progress, silent
from smelt.runtime.backends.backend import Backend, Graph, Graphs
from smelt.runtime.classifier import MODEL
from smelt.runtime.foreign.signature import Signature, read_signature
from smelt.runtime.runner import Generator, ModelFiles, Runner

Outputs = dict[str, NDArray[Any]]


class GraphRunner(Runner):
    """A `Runner` of rows of arrays. signature: what the graph takes and gives."""

    graphs: ClassVar[Graphs] = Graphs(Graph(MODEL, frozenset(), frozenset()), caches=False)
    signature: Signature

    def __init__(self, files: ModelFiles, backend: Backend, generator: Generator) -> None:
        super().__init__(files, backend, generator)
        self.signature = read_signature(files.folder)

    def run(self, feeds: Outputs) -> Outputs:
        """Return all outputs of one call, by name.

        Raises:
            RunError: the graph cannot compute it.
        """
        try:
            return self.backend.call(MODEL, feeds)
        except InputError:
            raise
        except Exception as error:  # ONNX Runtime's errors share no other base
            words = " ".join(str(error).split())[:400]
            raise RunError(
                f"{self.folder}: the graph failed on these rows: {words}", code="graph-failed"
            ) from error


def batches(
    runner: GraphRunner, arrays: Arrays, batch_size: int, progress: Progress = silent
) -> Iterator[tuple[int, Outputs]]:
    """Yield the outputs of one batch after another, each with the number of its rows.

    A graph whose batch is fixed gets as many rows as it takes: after the last one that again.
    """
    fixed = runner.signature.batch
    size = fixed or batch_size
    for begin in range(0, arrays.rows, size):
        end = min(begin + size, arrays.rows)
        if fixed and end - begin < fixed:
            found = _filled(runner, arrays.some(range(begin, end)), fixed)
        else:
            found = runner.run(runner.signature.feeds(arrays, begin, end))
        progress(end, arrays.rows, "rows")
        yield end - begin, found


def _filled(runner: GraphRunner, arrays: Arrays, size: int) -> Outputs:
    """Return the outputs for fewer rows than the `size` that the graph takes, the last one repeated.

    Raises:
        RunError: an output does not have a part for each row.
    """
    found = runner.run(runner.signature.feeds(arrays.filled(size), 0, size))
    axes = {name: row_axis(runner, name, output, size) for name, output in found.items()}
    kept = range(arrays.rows)
    return {name: np.take(output, kept, axes[name]) for name, output in found.items()}


def by_row(
    runner: GraphRunner, arrays: Arrays, batch_size: int, progress: Progress = silent
) -> list[Outputs]:
    """Return the outputs of each row.

    Raises:
        RunError: an output of several rows does not have a part for each of them.
    """
    found: list[Outputs] = []
    for rows, outputs in batches(runner, arrays, batch_size, progress):
        axes = {name: row_axis(runner, name, output, rows) for name, output in outputs.items()}
        for at in range(rows):
            found.append({name: _row(output, at, axes[name]) for name, output in outputs.items()})
    return found


def row_axis(runner: GraphRunner, name: str, output: NDArray[Any], rows: int) -> int | None:
    """Return the axis of an output that holds its rows; None where it has none, after a call of one row.

    Raises:
        RunError: `unclear-rows`, an output of several rows does not have a part for each of them.
    """
    axis = next((value.axis for value in runner.signature.outputs if value.name == name), 0)
    if axis is not None and axis < output.ndim and output.shape[axis] == rows:
        return axis
    if rows > 1:
        raise RunError(
            f"the output '{name}' is {list(output.shape)} for {rows} rows, so it is not known which part"
            f" belongs to which row. {_instead(runner, name, output, rows)}",
            code="unclear-rows",
        )
    return None


def _instead(runner: GraphRunner, name: str, output: NDArray[Any], rows: int) -> str:
    """Return what to do about an output without an axis of rows."""
    alone = "Run it row by row: score: {batch_size: 1} in a recipe, --batch-size 1 of a command."
    if runner.signature.batch not in (None, 1):
        alone = "Export the graph with a batch of any size, or without this output."
    axis = next((at for at, size in enumerate(output.shape) if size == rows), None)
    if axis is None:
        return alone
    named = f"data: {{axes: {{{name}: {axis}}}}}"
    return f"If axis {axis} holds them, write {named} into the recipe and run it. If none does: {alone}"


def _row(output: NDArray[Any], at: int, axis: int | None) -> NDArray[Any]:
    """Return the part of an output that belongs to one row; all of it where no axis holds the rows."""
    return output if axis is None else np.asarray(np.take(output, at, axis))
