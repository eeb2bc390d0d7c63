"""Do the outputs of a row depend on the other rows of its call? Asked in a process of its own, with limits.

An `If` on a sum over the batch does that, and batch norm in training mode.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.core.messages import Message, warning
from smelt.core.rows.arrays import Arrays
from smelt.runtime.foreign.limits import FailedError, ask
from smelt.runtime.foreign.signature import Signature
from smelt.runtime.foreign.trial import limits_for, read_feeds, write_feeds

# Rows that are run together: of an `If` on their sum, 1 in 128 draws of 8 takes the same branch for all.
ROWS = 8
_FAR = 1e-2  # of an output's standard deviation, root mean square
_ROUNDED = 2e-3  # of its size, which halves with a large mean are off by
_OTHERS = 0.25  # share of the whole numbers: a choice between equals may be another one
_DYNAMIC = "DynamicQuantize"  # how these round depends on all rows of a call, as all know


def batch_warnings(
    graph: Path, signature: Signature, rows: Arrays, details: Mapping[str, Any]
) -> list[Message]:
    """Return the outputs of a row that depend on the other rows of its call, by the first of `rows`.

    Nothing is said of graphs that draw random numbers, that quantize by what is in a call, whose batch is
    fixed, or that cannot be run on several rows.

    Args:
        graph: its file.
        signature: its inputs and outputs, with the axes of the rows.
        rows: of which the first are run together and one by one.
        details: what is known of the graph: its operators, those that draw random numbers.
    """
    operators = [*details.get("operators", {}), *details.get("inner_operators", {})]
    rounds_by_call = any(name.startswith(_DYNAMIC) for name in operators)
    if signature.batch is not None or details.get("random") or rounds_by_call or rows.rows < 2:
        return []
    found = _asked(graph, signature, signature.feeds(rows, 0, min(ROWS, rows.rows)))
    if not found:
        return []
    names = ", ".join(f"'{name}' ({how})" for name, how in found.items())
    return [
        warning(
            "outputs-depend-on-batch",
            f"Outputs of a row depend on the other rows of the batch: {names}, between {min(ROWS, rows.rows)}"
            " rows together and one by one. So do scores and predictions. Run it row by row (score:"
            f" {{batch_size: 1}} in a recipe, --batch-size 1 of a command), or export it in inference mode"
            " (model.eval()).",
        )
    ]


def _asked(graph: Path, signature: Signature, feeds: Mapping[str, NDArray[Any]]) -> dict[str, str]:
    with TemporaryDirectory(prefix="smelt-") as folder:
        axes = {value.name: value.axis for value in (*signature.inputs, *signature.outputs)}
        said = [str(graph), *write_feeds(Path(folder), feeds), json.dumps(axes)]
        try:
            found: dict[str, str] = ask(__name__, said, limits_for(graph, dict(feeds)))
        except FailedError:  # what several rows need is no matter of a first look
            return {}
    return found


def answer(arguments: Sequence[str]) -> dict[str, str]:
    """Return the outputs that depend on the rows of a call, each with how much.

    arguments: the graph's file, that of the rows, the names of its inputs and the axes of all, as JSON.
    """
    from smelt.runtime.backends.onnx_session import open_session

    feeds, axes = read_feeds(*arguments[1:3]), json.loads(arguments[3])
    count = next(v.shape[axes[n]] for n, v in feeds.items() if v.ndim and axes[n] is not None)
    try:
        session = open_session(Path(arguments[0]), threads=1)
        outputs = [output.name for output in session.get_outputs()]
        together = dict(zip(outputs, session.run(None, feeds), strict=True))
        alone = []
        for at in range(count):
            one = {n: v if axes[n] is None or not v.ndim else v.take([at], axes[n]) for n, v in feeds.items()}
            alone.append(dict(zip(outputs, session.run(None, one), strict=True)))
    except MemoryError:
        raise
    except Exception:  # ONNX Runtime's share no other base; that it fails on several rows is told elsewhere
        return {}
    found = {name: _differs(together[name], [one[name] for one in alone], axes.get(name)) for name in outputs}
    return {name: how for name, how in found.items() if how is not None}


def _differs(together: NDArray[Any], alone: Sequence[NDArray[Any]], axis: int | None) -> str | None:
    """Return how far rows are off that were run alone; None where they are not, or it cannot be known."""
    if axis is None or any(one.ndim <= axis or one.shape[axis] != 1 for one in alone):
        return None
    try:
        apart = np.concatenate(alone, axis)
    except ValueError:  # of other sizes
        return None
    if apart.shape != together.shape or not apart.size:
        return None
    if together.dtype.kind != "f":
        share = float(np.mean(together != apart))
        return f"{100 * share:.0f} % of its values are others" if share >= _OTHERS else None
    return _off(together.astype(np.float64), apart.astype(np.float64))


def _off(together: NDArray[Any], apart: NDArray[Any]) -> str | None:
    both = np.isfinite(together) & np.isfinite(apart)
    odd = float(np.mean(np.isfinite(together) != np.isfinite(apart)))
    if odd >= _OTHERS:
        return f"{100 * odd:.0f} % of its values are finite in one of the two alone"
    if not both.any():
        return None
    a, b = together[both], apart[both]
    off, size, spread = (float(np.sqrt(np.mean(v**2))) for v in (a - b, b, b - b.mean()))
    if off <= max(_FAR * spread, _ROUNDED * size):
        return None
    return f"{off / (spread or size or 1.0):.2g} of its standard deviation apart"
