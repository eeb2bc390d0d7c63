"""What this machine can run, asked without importing torch or TensorRT."""

from __future__ import annotations

import ctypes
import sys
from importlib.util import find_spec
from typing import Any

from smelt.core.stage import Stage


def unavailable_reason(stage: type[Stage[Any]]) -> str | None:
    """Say why `stage` cannot run on this machine, or None where nothing speaks against it."""
    if "tensorrt" in stage.needs and not any(find_spec(name) for name in ("tensorrt", "tensorrt_rtx")):
        return "TensorRT is not installed (pip install tensorrt, with an NVIDIA GPU)."
    if stage.needs & {"cuda", "tensorrt"} and not has_cuda():
        return "there is no NVIDIA GPU with a working driver."
    return None


def has_cuda() -> bool:
    """Ask the NVIDIA driver itself for devices; importing torch for that would take seconds."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        count = ctypes.c_int(0)
        return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
    except (OSError, AttributeError):
        return False
