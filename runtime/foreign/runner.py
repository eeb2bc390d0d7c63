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
            raise RunError(f"{self.folder}: the graph failed on these rows: {words}") from error


def batches(
    runner: GraphRunner, arrays: Arrays, batch_size: int, progress: Progress = silent
) -> Iterator[tuple[int, Outputs]]:
    """Yield the outputs of one batch after another, each with the number of its rows.

    A graph whose batch is fixed gets as many rows as it takes.
    """
    size = runner.signature.batch or batch_size
    for begin in range(0, arrays.rows, size):
        end = min(begin + size, arrays.rows)
        found = runner.run(runner.signature.feeds(arrays, begin, end))
        progress(end, arrays.rows, "rows")
        yield end - begin, found


def by_row(
    runner: GraphRunner, arrays: Arrays, batch_size: int, progress: Progress = silent
) -> list[Outputs]:
    """Return the outputs of each row.

    Raises:
        RunError: an output of several rows does not have a part for each of them.
    """
    found: list[Outputs] = []
    for rows, outputs in batches(runner, arrays, batch_size, progress):
        for name, output in outputs.items():
            if rows > 1 and (output.ndim == 0 or len(output) != rows):
                raise RunError(
                    f"{runner.folder}: the output '{name}' is {list(output.shape)} for {rows} rows, so nobody"
                    " can tell what belongs to which row. Give score: {batch_size: 1}, which runs row by row."
                )
        for at in range(rows):
            found.append({name: _row(output, at, rows) for name, output in outputs.items()})
    return found


def _row(output: NDArray[Any], at: int, rows: int) -> NDArray[Any]:
    """Return the part of an output that belongs to one row; of a call of one row all of it."""
    if rows > 1:
        return np.asarray(output[at])
    return np.asarray(output[0]) if output.ndim and len(output) == 1 else output
