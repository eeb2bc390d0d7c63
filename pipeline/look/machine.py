"""What this machine can run, asked without importing torch or TensorRT."""

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
from smelt.core.child_process import child_environment, python_command
from smelt.core.packages import how_to_get, package_lack
from smelt.core.stage import Settings, Stage
from smelt.runtime.backends.ort_tensorrt.provider import PROVIDERS, lack_of

_SECONDS_TO_MAKE_A_BUILDER = 60
_DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


def unavailable_reason(
    stage: type[Stage[Any]], target: str | None = None, settings: Settings | None = None
) -> str | None:
    """Say why `stage` cannot run on this machine, or None where nothing speaks against it.

    target: of its settings, if it has one.

    An engine is built where TensorRT finds a GPU, or where it can build ahead of time; to run one is
    another matter: see `unscored_reason`.
    """
    for package, oldest in settings.packages().items() if settings else ():
        if (lack := package_lack(package, oldest)) is not None:
            return f"{lack} ({how_to_get(package, oldest)})."
    if target == "openvino" and find_spec("openvino") is None:
        return "OpenVINO is not installed (pip install 'openvino>=2026')."
    if "tensorrt" in stage.needs and not any(find_spec(name) for name in ("tensorrt", "tensorrt_rtx")):
        return "TensorRT is not installed (pip install 'tensorrt>=11', with an NVIDIA GPU)."
    if has_cuda() or not stage.needs & {"cuda", "tensorrt"}:
        return None
    if "cuda" not in stage.needs and builds_ahead_of_time():
        return None
    return "there is no NVIDIA GPU with a working driver."


def unscored_reason(made: Format, target: str | None = None, dtype: str | None = None) -> str | None:
    """Say why an artifact of the format `made` cannot be run, and so not be scored, on this machine.

    target, dtype: of a graph.
    """
    if made == "onnx" and dtype == "bf16" and target == "tensorrt":
        return "ONNX Runtime runs no bf16 graph of target tensorrt; the engine built from it is scored."
    if made == "onnx" and dtype == "bf16" and target == "ort-cuda" and cuda_lacks() is not None:
        return "scoring a bf16 graph needs ONNX Runtime on CUDA, and there is no such GPU here. It is kept."
    if made == "onnx" and target in PROVIDERS and (lack := lack_of(target)) is not None:
        return (
            f"{lack} The graphs are exported and kept; smelt eval --device cpu scores them without TensorRT."
        )
    if made != "tensorrt" or cuda_lacks() is None:
        return None
    return (
        "scoring needs a CUDA GPU that torch can use, and there is none here. The engine is built and kept;"
        " run the recipe where it will be used, or score it there with smelt eval."
    )


@cache
def builds_ahead_of_time() -> bool:
    """Try whether the installed TensorRT makes a builder though there is no GPU (TensorRT for RTX does).

    In a process of its own: a native library that fails may take its process with it.
    """
    from smelt.runtime.backends.tensorrt_module import find_tensorrt

    name = find_tensorrt()
    if name is None:
        return False
    code = f"import {name} as t; raise SystemExit(0 if t.Builder(t.Logger(t.Logger.ERROR)) else 1)"
    try:
        done = subprocess.run(
            python_command("-c", code),
            capture_output=True, timeout=_SECONDS_TO_MAKE_A_BUILDER, check=False, env=child_environment(),
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0


def cuda_lacks() -> str | None:
    """Say why nothing can be done on CUDA here, or None where nothing that is known speaks against it."""
    if not has_cuda():
        return "there is no NVIDIA GPU with a working driver here (nvidia-smi tells). Set device: cpu."
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


def device_of(artifact: Artifact, wanted: str) -> str:
    """Return where `artifact` is to run when `wanted` (auto, cpu, cuda) is asked for.

    Raises:
        InputError: cuda is asked for and there is none.
    """
    from smelt.runtime.backends.registry import find_runtime

    target = artifact.manifest.details.get("target")
    place = find_runtime(artifact.format, target).place
    if isinstance(place, str):
        return place
    if wanted == "cpu" or (wanted == "auto" and not has_cuda()):
        return "cpu"
    return place(wanted, target)


@cache
def has_cuda() -> bool:
    """Ask the NVIDIA driver itself for devices; importing torch for that would take seconds."""
    try:
        driver = ctypes.CDLL(_DRIVER)
        count = ctypes.c_int(0)
        return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
    except (OSError, AttributeError):
        return False


def trains_on(wanted: str) -> str:
    """Return where training goes when `wanted` (auto, cpu, cuda) is asked for: cpu or cuda."""
    return "cuda" if wanted != "cpu" and cuda_lacks() is None else "cpu"


@cache
def multiplies_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Say whether the processor lists bf16 products, in which `precision: auto` then trains."""
    try:
        words = set(cpuinfo.read_text(encoding="utf-8", errors="replace").split())
    except OSError:  # not Linux: nothing is known
        return False
    return bool(words & {"amx_bf16", "amx_tile", "avx512_bf16"})


@cache
def gpu_names() -> tuple[str, ...]:
    """Return the names of the NVIDIA GPUs, as the driver tells them; engines are made for one of these."""
    if not has_cuda():
        return ()
    driver = ctypes.CDLL(_DRIVER)
    count = ctypes.c_int(0)
    driver.cuDeviceGetCount(ctypes.byref(count))
    names = []
    for ordinal in range(count.value):
        device, text = ctypes.c_int(0), ctypes.create_string_buffer(256)
        driver.cuDeviceGet(ctypes.byref(device), ordinal)
        driver.cuDeviceGetName(text, len(text), device)
        names.append(text.value.decode(errors="replace"))
    return tuple(names)
