"""One call of a graph on real samples, in a separate process that may crash.

A file may be valid and still compute an array of a terabyte; so a new third-party graph is first run here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.core.errors import InputError
from smelt.core.system import available_bytes
from smelt.runtimes.third_party.isolated_process import IsolatedProcessError, ProcessLimits, run_isolated

# A call of a small graph on small samples; a hostile one gets no more.
_BASE_BYTES = 1_900_000_000
_BASE_SECONDS = 12.0
# factors of a graph's bytes, and of its inputs: an image of 100 MB is 256 of its size in the layers of a
# network
WEIGHT_COPIES = 5
ACTIVATION_FACTOR = 256
SECONDS_PER_BYTE = 1 / 20e6
_SECONDS_PER_FED_BYTE = 1 / 1e6
_MEMORY_FRACTION = 0.5  # of the free memory


def trial_run(path: Path, feeds: dict[str, NDArray[Any]], origin: str) -> None:
    """Run the graph `path` on `feeds`, with one thread and with two; `origin` is its name in messages.

    With two threads ONNX Runtime 1.31 crashes on an empty int8 matrix multiplication, with one it does not.

    Raises:
        InputError: it fails on them, crashes, or takes too much memory or time for one call.
    """
    with TemporaryDirectory(prefix="smelt-") as folder:
        try:
            failure = run_isolated(
                __name__, [str(path), *write_feeds(Path(folder), feeds)], trial_limits(path, feeds)
            )
        except IsolatedProcessError as error:
            raise InputError(
                f"{origin}: this graph failed on the first samples: {error}.", code="graph-failed"
            ) from error
    if failure is not None:
        raise InputError(
            f"{origin}: ONNX Runtime cannot run this graph on the first samples: {failure}",
            code="graph-failed",
        )


def write_feeds(folder: Path, feeds: Mapping[str, NDArray[Any]]) -> tuple[str, str]:
    """Write the inputs of a graph into `folder`; return the file and the names, for `read_feeds`."""
    rows = folder / "rows.npz"
    # by index: an input may be called `file`, which numpy.savez has another meaning for
    texts = [value.astype(str) if value.dtype == object else value for value in feeds.values()]
    np.savez(rows, *texts, allow_pickle=False)
    return str(rows), json.dumps(list(feeds))


def read_feeds(rows: str, names: str) -> dict[str, NDArray[Any]]:
    """Return the arrays written by `write_feeds`."""
    with np.load(rows, allow_pickle=False) as file:
        values = [file[f"arr_{at}"] for at in range(len(file.files))]
    texts = [value.astype(object) if value.dtype.kind == "U" else value for value in values]
    return dict(zip(json.loads(names), texts, strict=True))


def trial_limits(path: Path, feeds: dict[str, NDArray[Any]]) -> ProcessLimits:
    """Return the memory and time limits of one call of the graph in `path` on `feeds`."""
    graph = sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*"))
    input_bytes = sum(value.nbytes for value in feeds.values())
    free = max(_BASE_BYTES, int(_MEMORY_FRACTION * available_bytes()))
    seconds = _BASE_SECONDS + SECONDS_PER_BYTE * graph + _SECONDS_PER_FED_BYTE * input_bytes
    return ProcessLimits(
        min(free, _BASE_BYTES + WEIGHT_COPIES * graph + ACTIVATION_FACTOR * input_bytes), seconds
    )


def subprocess_main(arguments: Sequence[str]) -> str | None:
    """Run a graph with one thread and with two; return the error, or None.

    arguments: its file, that of the samples, and the names of the inputs in their order, as JSON.
    """
    from smelt.runtimes.onnx_session import open_onnx_session

    path = Path(arguments[0])
    try:
        feeds = read_feeds(*arguments[1:3])
        for threads in (1, 2):
            session = open_onnx_session(path, threads=threads)
            session.run(None, feeds)
            del session  # one copy of the weights at a time
    except MemoryError:
        raise
    except Exception as error:  # its exceptions have no other common base
        return " ".join(str(error).split())[:400]
    return None
