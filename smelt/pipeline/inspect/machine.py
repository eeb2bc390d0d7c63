"""Detect what this machine can run, without importing torch or TensorRT, and measure how fast it is.

The speeds turn the operations of a step into seconds. They are measured in a process of its own, because it
imports torch: the blocks of a transformer at several widths (forward, with gradients, one token), matrix
products, decompositions, element-wise operations, the calls of torch, and a file in the folder of the store.
The result is kept in ~/.cache/smelt/speeds for a day.

Computations are measured by the clock and by processor time. The shorter one counts: other work hardly
changes the processor time, which is at most `threads` times the undisturbed time. A measurement that other
work disturbed is repeated; if it stays disturbed, it is not kept.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from smelt.core.artifact import Artifact, Format
from smelt.core.errors import RunError
from smelt.core.files import json_hash, read_hashed_json, seconds_since_written, write_hashed_json
from smelt.core.stage import Settings, Stage
from smelt.core.system import child_environment, install_command, package_problem, python_command
from smelt.evaluate.environment import default_threads, machine_id
from smelt.models.costs import Work
from smelt.runtimes.ort_tensorrt_provider import missing_requirement

_BUILDER_TIMEOUT_SECONDS = 60
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


def artifact_device(artifact: Artifact, requested: str) -> str:
    """Return the device for `artifact` given the requested one (auto, cpu, cuda).

    Raises:
        InputError: cuda is requested but not available.
    """
    from smelt.runtimes.registry import find_runtime

    target = artifact.manifest.details.get("target")
    device = find_runtime(artifact.format, target).device
    if isinstance(device, str):
        return device
    if requested == "cpu" or (requested == "auto" and not has_cuda()):
        return "cpu"
    return device(requested, target)


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


_KEPT_SECONDS = 24 * 3600.0
_TIMEOUT_SECONDS = 300.0
_VERSION = 2  # of the measurement
_TRIALS, _REPEAT_SECONDS = 3, 20.0
WIDTHS = (128, 256, 1024)
_FILE_BYTES = 32 * 2**20
# transformers, accelerate and their modules, which a step imports besides torch; of Python, on every machine.
_MODULE_BYTES = 330e6


@dataclass(frozen=True)
class MachineSpeed:
    """What this machine does in a second, and the memory of an interpreter.

    forward, training, decode: operations of a block a second, by the width of the model. matrix, solver:
    operations a second. moved, read, written: bytes a second. calls: torch operations a second.
    base_bytes: memory of a process that has imported what a step imports. is_disturbed: other work ran.
    """

    forward: Mapping[str, float]
    training: Mapping[str, float]
    decode: Mapping[str, float]
    matrix: float
    solver: float
    moved: float
    read: float
    written: float
    calls: float
    base_bytes: int
    is_disturbed: bool = False

    def seconds(self, work: Work) -> float:
        """Return the seconds of `work`."""
        return sum(amount / self._per_second(unit, width) for (unit, width), amount in work.amounts.items())

    def _per_second(self, unit: str, width: int) -> float:
        if unit == "seconds":
            return 1.0
        value: Mapping[str, float] | float = getattr(self, unit)
        return _interpolated(value, width) if isinstance(value, Mapping) else float(value)


def _interpolated(by_width: Mapping[str, float], width: int) -> float:
    """Return the speed at a width between the measured ones, on a logarithmic scale; beyond, the nearest."""
    measured_speeds = sorted((int(name), speed) for name, speed in by_width.items())
    for (low, low_speed), (high, high_speed) in itertools.pairwise(measured_speeds):
        if low <= width <= high:
            weight = math.log(width / low) / math.log(high / low)
            return float(low_speed ** (1 - weight) * high_speed**weight)
    return measured_speeds[0][1] if width < measured_speeds[0][0] else measured_speeds[-1][1]


def machine_speed(threads: int | None, folder: Path, again: bool = False) -> MachineSpeed:
    """Return the speeds of this machine with a number of threads; measured if the kept ones are too old.

    Those that other work disturbed are not kept.

    Args:
        threads: of torch; None: torch's default.
        folder: an existing folder on the disk of the store.
        again: whether to measure in any case.

    Raises:
        RunError: the measurement failed (`speed-not-measured`).
    """
    count = threads or default_threads()
    names = {"machine": machine_id(), "threads": count, "version": _VERSION, "disk": folder.stat().st_dev}
    file = _cache_folder() / "smelt" / "speeds" / f"{json_hash(names)[:32]}.json"
    if not again and seconds_since_written(file) < _KEPT_SECONDS:
        try:
            return MachineSpeed(**(read_hashed_json(file) or {}))
        except TypeError:
            pass  # damaged: measured again
    speed = _measure_in_process(count, folder)
    if not speed.is_disturbed:
        with suppress(OSError):  # a home that cannot be written to: measured every time
            file.parent.mkdir(parents=True, exist_ok=True)
            write_hashed_json(file, asdict(speed))
    return speed


def _cache_folder() -> Path:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without a home, as in some containers
        return Path(tempfile.gettempdir())


def _measure_in_process(threads: int, folder: Path) -> MachineSpeed:
    command = python_command("-m", "smelt.pipeline.inspect.machine", str(threads), str(folder))
    try:
        completed = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False,
            # threads that spin while they wait would count as computing
            env=child_environment(OMP_NUM_THREADS=str(threads), OMP_WAIT_POLICY="PASSIVE"),
        )  # fmt: skip
        return MachineSpeed(**json.loads(completed.stdout.splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError, TypeError) as error:
        raise RunError(
            f"The speed of this machine could not be measured: {type(error).__name__}: {error}. Check torch"
            " with `smelt doctor`.",
            code="speed-not-measured",
        ) from error


def measure_speed(threads: int, folder: Path) -> MachineSpeed:
    """Return the speeds of this machine, measured in this process, which should not do anything else.

    A disturbed measurement is repeated, at most twice and not after 20 seconds; if all are disturbed, the
    fastest speeds are returned.
    """
    import psutil
    import torch

    from smelt.evaluate.latency import summary

    base = round(psutil.Process().memory_info().rss + _MODULE_BYTES)
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    resources = summary.ComputeResources(threads, os.cpu_count() or 1)
    trials, deadline = list[MachineSpeed](), time.monotonic() + _REPEAT_SECONDS
    while not trials or (len(trials) < _TRIALS and time.monotonic() < deadline):
        start_counters = summary.read_counters()
        speeds = _compute_speeds()
        lost_share = summary.load_between(start_counters, summary.read_counters()).lost_share(resources)
        write_speed, read_speed = _disk_speeds(folder)
        disturbed = lost_share > summary.MAX_ROUND_LOST_SHARE
        trials.append(
            MachineSpeed(
                **speeds, read=read_speed, written=write_speed, base_bytes=base, is_disturbed=disturbed
            )
        )
        if not disturbed:
            return trials[-1]
    return max(trials, key=lambda speed: speed.matrix)


def _compute_speeds() -> dict[str, Any]:
    """Return the speeds of computations, by the fields of `MachineSpeed`."""
    import torch

    blocks = {width: _block_speeds(width) for width in WIDTHS}
    names = ("forward", "training", "decode")
    by_width = {name: {str(w): speeds[i] for w, speeds in blocks.items()} for i, name in enumerate(names)}
    left_matrix, right_matrix = torch.randn(768, 768), torch.randn(768, 768)
    positive = left_matrix @ left_matrix.T + 768 * torch.eye(768)
    numbers, copy_target, small_tensor = torch.randn(2**23), torch.empty(2**23), torch.ones(4)

    def solve() -> None:
        torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(positive)))

    def call() -> None:
        for _ in range(1000):
            small_tensor.add_(1.0)

    return {
        **by_width,
        "matrix": 2 * 768**3 / _shortest(lambda: left_matrix @ right_matrix),
        "solver": 2 * 768**3 / _shortest(solve),
        "moved": 2 * numbers.nbytes / _shortest(lambda: copy_target.copy_(numbers)),
        "calls": 1000 / _shortest(call),
    }


def _shortest(work: Callable[[], Any], times: int = 3) -> float:
    """Return the shortest time of `work`, or processor time, after one that is not measured."""
    work()
    shortest = math.inf
    for _ in range(times):
        wall_start, cpu_start = time.perf_counter(), time.process_time()
        work()
        shortest = min(shortest, time.perf_counter() - wall_start, time.process_time() - cpu_start)
    return max(shortest, 1e-9)


def _block_speeds(width: int) -> tuple[float, float, float]:
    """Return the operations a second of a block: in a pass, with gradients, and for one token of 8 texts."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    heads, tokens = max(1, width // 64), 24
    norms = [nn.LayerNorm(width) for _ in range(2)]
    query, key, value, out = (nn.Linear(width, width) for _ in range(4))
    up_proj, down_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    parameters = [p for m in (*norms, query, key, value, out, up_proj, down_proj) for p in m.parameters()]

    def block(x: Any) -> Any:
        inputs = norms[0](x)
        projections = (
            layer(inputs).unflatten(-1, (heads, -1)).transpose(1, 2) for layer in (query, key, value)
        )
        x = x + F.dropout(out(F.scaled_dot_product_attention(*projections).transpose(1, 2).flatten(-2)), 0.1)
        return x + F.dropout(down_proj(F.relu(up_proj(norms[1](x)))), 0.1)

    def train(x: Any) -> None:
        for parameter in parameters:
            parameter.grad = None
        block(x).sum().backward()

    train_inputs, decode_inputs = torch.randn(16, tokens, width, requires_grad=True), torch.randn(8, 1, width)
    operations = 16 * tokens * (24 * width**2 + 4 * tokens * width)
    training = 3 * operations / _shortest(lambda: train(train_inputs), 2)
    with torch.no_grad():
        forward = operations / _shortest(lambda: block(train_inputs))
        decode = 8 * (24 * width**2 + 4 * width) / _shortest(lambda: block(decode_inputs), 20)
    return forward, training, decode


def _disk_speeds(folder: Path) -> tuple[float, float]:
    """Return the bytes a second that are written to a file in `folder` and flushed, and read again.

    Where nothing can be written to it, the folder of temporary files is measured.
    """
    name = f".speed-{os.getpid()}"
    try:
        trials = [_disk_trial(folder / name) for _ in range(2)]
    except OSError:
        trials = [_disk_trial(Path(tempfile.gettempdir()) / name) for _ in range(2)]
    write_seconds, read_seconds = (min(times) for times in zip(*trials, strict=True))
    return _FILE_BYTES / max(write_seconds, 1e-9), _FILE_BYTES / max(read_seconds, 1e-9)


def _disk_trial(file: Path) -> tuple[float, float]:
    """Return the seconds of writing and reading `file`, which is removed."""
    content = os.urandom(2**20) * (_FILE_BYTES // 2**20)
    try:
        with file.open("wb") as stream:
            start_time = time.perf_counter()
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
            write_seconds = time.perf_counter() - start_time
            if hasattr(os, "posix_fadvise"):  # so that it is not read from memory
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start_time = time.perf_counter()
        file.read_bytes()
        return write_seconds, time.perf_counter() - start_time
    finally:
        file.unlink(missing_ok=True)


if __name__ == "__main__":
    print(json.dumps(asdict(measure_speed(int(sys.argv[1]), Path(sys.argv[2])))))
