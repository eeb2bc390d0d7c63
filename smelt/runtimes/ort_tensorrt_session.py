"""Opens a graph in ONNX Runtime with its TensorRT provider.

ONNX Runtime continues without a provider that does not load, and prints a message; here that is an error.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnxruntime

from smelt.core.errors import InputError, MissingDependencyError
from smelt.runtimes.device import list_cuda_gpus
from smelt.runtimes.onnx_session import FLOAT_ACTIVATIONS_OPTION, REEXPORT_HINT, cuda_provider_config
from smelt.runtimes.ort_tensorrt_options import (
    ProviderOptions,
    engine_cache_folder,
    engine_cache_root,
)
from smelt.runtimes.ort_tensorrt_provider import (
    PROVIDER,
    find_tensorrt_libraries,
    linked_versions,
    onnxruntime_version,
    provider_library,
    tensorrt_packages,
)
from smelt.runtimes.tensorrt_sidecar import graph_hash

_LOCK = threading.Lock()  # protects what is done once per process


def open_provider_session(path: Path, provider_options: ProviderOptions, threads: int | None = None) -> Any:
    """Open the graph `path` with the provider; engines are built the first time, which may take minutes.

    Raises:
        InputError: it is not the graph of `provider_options`, or the provider cannot build it.
        MissingDependencyError: the provider does not load.
    """
    found = graph_hash(path)
    if found != provider_options.sha256:
        raise InputError(
            f"{path}: provider.json was written for another graph. {REEXPORT_HINT}", code="changed-file"
        )
    if PROVIDER not in onnxruntime.get_available_providers():
        raise MissingDependencyError(
            f"{path}: this ONNX Runtime ({onnxruntime.__version__}) has no {PROVIDER}: pip install"
            " 'onnxruntime-gpu[cuda,cudnn]', without the package onnxruntime.",
            code="not-installed",
        )
    folder = engine_cache_folder(engine_key(found, provider_options.options))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry(*FLOAT_ACTIVATIONS_OPTION)  # for the nodes that TensorRT does not take
    if threads is not None:
        options.intra_op_num_threads = threads
    _load_libraries()
    providers: list[Any] = [
        (PROVIDER, with_cache_options(provider_options.options, folder, path.stem)), cuda_provider_config(),
        "CPUExecutionProvider",
    ]  # fmt: skip
    return _create_session(path, options, providers)


def engine_key(graph: str, options: Mapping[str, str]) -> dict[str, Any]:
    """Return everything that an engine depends on, JSON-able."""
    return {
        "provider": PROVIDER,
        "graph_sha256": graph,
        "options": dict(options),
        "onnxruntime": onnxruntime_version(),
        "tensorrt": tensorrt_packages(),
        # a library on the loader's path may be of another version than the package that is installed
        "library": "".join(str(path.resolve()) for path in _cuda_libraries()[:1]),
        "gpus": [list(gpu) for gpu in list_cuda_gpus()],
    }


def with_cache_options(options: Mapping[str, str], folder: Path | None, graph: str) -> dict[str, str]:
    """Return the options of TensorRT's provider with those of this machine: engines and timings are cached.

    Args:
        options: of `provider.json`.
        folder: of the engines, None where nothing can be cached.
        graph: its name, the prefix of its engines' names.
    """
    if folder is None:
        return dict(options)
    kept = dict(options) | {
        "trt_engine_cache_enable": "True",
        "trt_engine_cache_path": str(folder),
        "trt_engine_cache_prefix": graph,
    }
    if options.get("trt_timing_cache_enable") == "True":
        kept["trt_timing_cache_path"] = str(engine_cache_root())  # of kernels, so that all graphs share them
    return kept


def _load_libraries() -> None:
    """Load CUDA, cuDNN and TensorRT from their packages, which the loader does not search."""
    with _LOCK:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints missing libraries
            onnxruntime.preload_dlls()
        for library in _cuda_libraries():
            try:
                ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            except OSError as error:
                raise MissingDependencyError(
                    f"{library}: cannot be loaded: {error}", code="broken-installation"
                ) from error


def _cuda_libraries() -> list[Path]:
    library = provider_library()
    linked = linked_versions(library) if library is not None else None
    return (find_tensorrt_libraries(linked.tensorrt) or []) if linked is not None else []


def _create_session(path: Path, session_options: Any, providers: list[Any]) -> Any:
    try:
        session = onnxruntime.InferenceSession(
            str(path), session_options, providers=providers, enable_fallback=0
        )
    except Exception as error:  # its error classes share no base but Exception
        if "Please install TensorRT libraries" in str(error):
            raise MissingDependencyError(
                f"{path}: {PROVIDER} cannot be loaded: {error}", code="broken-installation"
            ) from error
        raise InputError(
            f"{path}: TensorRT in ONNX Runtime cannot load this graph: {error} {REEXPORT_HINT}",
            code="unopened-graph",
        ) from error
    if PROVIDER not in session.get_providers():  # it warns, and continues without the provider
        raise MissingDependencyError(
            f"{path}: ONNX Runtime loaded this graph without {PROVIDER}, because its libraries"
            " cannot be loaded. `smelt doctor` shows what is missing.",
            code="broken-installation",
        )
    return session
