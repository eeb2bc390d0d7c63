"""Run a third-party graph on its first samples, in a separate process that may crash.

A file of some hundred bytes may be valid and request gigabytes, when it is opened or at its first call. So a
new graph, or a third-party artifact, is first opened and run here, with resource limits. Graphs that were
tried once, or created here, are remembered by their hash and later opened directly. Sample axes are detected
the same way: permuted inputs give outputs in the same order.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.core.artifact import Artifact, FileRecord
from smelt.core.errors import InputError
from smelt.core.files import json_hash
from smelt.core.system import (
    IsolatedProcessError,
    ProcessLimits,
    available_bytes,
    raise_memory_limit,
    run_isolated,
)
from smelt.core.workspaces import temporary_workspace
from smelt.data.npz_arrays import SampleAxes, read_npz
from smelt.runtimes.onnx_import.signature import GraphSignature
from smelt.runtimes.tensorrt_engine import require_trusted_engines

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
    with temporary_workspace() as folder:
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
    rows_file = folder / "rows.npz"
    # by index: an input may be called `file`, which numpy.savez has another meaning for
    texts = [value.astype(str) if value.dtype == object else value for value in feeds.values()]
    np.savez(rows_file, *texts, allow_pickle=False)
    return str(rows_file), json.dumps(list(feeds))


def read_feeds(rows: str, names: str) -> dict[str, NDArray[Any]]:
    """Return the arrays written by `write_feeds`."""
    with np.load(rows, allow_pickle=False) as file:
        values = [file[f"arr_{index}"] for index in range(len(file.files))]
    texts = [value.astype(object) if value.dtype.kind == "U" else value for value in values]
    return dict(zip(json.loads(names), texts, strict=True))


def trial_limits(path: Path, feeds: dict[str, NDArray[Any]]) -> ProcessLimits:
    """Return the memory and time limits of one call of the graph in `path` on `feeds`."""
    graph = sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*"))
    input_bytes = sum(value.nbytes for value in feeds.values())
    memory_limit = max(_BASE_BYTES, int(_MEMORY_FRACTION * available_bytes()))
    seconds = _BASE_SECONDS + SECONDS_PER_BYTE * graph + _SECONDS_PER_FED_BYTE * input_bytes
    return ProcessLimits(
        min(memory_limit, _BASE_BYTES + WEIGHT_COPIES * graph + ACTIVATION_FACTOR * input_bytes), seconds
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
    batched_signature = signature.with_batch_axes(axes)
    try:
        arrays = read_npz(file, axes=batched_signature.input_batch_axes)
        size = batched_signature.fixed_batch_size or min(_ROWS, arrays.num_samples)
        if size < 2 or arrays.num_samples < 2:
            return None
        feeds = batched_signature.make_feeds(arrays.padded_to(size), 0, size)
        with temporary_workspace() as folder:
            arguments = [
                str(graph),
                *write_feeds(Path(folder), feeds),
                json.dumps([size, batched_signature.input_batch_axes]),
            ]
            axes_by_output: dict[str, list[int] | None] | None = run_isolated(
                f"{__name__}:run_in_two_orders", arguments, trial_limits(graph, feeds)
            )
    except (InputError, IsolatedProcessError, ValueError):  # reported by the plan and the run
        return None
    return axes_by_output


def runs_in_batches(graph: Path, signature: GraphSignature, file: Path, size: int) -> bool:
    """Return whether a graph runs on the first `size` samples of `file` in one call.

    Args:
        graph: its file.
        signature: its inputs and outputs, with their batch axes.
        file: samples; the last one is repeated if there are fewer.
        size: batch size.
    """
    try:
        arrays = read_npz(file, axes=signature.input_batch_axes)
        trial_run(graph, signature.make_feeds(arrays.padded_to(size), 0, size), graph.name)
    except (InputError, ValueError):
        return False
    return True


def run_in_two_orders(arguments: Sequence[str]) -> dict[str, list[int] | None] | None:
    """Run a graph on samples in two orders; see `detect_output_axes`.

    arguments: its file, that of the samples, the names of the inputs, and the number of samples with their
    axes.
    """
    from smelt.runtimes.onnx_session import open_onnx_session

    feeds, (size, axes) = read_feeds(*arguments[1:3]), json.loads(arguments[3])
    random = np.random.default_rng(0)
    of_rows = {name for name, value in feeds.items() if value.ndim and axes[name] is not None}
    feeds = {n: _with_distinct_rows(v, axes[n], random) if n in of_rows else v for n, v in feeds.items()}
    shifted = {n: np.roll(v, 1, axes[n]) if n in of_rows else v for n, v in feeds.items()}
    try:
        session = open_onnx_session(Path(arguments[0]), threads=1)
        names = [output.name for output in session.get_outputs()]
        first, second = (session.run(names, inputs) for inputs in (feeds, shifted))
    except MemoryError:
        raise
    except Exception:  # ONNX Runtime's exceptions have no other common base
        return None
    return {name: _permuted_axes(a, b, size) for name, a, b in zip(names, first, second, strict=True)}


def _with_distinct_rows(value: NDArray[Any], axis: int, random: np.random.Generator) -> NDArray[Any]:
    """Return numbers whose rows differ: a state is often 0 in all of them."""
    flat_rows = np.moveaxis(value, axis, 0).reshape(value.shape[axis], -1)
    if value.dtype.kind != "f" or len(np.unique(flat_rows, axis=0)) == len(flat_rows):
        return value
    return (value + random.normal(size=value.shape)).astype(value.dtype)


def _permuted_axes(first: NDArray[Any], second: NDArray[Any], size: int) -> list[int] | None:
    """Return the axes on which `second` is `first` shifted by one row."""
    candidate_axes = [axis for axis, length in enumerate(first.shape) if length == size]
    if not candidate_axes:
        return None
    return [axis for axis in candidate_axes if is_close(np.roll(first, 1, axis), second)]


def is_close(first: NDArray[Any], second: NDArray[Any]) -> bool:
    """Return whether outputs are equal, floats up to a thousandth of the value and of the largest one."""
    if first.shape != second.shape or first.dtype.kind != "f":
        return np.array_equal(first, second)
    a, b = first.astype(np.float64), second.astype(np.float64)
    is_finite = np.isfinite(a)
    scale = float(np.abs(a[is_finite]).max(initial=0.0))
    return bool(np.allclose(a, b, rtol=_NEAR, atol=_NEAR * scale, equal_nan=True))


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
        run_isolated(
            f"{__name__}:open_and_run", list(map(str, graphs)), _trial_limits(graphs, artifact.manifest.files)
        )
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
    limits = trial_limits(graphs[0], {})
    return ProcessLimits(
        limits.memory_bytes + WEIGHT_COPIES * weights,
        len(graphs) * (limits.seconds + weights * SECONDS_PER_BYTE),
    )


def open_and_run(arguments: Sequence[str]) -> None:
    """Open graphs and call each on a row of zeros.

    ONNX Runtime's other errors, such as inconsistent zero inputs, do not matter here.
    """
    import onnxruntime

    onnxruntime.set_default_logger_severity(4)
    for path in map(Path, arguments):
        _run_on_zeros(path)


def _run_on_zeros(path: Path) -> None:
    from smelt.runtimes.onnx_session import is_out_of_memory, open_onnx_session

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
