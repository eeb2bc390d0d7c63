"""Detects sample axes by calling the graph: permuted inputs give outputs in the same order.

Runs in a separate process, with resource limits.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.core.errors import InputError
from smelt.data.npz_arrays import SampleAxes, read_npz
from smelt.runtimes.third_party.isolated_process import IsolatedProcessError, run_isolated
from smelt.runtimes.third_party.signature import GraphSignature
from smelt.runtimes.third_party.trial_run import read_feeds, trial_limits, write_feeds

_ROWS = 3
_NEAR = 1e-3


def detect_output_axes(
    graph: Path, signature: GraphSignature, file: Path, axes: SampleAxes
) -> dict[str, list[int] | None] | None:
    """Return by output the axes that may hold the samples; None where it has none of their number.

    An empty list: an axis has as many entries as there are samples, but does not follow their order. None
    instead of the dict: the graph cannot be run so, or one sample is not enough.

    Args:
        graph: its file.
        signature: its inputs and outputs.
        file: samples, of which the first are used.
        axes: of every input.
    """
    known = signature.with_batch_axes(axes)
    try:
        arrays = read_npz(file, axes=known.input_batch_axes)
        size = known.fixed_batch_size or min(_ROWS, arrays.num_samples)
        if size < 2 or arrays.num_samples < 2:
            return None
        feeds = known.make_feeds(arrays.padded_to(size), 0, size)
        with TemporaryDirectory(prefix="smelt-") as folder:
            arguments = [
                str(graph),
                *write_feeds(Path(folder), feeds),
                json.dumps([size, known.input_batch_axes]),
            ]
            found: dict[str, list[int] | None] | None = run_isolated(
                __name__, arguments, trial_limits(graph, feeds)
            )
    except (InputError, IsolatedProcessError, ValueError):  # reported by the plan and the run
        return None
    return found


def subprocess_main(arguments: Sequence[str]) -> dict[str, list[int] | None] | None:
    """Run a graph on samples in two orders; see `detect_output_axes`.

    arguments: its file, that of the samples, the names of the inputs, and the number of samples with their
    axes.
    """
    from smelt.runtimes.onnx_session import open_onnx_session

    feeds, (size, axes) = read_feeds(*arguments[1:3]), json.loads(arguments[3])
    random = np.random.default_rng(0)
    of_rows = {name for name, value in feeds.items() if value.ndim and axes[name] is not None}
    feeds = {n: _with_distinct_rows(v, axes[n], random) if n in of_rows else v for n, v in feeds.items()}
    turned = {n: np.roll(v, 1, axes[n]) if n in of_rows else v for n, v in feeds.items()}
    try:
        session = open_onnx_session(Path(arguments[0]), threads=1)
        names = [output.name for output in session.get_outputs()]
        first, second = (session.run(names, inputs) for inputs in (feeds, turned))
    except MemoryError:
        raise
    except Exception:  # ONNX Runtime's exceptions have no other common base
        return None
    return {name: _permuted_axes(a, b, size) for name, a, b in zip(names, first, second, strict=True)}


def _with_distinct_rows(value: NDArray[Any], axis: int, random: np.random.Generator) -> NDArray[Any]:
    """Return numbers whose rows differ: a state is often 0 in all of them."""
    rows = np.moveaxis(value, axis, 0).reshape(value.shape[axis], -1)
    if value.dtype.kind != "f" or len(np.unique(rows, axis=0)) == len(rows):
        return value
    return (value + random.normal(size=value.shape)).astype(value.dtype)


def _permuted_axes(first: NDArray[Any], second: NDArray[Any], size: int) -> list[int] | None:
    """Return the axes on which `second` is `first` shifted by one row."""
    places = [axis for axis, length in enumerate(first.shape) if length == size]
    if not places:
        return None
    return [axis for axis in places if _is_close(np.roll(first, 1, axis), second)]


def _is_close(first: NDArray[Any], second: NDArray[Any]) -> bool:
    if first.shape != second.shape or first.dtype.kind != "f":
        return np.array_equal(first, second)
    a, b = first.astype(np.float64), second.astype(np.float64)
    finite = np.isfinite(a)
    scale = float(np.abs(a[finite]).max(initial=0.0))
    return bool(np.allclose(a, b, rtol=_NEAR, atol=_NEAR * scale, equal_nan=True))
