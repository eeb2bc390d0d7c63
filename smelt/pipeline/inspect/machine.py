"""Detect what this machine can run, without importing torch or TensorRT."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from smelt.core.artifact import Artifact, Format
from smelt.core.files import load_json
from smelt.core.system import child_environment, install_command, package_problem, python_command
from smelt.runtimes.ort_tensorrt_provider import missing_requirement
from smelt.stage import Settings, Stage

_BUILDER_TIMEOUT_SECONDS = 60
_GPU_TARGETS = frozenset({"ort-cuda", "tensorrt", "ort-tensorrt"})
_CUDA_DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


def unavailable_reason(
    stage: type[Stage[Any]], target: str | None = None, settings: Settings | None = None
) -> str | None:
    """Return why `stage` cannot run on this machine, or None if it can.

    target: target in its settings, if it has one.

    An engine can be built if TensorRT finds a GPU or can build ahead of time; whether it can run is checked
    by `unscored_reason`.
    """
    for package, oldest in settings.required_packages().items() if settings else ():
        if (problem := package_problem(package, oldest)) is not None:
            return f"{problem} ({install_command(package, oldest)})."
    if target == "openvino" and find_spec("openvino") is None:
        return "OpenVINO is not installed (pip install 'openvino>=2026')."
    if "tensorrt" in stage.needs and not any(find_spec(name) for name in ("tensorrt", "tensorrt_rtx")):
        return "TensorRT is not installed (pip install tensorrt, with an NVIDIA GPU)."
    if has_cuda() or not stage.needs & {"cuda", "tensorrt"}:
        return None
    if "cuda" not in stage.needs and can_build_without_gpu():
        return None
    return "no NVIDIA GPU with a working driver."


def unscored_reason(made_format: Format, target: str | None = None, dtype: str | None = None) -> str | None:
    """Return why an artifact of the format `made_format` cannot be scored on this machine, or None.

    target, dtype: of an ONNX graph.
    """
    if made_format == "onnx" and dtype == "bf16" and target == "tensorrt":
        return "ONNX Runtime runs no bf16 graphs of target tensorrt; the engine built from it is scored."
    if (
        made_format == "onnx"
        and dtype == "bf16"
        and target == "ort-cuda"
        and cuda_missing_reason() is not None
    ):
        return "a bf16 graph needs ONNX Runtime on CUDA, but this machine has no GPU. The graph is kept."
    if made_format == "onnx" and target == "ort-tensorrt" and (problem := missing_requirement()) is not None:
        return f"{problem} The graphs are kept; smelt eval --device cpu scores them without TensorRT."
    if made_format != "tensorrt" or cuda_missing_reason() is None:
        return None
    return (
        "scoring needs a CUDA GPU that torch can use, but this machine has none. The engine is built and"
        " kept; run the recipe on the target machine, or score it there with smelt eval."
    )


@cache
def can_build_without_gpu() -> bool:
    """Return whether TensorRT can create a builder without a GPU (TensorRT for RTX can).

    Tested in a separate process, because a native library may crash its process.
    """
    from smelt.runtimes.tensorrt_engine import find_tensorrt

    name = find_tensorrt()
    if name is None:
        return False
    code = f"import {name} as t; raise SystemExit(0 if t.Builder(t.Logger(t.Logger.ERROR)) else 1)"
    try:
        completed = subprocess.run(
            python_command("-c", code),
            capture_output=True, timeout=_BUILDER_TIMEOUT_SECONDS, check=False, env=child_environment(),
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return False
    return completed.returncode == 0


def cuda_missing_reason() -> str | None:
    """Return why CUDA is not available on this machine, or None if it is."""
    if not has_cuda():
        return "no NVIDIA GPU with a working driver (check nvidia-smi). Set device: cpu."
    try:
        build = version("torch")
    except PackageNotFoundError:
        return None
    if build.endswith("+cpu"):
        return (
            f"this torch ({build}) is built for the CPU only. Choose a CUDA build at"
            " https://pytorch.org/get-started/locally, or set device: cpu."
        )
    return None


def is_deployable(artifact: Artifact, device: str | None) -> bool:
    """Return whether an artifact can be deployed as it was measured.

    Torch simulates quantized layers in float, which is slower: such a step is for scoring and export. The
    times of a graph for GPUs that was measured on the CPU are not those of its runtime.

    Args:
        artifact: any.
        device: where it was measured; None if it was not.
    """
    if artifact.format != "torch":
        return not (artifact.manifest.details.get("target") in _GPU_TARGETS and device == "cpu")
    structure = artifact.path / "structure.json"
    return not structure.is_file() or all(edit["op"] != "quantize" for edit in load_json(structure)["edits"])


def artifact_device(artifact: Artifact, requested: str) -> str:
    """Return the device for `artifact` given the requested one (auto, cpu, cuda).

    Raises:
        InputError: cuda is requested but not available.
    """
    from smelt.runtimes.registry import find_runtime, runtime_target

    details = artifact.manifest.details
    device = find_runtime(artifact.format, details.get("target")).device
    if isinstance(device, str):
        return device
    if requested == "cpu" or (requested == "auto" and not has_cuda()):
        return "cpu"
    return device(requested, runtime_target(details, requested))


@cache
def has_cuda() -> bool:
    """Return whether the NVIDIA driver reports a device, without importing torch, which takes seconds."""
    try:
        driver = ctypes.CDLL(_CUDA_DRIVER)
        count = ctypes.c_int(0)
        return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
    except (OSError, AttributeError):
        return False


def training_device(requested: str) -> str:
    """Return the training device, cpu or cuda, given the requested one (auto, cpu, cuda)."""
    return "cuda" if requested != "cpu" and cuda_missing_reason() is None else "cpu"


@cache
def has_bf16_instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether the CPU has bf16 instructions, so that `precision: auto` trains in bf16."""
    try:
        flags = set(cpuinfo.read_text(encoding="utf-8", errors="replace").split())
    except OSError:  # not Linux
        return False
    return bool(flags & {"amx_bf16", "amx_tile", "avx512_bf16"})


@cache
def gpu_memory_bytes() -> int | None:
    """Return the memory of the smallest NVIDIA GPU by the driver, bytes; None without one."""
    if not has_cuda():
        return None
    driver, count, sizes = ctypes.CDLL(_CUDA_DRIVER), ctypes.c_int(0), list[int]()
    driver.cuDeviceGetCount(ctypes.byref(count))
    for ordinal in range(count.value):
        device, size = ctypes.c_int(0), ctypes.c_size_t(0)
        driver.cuDeviceGet(ctypes.byref(device), ordinal)
        if driver.cuDeviceTotalMem_v2(ctypes.byref(size), device) == 0:
            sizes.append(size.value)
    return min(sizes, default=None)


@cache
def gpu_names() -> tuple[str, ...]:
    """Return the names of the NVIDIA GPUs from the driver; engines are specific to one of these."""
    if not has_cuda():
        return ()
    driver = ctypes.CDLL(_CUDA_DRIVER)
    count = ctypes.c_int(0)
    driver.cuDeviceGetCount(ctypes.byref(count))
    names = []
    for ordinal in range(count.value):
        device, text = ctypes.c_int(0), ctypes.create_string_buffer(256)
        driver.cuDeviceGet(ctypes.byref(device), ordinal)
        driver.cuDeviceGetName(text, len(text), device)
        names.append(text.value.decode(errors="replace"))
    return tuple(names)
