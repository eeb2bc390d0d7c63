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
from smelt.runtime.foreign.limits import FailedError, Limits, allow_more, ask
from smelt.runtime.foreign.trial import COPIES, SECONDS_PER_BYTE, WIDER, limits_for

_KINDS: Mapping[str, Any] = {
    "tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(int8)": np.int8, "tensor(uint8)": np.uint8,
    "tensor(bool)": np.bool_, "tensor(float16)": np.float16, "tensor(double)": np.float64,
    "tensor(string)": object,
}  # fmt: skip


def require_safe(artifact: Artifact, trust_engine: bool = False) -> None:
    """Require that opening a verified artifact runs no code of strangers and stays within limits.

    What a graph asks for on other inputs than zeros is not seen.

    Args:
        artifact: whose files are those of its manifest (`Artifact.verify`).
        trust_engine: open TensorRT engines that were not built here.

    Raises:
        InputError: `untrusted-engine`, or `unsafe-graph`: opening a graph and calling it on a row of zeros
            took more memory or time than files of their size should, or crashed.
    """
    require_trusted(artifact.path, trust_engine)
    graphs = sorted(artifact.path.glob("*.onnx")) if artifact.format == "onnx" else []
    if not graphs or _is_known(artifact.manifest.files):
        return
    try:
        ask(__name__, list(map(str, graphs)), _limits(graphs, artifact.manifest.files))
    except FailedError as error:
        raise InputError(
            f"{artifact.path}: a first call of its graphs failed: {error}. If they came from elsewhere, do"
            " not use them; else run the recipe again to make them anew.",
            code="unsafe-graph",
        ) from error
    note_tried(artifact.manifest.files)


def note_tried(files: Mapping[str, FileRecord]) -> None:
    """Remember, for this user, that graphs with these files were opened, or made here."""
    # without a place to remember (no home, one that belongs to another) each opening is tried
    with contextlib.suppress(OSError, RuntimeError):
        record = _record(files)
        record.parent.mkdir(parents=True, exist_ok=True)
        record.touch()


def _is_known(files: Mapping[str, FileRecord]) -> bool:
    with contextlib.suppress(OSError, RuntimeError):
        return _record(files).is_file()
    return False


def _record(files: Mapping[str, FileRecord]) -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "smelt" / "graphs" / hash_of(sorted([n, record.sha256] for n, record in files.items()))


def _limits(graphs: Sequence[Path], files: Mapping[str, FileRecord]) -> Limits:
    """Return what the process may take: one graph after the other, whose weights may be in shared files."""
    weights = sum(record.size_bytes for name, record in files.items() if not name.endswith(".json"))
    plain = limits_for(graphs[0], {})
    return Limits(
        plain.memory_bytes + COPIES * weights, len(graphs) * (plain.seconds + weights * SECONDS_PER_BYTE)
    )


def answer(arguments: Sequence[str]) -> None:
    """Open graphs and call each on a row of zeros.

    What ONNX Runtime says besides, such as that these zeros do not fit each other, does not matter here.
    """
    import onnxruntime

    onnxruntime.set_default_logger_severity(4)
    for path in map(Path, arguments):
        _call(path)


def _call(path: Path) -> None:
    from smelt.runtime.backends.onnx_session import open_session
    from smelt.runtime.foreign.examine import lacks_memory

    try:
        session = open_session(path, threads=1)
        sizes = {
            i.name: [size if isinstance(size, int) else 1 for size in i.shape] for i in session.get_inputs()
        }
        feeds = {
            i.name: np.zeros(sizes[i.name], _KINDS.get(i.type, np.float32)) for i in session.get_inputs()
        }
        allow_more(WIDER * sum(feed.nbytes for feed in feeds.values()))
        session.run(None, feeds)
    except Exception as error:  # ONNX Runtime's share no other base
        if lacks_memory(str(error)):
            raise MemoryError from error
