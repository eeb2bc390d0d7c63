"""Opens a graph in ONNX Runtime with a TensorRT provider.

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
    clear_engine_cache,
    engine_cache_folder,
    engine_cache_root,
)
from smelt.runtimes.ort_tensorrt_provider import (
    RTX_PROVIDER,
    TENSORRT_PROVIDER,
    ExecutionProvider,
    find_rtx_plugin,
    find_tensorrt_libraries,
    linked_versions,
    onnxruntime_version,
    provider_library,
    rtx_packages,
    tensorrt_packages,
)
from smelt.runtimes.tensorrt_sidecar import graph_hash

_LOCK = threading.Lock()  # protects what is done once per process


def open_provider_session(
    provider: ExecutionProvider, path: Path, told: ProviderOptions, threads: int | None = None
) -> Any:
    """Open the graph `path` with `provider`; engines are built the first time, which may take minutes.

    Raises:
        InputError: it is not the graph of `told`, or the provider cannot build it.
        MissingDependencyError: the provider does not load.
    """
    found = graph_hash(path)
    if found != told.sha256:
        raise InputError(
            f"{path}: provider.json was written for another graph. {REEXPORT_HINT}", code="changed-file"
        )
    folder = engine_cache_folder(engine_key(provider, found, told.options))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry(*FLOAT_ACTIVATIONS_OPTION)  # for the nodes that TensorRT does not take
    if threads is not None:
        options.intra_op_num_threads = threads
    if provider is RTX_PROVIDER:
        return _open_rtx(path, told.options, folder, options)
    return _open_tensorrt(path, told.options, folder, options)


def engine_key(provider: ExecutionProvider, graph: str, options: Mapping[str, str]) -> dict[str, Any]:
    """Return everything that an engine depends on, JSON-able."""
    # a library on the loader's path may be of another version than the package that is installed
    library = (
        "" if provider is RTX_PROVIDER else "".join(str(path.resolve()) for path in _cuda_libraries()[:1])
    )
    return {
        "provider": provider.name,
        "graph_sha256": graph,
        "options": dict(options),
        "onnxruntime": onnxruntime_version(),
        "tensorrt": rtx_packages() if provider is RTX_PROVIDER else tensorrt_packages(),
        "library": library,
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


def _open_tensorrt(path: Path, options: Mapping[str, str], folder: Path | None, session_options: Any) -> Any:
    if TENSORRT_PROVIDER.name not in onnxruntime.get_available_providers():
        raise MissingDependencyError(
            f"{path}: this ONNX Runtime ({onnxruntime.__version__}) has no {TENSORRT_PROVIDER.name}: pip"
            " install 'onnxruntime-gpu[cuda,cudnn]', without the package onnxruntime.",
            code="not-installed",
        )
    _load_libraries()
    providers: list[Any] = [
        (TENSORRT_PROVIDER.name, with_cache_options(options, folder, path.stem)), cuda_provider_config(),
        "CPUExecutionProvider",
    ]  # fmt: skip
    return _create_session(path, session_options, providers, TENSORRT_PROVIDER)


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


def _open_rtx(path: Path, options: Mapping[str, str], folder: Path | None, session_options: Any) -> Any:
    """Open the graph with the plug-in: from the compiled graph of an earlier call, or compile it."""
    devices = rtx_devices()
    if not devices:
        raise MissingDependencyError(
            f"{path}: {RTX_PROVIDER.name} finds no supported GPU (GeForce RTX 30xx or newer). `smelt"
            " doctor` shows the GPUs of this machine.",
            code="no-gpu",
        )
    told = dict(options)
    compiled = None if folder is None else folder / f"{path.stem}_ctx.onnx"
    if folder is not None:
        told["nv_runtime_cache_path"] = str(folder / "kernels")
    session_options.add_provider_for_devices(devices[:1], told)
    if compiled is not None and compiled.is_file():
        try:
            return _create_session(compiled, session_options, None, RTX_PROVIDER)
        except InputError:  # for example half written; it is compiled again below
            assert folder is not None
            clear_engine_cache(folder)
    if compiled is not None:
        session_options.add_session_config_entry("ep.context_enable", "1")
        session_options.add_session_config_entry("ep.context_file_path", str(compiled))
        session_options.add_session_config_entry("ep.context_embed_mode", "0")  # protobuf ends at 2 GB
    return _create_session(path, session_options, None, RTX_PROVIDER)


def rtx_devices() -> list[Any]:
    """Register the plug-in, once per process; return its supported devices.

    Raises:
        MissingDependencyError: it is not installed, or cannot be loaded.
    """
    with _LOCK:
        try:
            if not any(device.ep_name == RTX_PROVIDER.name for device in onnxruntime.get_ep_devices()):
                onnxruntime.register_execution_provider_library(RTX_PROVIDER.name, find_rtx_plugin())
        except ModuleNotFoundError as error:
            raise MissingDependencyError(
                f"{RTX_PROVIDER.name} is not installed: pip install onnxruntime-ep-nv-tensorrt-rtx.",
                code="not-installed",
            ) from error
        except Exception as error:  # its error classes share no base but Exception
            if "already registered" not in str(error):
                raise MissingDependencyError(
                    f"{RTX_PROVIDER.name} is installed but cannot be loaded: {error}. It needs NVIDIA's"
                    " driver with CUDA 13 and ONNX Runtime 1.24 or newer.",
                    code="broken-installation",
                ) from error
        return [device for device in onnxruntime.get_ep_devices() if device.ep_name == RTX_PROVIDER.name]


def _create_session(
    path: Path, session_options: Any, providers: list[Any] | None, wanted: ExecutionProvider
) -> Any:
    try:
        session = onnxruntime.InferenceSession(
            str(path), session_options, providers=providers, enable_fallback=0
        )
    except Exception as error:  # its error classes share no base but Exception
        if "Please install TensorRT libraries" in str(error):
            raise MissingDependencyError(
                f"{path}: {wanted.name} cannot be loaded: {error}", code="broken-installation"
            ) from error
        raise InputError(
            f"{path}: {wanted.title} cannot load this graph: {error} {REEXPORT_HINT}", code="unopened-graph"
        ) from error
    if wanted.name not in session.get_providers():  # it warns, and continues without the provider
        raise MissingDependencyError(
            f"{path}: ONNX Runtime loaded this graph without {wanted.name}, because its libraries"
            " cannot be loaded. `smelt doctor` shows what is missing.",
            code="broken-installation",
        )
    return session
