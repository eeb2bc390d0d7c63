"""Select a runner's device from the request and the hardware, and set torch's number of threads.

torch has one number of threads for the whole process (and one per thread that set it). The number of the last
opened runner applies; when it is closed, that of the one before it, and after the last one the caller's own
number. A runner that was not closed releases it when it is garbage-collected.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from functools import cache
from typing import Literal, cast

from smelt.core.errors import DeviceWarning, InputError, MissingDependencyError
from smelt.core.process_group import is_distributed
from smelt.core.system import child_environment, python_command

Device = Literal["auto", "cpu", "cuda"]
DeviceType = Literal["cpu", "cuda"]

NO_TORCH_CUDA = (
    "device: cuda was asked for, but torch finds no CUDA device. `smelt doctor` shows what is missing (a"
    " driver, or a CUDA build of torch: https://pytorch.org/get-started/locally); or use device: cpu."
)
NO_ORT_CUDA = (
    "device: cuda was asked for, but this ONNX Runtime cannot load CUDAExecutionProvider: pip install"
    " 'onnxruntime-gpu[cuda,cudnn]' (without the package onnxruntime), or use device: cpu."
)

NO_PROVIDER = (
    "An NVIDIA GPU is available, but ONNX Runtime cannot load its CUDA provider: this graph runs on the CPU."
    " pip install 'onnxruntime-gpu[cuda,cudnn]', or set device: cpu. `smelt doctor` shows what is missing."
)


_SELECTED_GPU = "SMELT_SELECTED_GPU"  # the device that this process or its parent was limited to


def select_gpu(device: str) -> Device:
    """Return `device` without a number; for `cuda:1` only that GPU is visible from now on, also to children.

    Raises:
        InputError: CUDA is in use already, with other GPUs; CUDA_VISIBLE_DEVICES excludes it.
    """
    kind, _, number = device.partition(":")
    if number and os.environ.get(_SELECTED_GPU) != device:
        torch = sys.modules.get("torch")
        if _SELECTED_GPU in os.environ or (torch is not None and torch.cuda.is_initialized()):
            raise InputError(
                f"device: {device}: this process already uses other GPUs. Start Python again, or with"
                f" CUDA_VISIBLE_DEVICES={number} and device: cuda.",
                code="gpu-selected",
                setting="device",
            )
        gpu_id = number
        if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
            gpu_ids = [name for name in visible.split(",") if name not in ("", "-1")]
            if int(number) >= len(gpu_ids):  # never a GPU that was not given to this process
                raise InputError(
                    f"device: {device}: CUDA_VISIBLE_DEVICES={visible} leaves {len(gpu_ids)} GPUs, which are"
                    " numbered from 0. Choose one of them.",
                    code="no-gpu",
                    setting="device",
                )
            gpu_id = gpu_ids[int(number)]
        os.environ |= {"CUDA_VISIBLE_DEVICES": gpu_id, _SELECTED_GPU: device}
    return cast("Device", kind)


def torch_device(requested: str) -> DeviceType:
    """Return torch's device: `cuda` if requested, or with `auto` where torch finds one.

    Raises:
        InputError: cuda is requested and torch finds none.
    """
    if requested == "cpu":
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if requested == "cuda":
        raise InputError(NO_TORCH_CUDA, code="no-gpu")
    return "cpu"


def onnx_device(requested: str, target: str | None) -> DeviceType:
    """Return ONNX Runtime's device: CUDA only for graphs that were exported for it.

    A graph of another target (ort-cpu) runs on the CPU whatever was requested: its operators are fast there.

    With `auto` and a GPU whose provider cannot be loaded (CUDA or cuDNN are missing), it is the CPU, with a
    `DeviceWarning`.

    Raises:
        MissingDependencyError: cuda is requested, the graph is for it, and this ONNX Runtime has no provider.
    """
    if target != "ort-cuda" or requested == "cpu":
        return "cpu"
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers() and cuda_device_count():
        with contextlib.redirect_stdout(io.StringIO()):  # prints missing libraries; the session reports them
            onnxruntime.preload_dlls()  # cuBLAS and cuDNN from their packages, without torch
        if requested == "cuda" or cuda_provider_loads():
            return "cuda"
        warnings.warn(DeviceWarning(NO_PROVIDER), stacklevel=2)
        return "cpu"
    if requested == "cuda":
        raise MissingDependencyError(NO_ORT_CUDA, code="no-cuda-provider")
    return "cpu"


def gpu_index() -> int:
    """Return the GPU of this process: of several processes on a machine each has one of its own."""
    return int(os.environ.get("LOCAL_RANK", "0")) if is_distributed() else 0


@cache
def cuda_provider_loads() -> bool:
    """Return whether ONNX Runtime's CUDA provider loads: it needs CUDA and cuDNN, not only the driver."""
    import onnxruntime
    from onnx import TensorProto, helper

    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "probe", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CUDAExecutionProvider", "CPUExecutionProvider"]
        )
    except Exception:  # its error classes share no base but Exception
        return False
    return "CUDAExecutionProvider" in session.get_providers()


def cuda_device_count() -> int:
    """Return the number of devices of NVIDIA's driver; 0 without a driver. Does not import torch."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    # CUDA Driver API, 6.2 Initialization and 6.5 Device Management; 0 is CUDA_SUCCESS
    error_code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return 0 if error_code else count.value


def list_cuda_gpus() -> tuple[tuple[str, str], ...]:
    """Return name and compute capability ("8.6") of each NVIDIA GPU, as the driver reports them."""
    if not cuda_device_count():
        return ()
    driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    gpus = []
    for ordinal in range(cuda_device_count()):
        device, text = ctypes.c_int(0), ctypes.create_string_buffer(256)
        driver.cuDeviceGet(ctypes.byref(device), ordinal)
        driver.cuDeviceGetName(text, len(text), device)
        numbers = []
        for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
            number = ctypes.c_int(0)
            driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
            numbers.append(str(number.value))
        gpus.append((text.value.decode(errors="replace"), ".".join(numbers)))
    return tuple(gpus)


def cuda_bus_id(ordinal: int) -> str | None:
    """Return the PCI bus id of a device of NVIDIA's driver, such as 0000:0B:00.0; None without the device."""
    if ordinal >= cuda_device_count():
        return None
    driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    device, text = ctypes.c_int(0), ctypes.create_string_buffer(64)
    error_code = driver.cuDeviceGet(ctypes.byref(device), ordinal)
    error_code = error_code or driver.cuDeviceGetPCIBusId(text, len(text), device)
    return None if error_code else text.value.decode(errors="replace")


@cache
def bf16_speedup() -> float:
    """Return how many times as fast as in fp32 a linear layer trains under bf16 autocast on the CPU.

    Measured in another process, on one thread: the minimum processor time of up to five forward and backward
    passes each, which stop after a second. 0.0 where bf16 does not work: some virtual machines list AMX among
    the processor's flags and then stop programs that use it with an illegal instruction (seen on a Xeon),
    which no processor flag predicts. Nor do the flags predict the speed: a Xeon with avx512_bf16 and without
    AMX multiplies bf16 at 0.6 of fp32's speed.
    """
    try:
        probe = subprocess.run(
            python_command("-c", _BF16_PROBE),
            check=False, capture_output=True, text=True, timeout=120, env=child_environment(),
        )  # fmt: skip
        return float(probe.stdout) if probe.returncode == 0 else 0.0
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return 0.0


_BF16_PROBE = """
import time, torch
torch.set_num_threads(1)
x, layer = torch.ones(2048, 256, requires_grad=True), torch.nn.Linear(256, 1024)
def least(bf16):
    times = []
    for _ in range(6):
        begin = time.process_time()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            y = layer(x)
        y.float().sum().backward()
        times.append(time.process_time() - begin)
        if len(times) > 1 and sum(times) > 1:
            break
    return min(times[1:])
fp32 = least(False)
print(fp32 / least(True))
"""


# Reentrant: a runner may be garbage-collected, and release, while the same thread is in here.
_lock = threading.RLock()
_wanted: dict[object, int] = {}  # in the order of opening
_callers: list[int] = []  # the number before the first runner; empty while there is none


class TorchThreads:
    """Sets torch to `count` threads until `release` or the end of the object; None changes nothing."""

    def __init__(self, count: int | None) -> None:
        self.count = count
        if count is None:
            return
        import torch

        token = object()
        with _lock:
            if not _wanted:
                _callers[:] = [torch.get_num_threads()]
            _wanted[token] = count
            torch.set_num_threads(count)
        self._end = weakref.finalize(self, _release_threads, token)
        self._end.atexit = False  # nothing to restore, and torch may be unloaded

    def release(self) -> None:
        """Release the number of threads; a second call does nothing."""
        if self.count is not None:
            self._end()


def _release_threads(token: object) -> None:
    import torch

    with _lock:
        last = next(reversed(_wanted)) is token
        del _wanted[token]
        if last:
            torch.set_num_threads(next(reversed(_wanted.values()), _callers[0]))


@contextlib.contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Let torch use `count` threads inside the context (None: unchanged)."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
