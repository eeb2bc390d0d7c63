"""Runner of any graph: one call from arrays to arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from smelt.core.errors import InputError, RunError
from smelt.core.stage import Progress, no_progress
from smelt.data.npz_arrays import SampleArrays
from smelt.runtimes.backend import Backend, GraphInterface, ModelGraphs
from smelt.runtimes.runner import MODEL_GRAPH, ModelFiles, Runner, TokenGenerator
from smelt.runtimes.third_party.signature import GraphSignature, read_signature

GraphOutputs = dict[str, NDArray[Any]]


class GraphRunner(Runner):
    """A `Runner` of arrays. signature: inputs and outputs of the graph."""

    graphs: ClassVar[ModelGraphs] = ModelGraphs(
        GraphInterface(MODEL_GRAPH, frozenset(), frozenset()), uses_cache=False
    )
    signature: GraphSignature

    def __init__(self, files: ModelFiles, backend: Backend, generator: TokenGenerator) -> None:
        super().__init__(files, backend, generator)
        self.signature = read_signature(files.folder)

    def run(self, feeds: GraphOutputs) -> GraphOutputs:
        """Return all outputs of one call, by name.

        Raises:
            RunError: the graph fails on these inputs.
        """
        try:
            return self.backend.call(MODEL_GRAPH, feeds)
        except InputError:
            raise
        except Exception as error:  # ONNX Runtime's exceptions have no other common base
            words = " ".join(str(error).split())[:400]
            raise RunError(
                f"{self.folder}: the graph failed on these samples: {words}", code="graph-failed"
            ) from error


def run_batches(
    runner: GraphRunner, arrays: SampleArrays, batch_size: int, progress: Progress = no_progress
) -> Iterator[tuple[int, GraphOutputs]]:
    """Yield the outputs batch by batch, each with its number of samples.

    A graph with a fixed batch size gets as many samples as it takes, by repeating the last one.
    """
    fixed = runner.signature.fixed_batch_size
    size = fixed or batch_size
    for begin in range(0, arrays.num_samples, size):
        end = min(begin + size, arrays.num_samples)
        if fixed and end - begin < fixed:
            found = _run_padded(runner, arrays.select(range(begin, end)), fixed)
        else:
            found = runner.run(runner.signature.make_feeds(arrays, begin, end))
        progress(end, arrays.num_samples, "rows")
        yield end - begin, found


def _run_padded(runner: GraphRunner, arrays: SampleArrays, size: int) -> GraphOutputs:
    """Return the outputs of fewer samples than the graph's fixed batch `size`, by repeating the last one.

    Raises:
        RunError: an output does not have an entry for each sample.
    """
    found = runner.run(runner.signature.make_feeds(arrays.padded_to(size), 0, size))
    axes = {name: output_batch_axis(runner, name, output, size) for name, output in found.items()}
    kept = range(arrays.num_samples)
    return {name: np.take(output, kept, axes[name]) for name, output in found.items()}


def outputs_by_sample(
    runner: GraphRunner, arrays: SampleArrays, batch_size: int, progress: Progress = no_progress
) -> list[GraphOutputs]:
    """Return the outputs of each sample.

    Raises:
        RunError: an output of several samples does not have an entry for each of them.
    """
    found: list[GraphOutputs] = []
    for rows, outputs in run_batches(runner, arrays, batch_size, progress):
        axes = {name: output_batch_axis(runner, name, output, rows) for name, output in outputs.items()}
        for at in range(rows):
            found.append({name: _select_sample(output, at, axes[name]) for name, output in outputs.items()})
    return found


def output_batch_axis(runner: GraphRunner, name: str, output: NDArray[Any], rows: int) -> int | None:
    """Return the sample axis of an output; None where it has none, after a call of one sample.

    Raises:
        RunError: `unclear-rows`, an output of several samples does not have an entry for each of them.
    """
    axis = next((value.axis for value in runner.signature.outputs if value.name == name), 0)
    if axis is not None and axis < output.ndim and output.shape[axis] == rows:
        return axis
    if rows > 1:
        raise RunError(
            f"the output '{name}' is {list(output.shape)} for {rows} samples, so it cannot be divided into"
            f" samples. {_missing_axis_advice(runner, name, output, rows)}",
            code="unclear-rows",
        )
    return None


def _missing_axis_advice(runner: GraphRunner, name: str, output: NDArray[Any], rows: int) -> str:
    """Return the advice about an output without a sample axis."""
    alone = "Run single samples: score: {batch_size: 1} in a recipe, --batch-size 1 on the command line."
    if runner.signature.fixed_batch_size not in (None, 1):
        alone = "Export the graph with a dynamic batch size, or without this output."
    axis = next((at for at, size in enumerate(output.shape) if size == rows), None)
    if axis is None:
        return alone
    named = f"data: {{axes: {{{name}: {axis}}}}}"
    return f"If axis {axis} holds the samples, set {named} in the recipe. Otherwise: {alone}"


def _select_sample(output: NDArray[Any], index: int, axis: int | None) -> NDArray[Any]:
    """Return the part of an output for one sample; all of it where no axis holds the samples."""
    return output if axis is None else np.asarray(np.take(output, index, axis))
