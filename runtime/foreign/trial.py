"""One call of a graph on real rows, in a process of its own: what crashes there, crashes nothing else.

A file may look right and still compute an array of a terabyte; so a graph that nobody here has run yet is
first run here.
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
from smelt.core.memory import available_bytes
from smelt.runtime.foreign.limits import FailedError, Limits, ask

_LEAST_BYTES = 1_900_000_000
_SHARE = 0.5  # of the memory that is free
_SECONDS = 120.0


def try_graph(path: Path, feeds: dict[str, NDArray[Any]], origin: str) -> None:
    """Run the graph `path` on `feeds` once; `origin` is how the user calls it.

    Raises:
        InputError: it fails on them, crashes, or takes more memory or time than one call should.
    """
    memory = max(_LEAST_BYTES, int(_SHARE * available_bytes()))
    with TemporaryDirectory(prefix="smelt-") as folder:
        rows = Path(folder, "rows.npz")
        # by place: an input may be called `file`, which numpy.savez has another meaning for
        texts = [value.astype(str) if value.dtype == object else value for value in feeds.values()]
        np.savez(rows, *texts, allow_pickle=False)
        try:
            said = ask(__name__, [str(path), str(rows), json.dumps(list(feeds))], Limits(memory, _SECONDS))
        except FailedError as error:
            raise InputError(f"{origin}: running it on the first rows failed: {error}.") from error
    if said is not None:
        raise InputError(f"{origin}: ONNX Runtime cannot run it on the first rows: {said}")


def answer(arguments: Sequence[str]) -> str | None:
    """Run a graph once; return what is wrong, or None.

    arguments: its file, that of the rows, and the names of the inputs in their order, as JSON.
    """
    from smelt.runtime.backends.onnx_session import open_session

    path, rows = map(Path, arguments[:2])
    try:
        session = open_session(path, threads=1)
        with np.load(rows, allow_pickle=False) as file:
            values = [file[f"arr_{at}"] for at in range(len(file.files))]
        texts = [value.astype(object) if value.dtype.kind == "U" else value for value in values]
        session.run(None, dict(zip(json.loads(arguments[2]), texts, strict=True)))
    except MemoryError:
        raise
    except Exception as error:  # its error classes share no other base
        return " ".join(str(error).split())[:400]
    return None
