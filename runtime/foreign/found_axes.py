"""Which axes hold the rows, by a call of the graph: rows in another order give outputs in that order.

Asked in a process of its own, with limits.
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
from smelt.core.rows.arrays import Axes, read_arrays
from smelt.runtime.foreign.limits import FailedError, ask
from smelt.runtime.foreign.signature import Signature
from smelt.runtime.foreign.trial import limits_for, read_feeds, write_feeds

_ROWS = 3
_NEAR = 1e-3


def output_axes(
    graph: Path, signature: Signature, file: Path, axes: Axes
) -> dict[str, list[int] | None] | None:
    """Return by output the axes that may hold the rows; None where it has none of their number.

    An empty list: an axis has as many parts as there are rows, and they do not follow these. None instead of
    all: the graph cannot be run so, or one row tells nothing.

    Args:
        graph: its file.
        signature: its inputs and outputs.
        file: rows, of which the first are taken.
        axes: of every input.
    """
    known = signature.with_axes(axes)
    try:
        arrays = read_arrays(file, axes=known.axes)
        size = known.batch or min(_ROWS, arrays.rows)
        if size < 2 or arrays.rows < 2:
            return None
        feeds = known.feeds(arrays.filled(size), 0, size)
        with TemporaryDirectory(prefix="smelt-") as folder:
            said = [str(graph), *write_feeds(Path(folder), feeds), json.dumps([size, known.axes])]
            found: dict[str, list[int] | None] | None = ask(__name__, said, limits_for(graph, feeds))
    except (InputError, FailedError, ValueError):  # the plan and the run tell of it
        return None
    return found


def answer(arguments: Sequence[str]) -> dict[str, list[int] | None] | None:
    """Run a graph on rows in two orders; see `output_axes`.

    arguments: its file, that of the rows, the names of the inputs, and the number of rows with their axes.
    """
    from smelt.runtime.backends.onnx_session import open_session

    feeds, (size, axes) = read_feeds(*arguments[1:3]), json.loads(arguments[3])
    random = np.random.default_rng(0)
    of_rows = {name for name, value in feeds.items() if value.ndim and axes[name] is not None}
    feeds = {n: _told_apart(v, axes[n], random) if n in of_rows else v for n, v in feeds.items()}
    turned = {n: np.roll(v, 1, axes[n]) if n in of_rows else v for n, v in feeds.items()}
    try:
        session = open_session(Path(arguments[0]), threads=1)
        names = [output.name for output in session.get_outputs()]
        first, second = (session.run(names, fed) for fed in (feeds, turned))
    except MemoryError:
        raise
    except Exception:  # ONNX Runtime's share no other base
        return None
    return {name: _axes(a, b, size) for name, a, b in zip(names, first, second, strict=True)}


def _told_apart(value: NDArray[Any], axis: int, random: np.random.Generator) -> NDArray[Any]:
    """Return numbers whose rows differ: a state is often 0 in all of them."""
    rows = np.moveaxis(value, axis, 0).reshape(value.shape[axis], -1)
    if value.dtype.kind != "f" or len(np.unique(rows, axis=0)) == len(rows):
        return value
    return (value + random.normal(size=value.shape)).astype(value.dtype)


def _axes(first: NDArray[Any], second: NDArray[Any], size: int) -> list[int] | None:
    """Return the axes on which `second` is `first`, each row one place further."""
    places = [axis for axis, length in enumerate(first.shape) if length == size]
    if not places:
        return None
    return [axis for axis in places if _near(np.roll(first, 1, axis), second)]


def _near(one: NDArray[Any], other: NDArray[Any]) -> bool:
    if one.shape != other.shape or one.dtype.kind != "f":
        return np.array_equal(one, other)
    a, b = one.astype(np.float64), other.astype(np.float64)
    there = np.isfinite(a)
    scale = float(np.abs(a[there]).max(initial=0.0))
    return bool(np.allclose(a, b, rtol=_NEAR, atol=_NEAR * scale, equal_nan=True))
