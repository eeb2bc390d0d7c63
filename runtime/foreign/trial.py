"""One call of a graph on real rows, in a process of its own: what crashes there, crashes nothing else.

A file may look right and still compute an array of a terabyte; so a graph that nobody here has run yet is
first run here.
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
from smelt.core.memory import available_bytes
from smelt.runtime.foreign.limits import FailedError, Limits, ask

# A call of a small graph on small rows; a hostile one gets no more.
_BASE_BYTES = 1_900_000_000
_BASE_SECONDS = 12.0
# of a graph's bytes, and of what it is fed: an image of 100 MB is 256 of its size in the layers of a network
COPIES = 5
WIDER = 256
SECONDS_PER_BYTE = 1 / 20e6
_SECONDS_PER_FED_BYTE = 1 / 1e6
_SHARE = 0.5  # of the memory that is free


def try_graph(path: Path, feeds: dict[str, NDArray[Any]], origin: str) -> None:
    """Run the graph `path` on `feeds`, with one thread and with two; `origin` is how the user calls it.

    With two threads ONNX Runtime 1.31 crashes on an int8 product of nothing, with one it does not.

    Raises:
        InputError: it fails on them, crashes, or takes more memory or time than one call should.
    """
    with TemporaryDirectory(prefix="smelt-") as folder:
        try:
            said = ask(__name__, [str(path), *write_feeds(Path(folder), feeds)], limits_for(path, feeds))
        except FailedError as error:
            raise InputError(
                f"{origin}: running it on the first rows failed: {error}.", code="graph-failed"
            ) from error
    if said is not None:
        raise InputError(
            f"{origin}: ONNX Runtime cannot run it on the first rows: {said}", code="graph-failed"
        )


def write_feeds(folder: Path, feeds: Mapping[str, NDArray[Any]]) -> tuple[str, str]:
    """Write what a graph is to be fed into `folder`; return the file and the names, for `read_feeds`."""
    rows = folder / "rows.npz"
    # by place: an input may be called `file`, which numpy.savez has another meaning for
    texts = [value.astype(str) if value.dtype == object else value for value in feeds.values()]
    np.savez(rows, *texts, allow_pickle=False)
    return str(rows), json.dumps(list(feeds))


def read_feeds(rows: str, names: str) -> dict[str, NDArray[Any]]:
    """Return what `write_feeds` wrote."""
    with np.load(rows, allow_pickle=False) as file:
        values = [file[f"arr_{at}"] for at in range(len(file.files))]
    texts = [value.astype(object) if value.dtype.kind == "U" else value for value in values]
    return dict(zip(json.loads(names), texts, strict=True))


def limits_for(path: Path, feeds: dict[str, NDArray[Any]]) -> Limits:
    """Return how much memory and processor time one call of the graph in `path` on `feeds` may take."""
    graph = sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*"))
    fed = sum(value.nbytes for value in feeds.values())
    free = max(_BASE_BYTES, int(_SHARE * available_bytes()))
    seconds = _BASE_SECONDS + SECONDS_PER_BYTE * graph + _SECONDS_PER_FED_BYTE * fed
    return Limits(min(free, _BASE_BYTES + COPIES * graph + WIDER * fed), seconds)


def answer(arguments: Sequence[str]) -> str | None:
    """Run a graph with one thread and with two; return what is wrong, or None.

    arguments: its file, that of the rows, and the names of the inputs in their order, as JSON.
    """
    from smelt.runtime.backends.onnx_session import open_session

    path = Path(arguments[0])
    try:
        feeds = read_feeds(*arguments[1:3])
        for threads in (1, 2):
            session = open_session(path, threads=threads)
            session.run(None, feeds)
            del session  # one copy of the weights at a time
    except MemoryError:
        raise
    except Exception as error:  # its error classes share no other base
        return " ".join(str(error).split())[:400]
    return None
