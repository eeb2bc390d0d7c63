"""Opening a graph in ONNX Runtime with a provider of TensorRT.

ONNX Runtime goes on without a provider that does not load, and prints that it does; here that is an error.
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
from smelt.runtime.backends.device import cuda_gpus
from smelt.runtime.backends.onnx_session import MAKE_AGAIN, WHOLE_ACTIVATIONS, cuda_provider
from smelt.runtime.backends.ort_tensorrt.cache import cache_home, empty, engine_cache
from smelt.runtime.backends.ort_tensorrt.provider import (
    RTX,
    TENSORRT,
    Provider,
    linked_with,
    onnxruntime_here,
    provider_library,
    rtx_library,
    rtx_packages,
    tensorrt_files,
    tensorrt_packages,
)
from smelt.runtime.backends.ort_tensorrt.told import Told
from smelt.runtime.backends.tensorrt_sidecar import hash_of_graph

_LOCK = threading.Lock()  # around what is done once in a process


def open_session(provider: Provider, path: Path, told: Told, threads: int | None = None) -> Any:
    """Open the graph `path` with `provider`; the first time engines are built, which may take minutes.

    Raises:
        InputError: it is not the graph that `told` is about, or the provider cannot build it.
        MissingDependencyError: the provider does not load.
    """
    found = hash_of_graph(path)
    if found != told.sha256:
        raise InputError(
            f"{path}: not the graph that provider.json was written for. {MAKE_AGAIN}", code="changed-file"
        )
    folder = engine_cache(made_for(provider, found, told.options))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry(*WHOLE_ACTIVATIONS)  # of what TensorRT leaves to ONNX Runtime
    if threads is not None:
        options.intra_op_num_threads = threads
    if provider is RTX:
        return _open_rtx(path, told.options, folder, options)
    return _open_tensorrt(path, told.options, folder, options)


def made_for(provider: Provider, graph: str, options: Mapping[str, str]) -> dict[str, Any]:
    """Return all that an engine depends on, JSON-able."""
    # a library on the loader's path may be of another version than the package that is installed
    library = "" if provider is RTX else "".join(str(path.resolve()) for path in _libraries()[:1])
    return {
        "provider": provider.name,
        "graph_sha256": graph,
        "options": dict(options),
        "onnxruntime": onnxruntime_here(),
        "tensorrt": rtx_packages() if provider is RTX else tensorrt_packages(),
        "library": library,
        "gpus": [list(gpu) for gpu in cuda_gpus()],
    }


def with_caches(options: Mapping[str, str], folder: Path | None, graph: str) -> dict[str, str]:
    """Return the options of TensorRT's provider with what this machine adds: engines and timings are kept.

    Args:
        options: of `provider.json`.
        folder: of the engines, None where nothing can be kept.
        graph: its name, with which the names of its engines begin.
    """
    if folder is None:
        return dict(options)
    kept = dict(options) | {
        "trt_engine_cache_enable": "True",
        "trt_engine_cache_path": str(folder),
        "trt_engine_cache_prefix": graph,
    }
    if options.get("trt_timing_cache_enable") == "True":
        kept["trt_timing_cache_path"] = str(cache_home())  # of kernels, so that all graphs share them
    return kept


def _open_tensorrt(path: Path, options: Mapping[str, str], folder: Path | None, given: Any) -> Any:
    if TENSORRT.name not in onnxruntime.get_available_providers():
        raise MissingDependencyError(
            f"{path}: this ONNX Runtime ({onnxruntime.__version__}) has no {TENSORRT.name}: pip install"
            " 'onnxruntime-gpu[cuda,cudnn]', and not onnxruntime beside it.",
            code="not-installed",
        )
    _load_libraries()
    providers: list[Any] = [
        (TENSORRT.name, with_caches(options, folder, path.stem)), cuda_provider(),
        "CPUExecutionProvider",
    ]  # fmt: skip
    return _opened(path, given, providers, TENSORRT)


def _load_libraries() -> None:
    """Load CUDA, cuDNN and TensorRT from their packages, where the loader would not look for them."""
    with _LOCK:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints what it does not find
            onnxruntime.preload_dlls()
        for library in _libraries():
            try:
                ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            except OSError as error:
                raise MissingDependencyError(
                    f"{library}: cannot be loaded: {error}", code="broken-installation"
                ) from error


def _libraries() -> list[Path]:
    library = provider_library()
    linked = linked_with(library) if library is not None else None
    return (tensorrt_files(linked.tensorrt) or []) if linked is not None else []


def _open_rtx(path: Path, options: Mapping[str, str], folder: Path | None, given: Any) -> Any:
    """Open it with the plug-in: from the compiled graph that an earlier call has left, or anew."""
    devices = rtx_devices()
    if not devices:
        raise MissingDependencyError(
            f"{path}: {RTX.name} finds no GPU that it takes (GeForce RTX 30xx and newer); `smelt doctor` says"
            " what is here.",
            code="no-gpu",
        )
    told = dict(options)
    compiled = None if folder is None else folder / f"{path.stem}_ctx.onnx"
    if folder is not None:
        told["nv_runtime_cache_path"] = str(folder / "kernels")
    given.add_provider_for_devices(devices[:1], told)
    if compiled is not None and compiled.is_file():
        try:
            return _opened(compiled, given, None, RTX)
        except InputError:  # half written, say; it is made again below
            assert folder is not None
            empty(folder)
    if compiled is not None:
        given.add_session_config_entry("ep.context_enable", "1")
        given.add_session_config_entry("ep.context_file_path", str(compiled))
        given.add_session_config_entry("ep.context_embed_mode", "0")  # protobuf ends at 2 GB
    return _opened(path, given, None, RTX)


def rtx_devices() -> list[Any]:
    """Register the plug-in, once in a process; return the devices that it takes.

    Raises:
        MissingDependencyError: it is not installed, or cannot be loaded.
    """
    with _LOCK:
        try:
            if not any(device.ep_name == RTX.name for device in onnxruntime.get_ep_devices()):
                onnxruntime.register_execution_provider_library(RTX.name, rtx_library())
        except ModuleNotFoundError as error:
            raise MissingDependencyError(
                f"{RTX.name} is not installed: pip install onnxruntime-ep-nv-tensorrt-rtx.",
                code="not-installed",
            ) from error
        except Exception as error:  # its error classes share no base but Exception
            if "already registered" not in str(error):
                raise MissingDependencyError(
                    f"{RTX.name} is installed but cannot be loaded: {error}. It needs NVIDIA's driver with"
                    " CUDA 13 and ONNX Runtime 1.24 or newer.",
                    code="broken-installation",
                ) from error
        return [device for device in onnxruntime.get_ep_devices() if device.ep_name == RTX.name]


def _opened(path: Path, given: Any, providers: list[Any] | None, wanted: Provider) -> Any:
    try:
        session = onnxruntime.InferenceSession(str(path), given, providers=providers, enable_fallback=0)
    except Exception as error:  # its error classes share no base but Exception
        if "Please install TensorRT libraries" in str(error):
            raise MissingDependencyError(
                f"{path}: {wanted.name} does not load: {error}", code="broken-installation"
            ) from error
        raise InputError(
            f"{path}: {wanted.title} cannot open this graph: {error} {MAKE_AGAIN}", code="unopened-graph"
        ) from error
    if wanted.name not in session.get_providers():  # it warns, and goes on without the provider
        raise MissingDependencyError(
            f"{path}: ONNX Runtime opened this graph without {wanted.name}, whose libraries do not load."
            " `smelt doctor` says what is missing.",
            code="broken-installation",
        )
    return session
