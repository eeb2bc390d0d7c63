"""Graphs of artifacts that come from elsewhere are first opened and run in a process of its own, with limits.

A file of some hundred bytes can ask for gigabytes, when it is opened or at its first call. What was tried
once, or was made here, is remembered by its hash and opened at once from then on.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from smelt.core.artifact import Artifact, FileRecord
from smelt.core.errors import InputError
from smelt.core.files import hash_of
from smelt.runtime.backends.tensorrt_sidecar import require_trusted
from smelt.runtime.foreign.limits import FailedError, ask
from smelt.runtime.foreign.trial import limits_for

_KINDS: Mapping[str, Any] = {
    "tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(int8)": np.int8, "tensor(uint8)": np.uint8,
    "tensor(bool)": np.bool_, "tensor(float16)": np.float16, "tensor(double)": np.float64,
    "tensor(string)": object,
}  # fmt: skip


def require_safe(artifact: Artifact, trust_engine: bool = False) -> None:
    """Require that opening a verified artifact runs no code of strangers and stays within limits.

    Args:
        artifact: whose files are those of its manifest (`Artifact.verify`).
        trust_engine: open TensorRT engines that were not built here.

    Raises:
        InputError: `untrusted-engine`, or `unsafe-graph`: opening a graph and calling it on a row of zeros
            took more memory or time than a file of its size should, or crashed.
    """
    require_trusted(artifact.path, trust_engine)
    record = _record(artifact.manifest.files)
    if artifact.format != "onnx" or record.is_file():
        return
    for graph in sorted(artifact.path.glob("*.onnx")):
        try:
            ask(__name__, [str(graph)], limits_for(graph, {}))
        except FailedError as error:
            raise InputError(
                f"{graph}: a first call of this graph failed: {error}. If it came from elsewhere, do not use"
                " it; else run the recipe again to make it anew.",
                code="unsafe-graph",
            ) from error
    note_tried(artifact.manifest.files)


def note_tried(files: Mapping[str, FileRecord]) -> None:
    """Remember, for this user, that graphs with these files were opened, or made here."""
    record = _record(files)
    with contextlib.suppress(OSError):  # without a place to remember, each opening is tried
        record.parent.mkdir(parents=True, exist_ok=True)
        record.touch()


def _record(files: Mapping[str, FileRecord]) -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "smelt" / "graphs" / hash_of(sorted([n, record.sha256] for n, record in files.items()))


def answer(arguments: Sequence[str]) -> None:
    """Open a graph and call it on a row of zeros.

    What ONNX Runtime says besides, such as that these zeros do not fit each other, does not matter here.
    """
    import onnxruntime

    from smelt.runtime.backends.onnx_session import open_session
    from smelt.runtime.foreign.examine import lacks_memory

    onnxruntime.set_default_logger_severity(4)
    try:
        session = open_session(Path(arguments[0]), threads=1)
        feeds = {}
        for value in session.get_inputs():
            shape = [size if isinstance(size, int) else 1 for size in value.shape]
            feeds[value.name] = np.zeros(shape, _KINDS.get(value.type, np.float32))
        session.run(None, feeds)
    except Exception as error:  # ONNX Runtime's share no other base
        if lacks_memory(str(error)):
            raise MemoryError from error
