"""Third-party artifacts are first opened and run in a separate process, with resource limits.

A file of some hundred bytes can request gigabytes, when it is opened or at its first call. Graphs that were
tried once, or created here, are remembered by their hash and later opened directly.
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
from smelt.core.files import json_hash
from smelt.runtimes.tensorrt_sidecar import require_trusted_engines
from smelt.runtimes.third_party.isolated_process import (
    IsolatedProcessError,
    ProcessLimits,
    raise_memory_limit,
    run_isolated,
)
from smelt.runtimes.third_party.trial_run import (
    ACTIVATION_FACTOR,
    SECONDS_PER_BYTE,
    WEIGHT_COPIES,
    trial_limits,
)

_NUMPY_DTYPES: Mapping[str, Any] = {
    "tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(int8)": np.int8, "tensor(uint8)": np.uint8,
    "tensor(bool)": np.bool_, "tensor(float16)": np.float16, "tensor(double)": np.float64,
    "tensor(string)": object,
}  # fmt: skip


def require_safe_artifact(artifact: Artifact, trust_engine: bool = False) -> None:
    """Require that opening a verified artifact runs no untrusted code and stays within limits.

    Resources used with inputs other than zeros are not checked.

    Args:
        artifact: its files match its manifest (`Artifact.verify`).
        trust_engine: open TensorRT engines that were not built here.

    Raises:
        InputError: `untrusted-engine`, or `unsafe-graph`: opening a graph and calling it on a row of zeros
            took more memory or time than expected for files of its size, or crashed.
    """
    require_trusted_engines(artifact.path, trust_engine)
    graphs = sorted(artifact.path.glob("*.onnx")) if artifact.format == "onnx" else []
    if not graphs or _is_verified(artifact.manifest.files):
        return
    try:
        run_isolated(__name__, list(map(str, graphs)), _trial_limits(graphs, artifact.manifest.files))
    except IsolatedProcessError as error:
        raise InputError(
            f"{artifact.path}: a trial run of the graphs failed: {error}. If the graphs come from an"
            " untrusted source, do not use them; otherwise run the recipe again.",
            code="unsafe-graph",
        ) from error
    record_verified_graphs(artifact.manifest.files)


def record_verified_graphs(files: Mapping[str, FileRecord]) -> None:
    """Remember, for this user, that graphs with these files were opened, or created here."""
    # without a writable folder (no home, or that of another user) each opening is tried
    with contextlib.suppress(OSError, RuntimeError):
        record = _record_path(files)
        record.parent.mkdir(parents=True, exist_ok=True)
        record.touch()


def _is_verified(files: Mapping[str, FileRecord]) -> bool:
    with contextlib.suppress(OSError, RuntimeError):
        return _record_path(files).is_file()
    return False


def _record_path(files: Mapping[str, FileRecord]) -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "smelt" / "graphs" / json_hash(sorted([n, record.sha256] for n, record in files.items()))


def _trial_limits(graphs: Sequence[Path], files: Mapping[str, FileRecord]) -> ProcessLimits:
    """Return the process limits: one graph after the other, whose weights may be in shared files."""
    weights = sum(record.size_bytes for name, record in files.items() if not name.endswith(".json"))
    plain = trial_limits(graphs[0], {})
    return ProcessLimits(
        plain.memory_bytes + WEIGHT_COPIES * weights,
        len(graphs) * (plain.seconds + weights * SECONDS_PER_BYTE),
    )


def subprocess_main(arguments: Sequence[str]) -> None:
    """Open graphs and call each on a row of zeros.

    ONNX Runtime's other errors, such as inconsistent zero inputs, do not matter here.
    """
    import onnxruntime

    onnxruntime.set_default_logger_severity(4)
    for path in map(Path, arguments):
        _run_on_zeros(path)


def _run_on_zeros(path: Path) -> None:
    from smelt.runtimes.onnx_session import open_onnx_session
    from smelt.runtimes.third_party.validate_graph import is_out_of_memory

    try:
        session = open_onnx_session(path, threads=1)
        sizes = {
            i.name: [size if isinstance(size, int) else 1 for size in i.shape] for i in session.get_inputs()
        }
        feeds = {
            i.name: np.zeros(sizes[i.name], _NUMPY_DTYPES.get(i.type, np.float32))
            for i in session.get_inputs()
        }
        raise_memory_limit(ACTIVATION_FACTOR * sum(feed.nbytes for feed in feeds.values()))
        session.run(None, feeds)
    except Exception as error:  # ONNX Runtime's exceptions have no other common base
        if is_out_of_memory(str(error)):
            raise MemoryError from error
