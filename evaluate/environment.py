"""The environment of a run: versions, processor, memory, system, GPU. Imports no heavy package.

`float_dtype` returns the floating-point type of an artifact's weights on disk: sizes are comparable only for
equal types.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from smelt.core.artifact import Artifact
from smelt.core.system import package_versions
from smelt.models.weight_files import read_header, value_count

RECORDED_PACKAGES = (
    "smelt",
    "torch",
    "transformers",
    "onnxruntime-gpu",
    "onnxruntime",
    "onnx",
    "onnxsim",
    "onnxscript",
    "numpy",
    "tensorrt",
    "tensorrt_rtx",
    "openvino",
    "bitsandbytes",
    "sacrebleu",
)


def describe_environment() -> dict[str, Any]:
    """Return the `environment` of report.json; memory in bytes."""
    import psutil

    return {
        "versions": installed_versions(),
        "python": platform.python_version(),
        "cpu": cpu_model(),
        "cores": psutil.cpu_count(logical=False) or os.cpu_count() or 1,
        "logical_cores": os.cpu_count() or 1,
        "memory_bytes": int(psutil.virtual_memory().total),
        "os": operating_system(),
        "gpus": list_gpus(),
    }


def installed_versions() -> dict[str, str]:
    """Return the installed packages of `PACKAGES` with their versions, read from metadata only."""
    return package_versions(RECORDED_PACKAGES)


def machine_id() -> str:
    """Return the identity that two timings must share to be comparable: processor, cores, system, GPUs."""
    names = [gpu["name"] for gpu in list_gpus()]
    parts = [cpu_model(), f"{os.cpu_count()} cores", operating_system(), *names]
    return " | ".join(parts)


@cache
def cpu_model() -> str:
    """Return the processor's name.

    Where the system reports only a family (virtual machines), the family, model and stepping numbers
    are added, so that different processors have different names.
    """
    info = Path("/proc/cpuinfo")
    if info.is_file():
        first = info.read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
        fields = {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in first.splitlines())}
        name = fields.get("model name") or fields.get("Model") or fields.get("CPU part")
        if name:
            model_numbers = [fields[k] for k in ("cpu family", "model", "stepping") if k in fields]
            return f"{name} ({'/'.join(model_numbers)})" if model_numbers else name
    if platform.system() == "Darwin":
        name = _command_output(["sysctl", "-n", "machdep.cpu.brand_string"])
        if name:
            return name
    return platform.processor() or platform.machine() or "unknown"


def physical_cores() -> int:
    """Return the number of physical cores that this process may use."""
    import psutil

    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(psutil.cpu_count(logical=False) or allowed, allowed))


def default_threads() -> int:
    """Return the number of threads that torch uses by default: OMP_NUM_THREADS, else the physical cores."""
    limit = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(limit) if limit.isdecimal() and int(limit) > 0 else physical_cores()


def operating_system() -> str:
    """Return system, release and architecture, for example `Linux 6.8.0 x86_64`."""
    return f"{platform.system()} {platform.release()} {platform.machine()}"


@cache
def _gpu_lines() -> tuple[str, ...]:
    query = [
        "nvidia-smi",
        "--query-gpu=name,memory.total,driver_version,compute_cap",
        "--format=csv,noheader",
    ]
    return tuple(line for line in _command_output(query).splitlines() if line.count(",") == 3)


def list_gpus() -> list[dict[str, str]]:
    """Return name, memory, driver and compute capability of each NVIDIA GPU; empty without nvidia-smi."""
    keys = ("name", "memory", "driver", "compute_capability")
    return [dict(zip(keys, (part.strip() for part in line.split(",")), strict=True)) for line in _gpu_lines()]


def _command_output(command: list[str]) -> str:
    """Return the output of a command; empty where it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


# safetensors' names of the floating-point types.
_FLOAT_TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_QUANTIZED_SUFFIX = ".codes"
_GRAPH_DTYPES = {"fp32": "float32", "fp16": "float16"}


def float_dtype(artifact: Artifact) -> str | None:
    """Return the type of most of the unquantized weights; None where there are none or it is not known.

    The scales of quantized weights are not counted: they belong to the quantized weights, whatever type the
    model was stored in. A graph or an engine has the type in its `details`.
    """
    if artifact.format != "torch":
        return _GRAPH_DTYPES.get(str(artifact.manifest.details.get("dtype")))
    entries: dict[str, Any] = {}
    for name in artifact.model_files:
        if name.endswith(".safetensors"):
            entries |= read_header(artifact.path / name)
    # a quantized matrix is a module of its own: the tensors next to `codes` are scales and zero points
    matrices = {name.removesuffix(_QUANTIZED_SUFFIX) for name in entries if name.endswith(_QUANTIZED_SUFFIX)}
    values: Counter[str] = Counter()
    for name, entry in entries.items():
        if (
            name != "__metadata__"
            and entry["dtype"] in _FLOAT_TYPES
            and name.rpartition(".")[0] not in matrices
        ):
            values[_FLOAT_TYPES[entry["dtype"]]] += value_count(entry)
    return max(values, key=values.__getitem__) if values else None
