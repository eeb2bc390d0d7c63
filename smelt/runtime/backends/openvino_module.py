"""Imports OpenVINO, opens graphs in it, and sets the options of its CPU plugin. API: OpenVINO 2026."""

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

OPENVINO_INSTALL = "pip install 'openvino>=2026'"
_MISSING = (
    f"OpenVINO is not installed: {OPENVINO_INSTALL}. To continue without it, mark the step `optional: true`,"
    " or use target: ort-cpu."
)
_OLDEST = 2026
_TELEMETRY = "openvino_telemetry"
# values of `dtype` -> OpenVINO's
OPENVINO_PRECISIONS = {"fp32": "f32", "bf16": "bf16"}
# graph metadata: block size of int8 activations; missing or 0: none
ACTIVATION_BLOCKS = "smelt.activation_blocks"


def has_openvino() -> bool:
    """Return whether the package is installed, without importing it."""
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
        with _without_telemetry():
            module = importlib.import_module("openvino")
    except (ImportError, OSError, RuntimeError) as error:
        raise MissingDependencyError(
            f"openvino is installed but cannot be loaded: {error}. {OPENVINO_INSTALL}",
            code="broken-installation",
        ) from error
    found = release_version(module)
    if int(found.split(".", maxsplit=1)[0]) < _OLDEST:
        raise InputError(
            f"OpenVINO {found} is installed; smelt needs {_OLDEST} or newer. {OPENVINO_INSTALL}",
            code="outdated-package",
        )
    return module


@contextmanager
def _without_telemetry() -> Iterator[None]:
    """Hide `openvino_telemetry` from the first import of openvino.

    That import sends an event to Google Analytics, and writes to ~/intel, wherever that package is installed
    (openvino/tools/ovc/__init__.py, 2026.4). Where it is missing, openvino uses its own stub. smelt sends no
    data from any machine. An earlier import of openvino is not changed.
    """
    if "openvino" in sys.modules or _TELEMETRY in sys.modules:
        yield
        return
    sys.modules[_TELEMETRY] = None  # type: ignore[assignment]  # an import of it then fails
    try:
        yield
    finally:
        del sys.modules[_TELEMETRY]


def release_version(module: Any) -> str:
    """Return the release, for example 2026.4.1, of a version such as 2026.4.1-22982-e213a147257-..."""
    return str(module.__version__).split("-", maxsplit=1)[0]


@cache
def has_bf16() -> bool:
    """Return whether OpenVINO lists bf16 among the supported types on this processor."""
    core = import_openvino().Core()
    return "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def cpu_plugin_options(dtype: str, threads: int | None, block_size: int = 0) -> dict[str, Any]:
    """Return the CPU plugin's options to compute in `dtype` with `threads` threads.

    One call at a time gets all threads: calls of several threads queue. Threads are not pinned to cores,
    where they would compete with those of other runtimes that are timed too. No cache of compiled graphs is
    written, since CACHE_DIR is not set.

    Args:
        dtype: fp32 or bf16. It must be set: by default OpenVINO uses bf16 where the processor has it.
        threads: None for OpenVINO's default.
        block_size: block size of activations that become int8 for quantized weights; 0: none.
    """
    options: dict[str, Any] = {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "ENABLE_CPU_PINNING": False,
        "INFERENCE_PRECISION_HINT": OPENVINO_PRECISIONS[dtype],
        # The attention that it compiles itself (2026.4.1, AVX-512) is wrong from 16 keys on, in bf16 not even
        # finite, once it was called with one key, as a first step is. Nothing was slower without it.
        "SNIPPETS_MODE": "DISABLE",
        # by default activations that meet compressed weights become int8, whatever the precision
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": block_size,
    }
    return options if threads is None else options | {"INFERENCE_NUM_THREADS": threads}


def compile_graph(path: Path, dtype: str, threads: int | None) -> Any:
    """Read and compile the graph `path` for the CPU; return OpenVINO's CompiledModel.

    Raises:
        InputError: OpenVINO cannot read the file, or does not support one of its operators.
    """
    core = import_openvino().Core()
    try:
        model = core.read_model(path)
        return core.compile_model(
            model, "CPU", cpu_plugin_options(dtype, threads, _activation_block_size(model))
        )
    except Exception as error:  # RuntimeError and openvino's own, which share no base
        raise InputError(
            f"{path}: OpenVINO cannot load this graph: {_error_cause(error)} Export it again: run the onnx"
            " stage with target: openvino.",
            code="unopened-graph",
        ) from error


def _activation_block_size(model: Any) -> int:
    """Return the block size of a graph's int8 activations from its metadata; 0 where it has none."""
    said = ["framework", ACTIVATION_BLOCKS]  # where OpenVINO keeps the metadata of an ONNX file
    return int(model.get_rt_info(said).value) if model.has_rt_info(said) else 0


def _error_cause(error: BaseException) -> str:
    """Return the message of an OpenVINO error, without the source locations at its beginning."""
    lines = [line.strip() for line in str(error).splitlines()]
    told = [line for line in lines if line and not line.startswith(("Exception from", "Check '"))]
    return " ".join(told or lines)[:600]
