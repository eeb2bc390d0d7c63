"""Finding OpenVINO, opening graphs in it, and what its CPU plugin is told. API: OpenVINO 2026."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError, MissingDependencyError

INSTALL = "pip install 'openvino>=2026'"
_MISSING = (
    f"OpenVINO is not installed: {INSTALL}. To go on without it, mark the step `optional: true`, or give"
    " target: ort-cpu."
)
_OLDEST = 2026
_TELEMETRY = "openvino_telemetry"
# words of `dtype` -> OpenVINO's
PRECISIONS = {"fp32": "f32", "bf16": "bf16"}
# where a graph's metadata say in blocks of how many its activations become int8; unsaid or 0: not at all
ACTIVATION_BLOCKS = "smelt.activation_blocks"


def has_openvino() -> bool:
    """Say whether the package is installed, without importing it."""
    return importlib.util.find_spec("openvino") is not None


def import_openvino() -> Any:
    """Import OpenVINO, without its telemetry.

    Raises:
        MissingDependencyError: it is not installed, or its libraries cannot be loaded.
        InputError: it is older than 2026.
    """
    if not has_openvino():
        raise MissingDependencyError(_MISSING, code="not-installed")
    try:
        with _untold():
            module = importlib.import_module("openvino")
    except (ImportError, OSError, RuntimeError) as error:
        raise MissingDependencyError(
            f"openvino is installed but cannot be loaded: {error}. {INSTALL}", code="broken-installation"
        ) from error
    found = version_of(module)
    if int(found.split(".", maxsplit=1)[0]) < _OLDEST:
        raise InputError(
            f"OpenVINO {found} is installed; smelt needs {_OLDEST} or newer. {INSTALL}",
            code="outdated-package",
        )
    return module


@contextmanager
def _untold() -> Iterator[None]:
    """Let the first import of openvino find no `openvino_telemetry`.

    That import sends an event to Google Analytics, and writes to ~/intel, wherever the package of that name
    is there (openvino/tools/ovc/__init__.py, 2026.4). Where it is not, openvino takes its own stub. smelt
    sends nothing from anybody's machine. Whoever imported openvino before has chosen for themselves.
    """
    if "openvino" in sys.modules or _TELEMETRY in sys.modules:
        yield
        return
    sys.modules[_TELEMETRY] = None  # type: ignore[assignment]  # an import of it then fails
    try:
        yield
    finally:
        del sys.modules[_TELEMETRY]


def version_of(module: Any) -> str:
    """Return the release, for example 2026.4.1, of what is called 2026.4.1-22982-e213a147257-..."""
    return str(module.__version__).split("-", maxsplit=1)[0]


@cache
def has_bf16() -> bool:
    """Say whether OpenVINO counts bf16 among what it computes in on this processor."""
    core = import_openvino().Core()
    return "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def options_of(dtype: str, threads: int | None, blocks: int = 0) -> dict[str, Any]:
    """Return what the CPU plugin is told, so that it computes in `dtype` with so many threads.

    One call at a time gets all threads: calls of several threads queue. Threads are not pinned to cores,
    where they would meet those of other runtimes that are timed beside it. No cache of compiled graphs is
    written, since no CACHE_DIR is named.

    Args:
        dtype: fp32 or bf16. It must be said: by default OpenVINO takes bf16 where the processor has it.
        threads: None for as many as OpenVINO likes.
        blocks: in blocks of how many activations become int8 where they meet codes; 0: not at all.
    """
    options: dict[str, Any] = {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "ENABLE_CPU_PINNING": False,
        "INFERENCE_PRECISION_HINT": PRECISIONS[dtype],
        # The attention that it compiles itself (2026.4.1, AVX-512) is wrong from 16 keys on, in bf16 not even
        # finite, once it was called with one key, as a first step is. Without it nothing took longer.
        "SNIPPETS_MODE": "DISABLE",
        # by default activations that meet compressed weights become int8, whatever the precision
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": blocks,
    }
    return options if threads is None else options | {"INFERENCE_NUM_THREADS": threads}


def compile_graph(path: Path, dtype: str, threads: int | None) -> Any:
    """Read and compile the graph `path` for the CPU; return OpenVINO's CompiledModel.

    Raises:
        InputError: OpenVINO cannot read the file, or does not know one of its operators.
    """
    core = import_openvino().Core()
    try:
        model = core.read_model(path)
        return core.compile_model(model, "CPU", options_of(dtype, threads, _blocks(model)))
    except Exception as error:  # RuntimeError and openvino's own, which share no base
        raise InputError(
            f"{path}: OpenVINO cannot load this graph: {_cause(error)} Run the onnx stage again with"
            " target: openvino.",
            code="unopened-graph",
        ) from error


def _blocks(model: Any) -> int:
    """Return in blocks of how many the activations of a graph are to become int8; 0 where it says nothing."""
    said = ["framework", ACTIVATION_BLOCKS]  # where OpenVINO keeps the metadata of an ONNX file
    return int(model.get_rt_info(said).value) if model.has_rt_info(said) else 0


def _cause(error: BaseException) -> str:
    """Return what an error of OpenVINO says, without the places in its sources that it begins with."""
    lines = [line.strip() for line in str(error).splitlines()]
    told = [line for line in lines if line and not line.startswith(("Exception from", "Check '"))]
    return " ".join(told or lines)[:600]
