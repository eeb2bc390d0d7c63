"""Check what is installed, what works on this machine, and how to install what is missing: `smelt doctor`.

Each runtime (torch, ONNX Runtime, OpenVINO, TensorRT) is tested with a small computation, and counts as
working only if the result is correct. An error in a check becomes its result, so that `smelt doctor` does not
fail.
"""

from __future__ import annotations

import contextlib
import io
import os
import platform
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

CheckGroup = Literal["machine", "packages", "runtimes", "processor"]


@dataclass(frozen=True)
class CheckResult:
    """One line of the output of `smelt doctor`.

    ok: True if it works, False if not, None for information. detail: version or cause. remedy: command or
    page to install what is missing; empty if nothing is.
    """

    group: CheckGroup
    name: str
    ok: bool | None
    detail: str
    remedy: str = ""


def first_error_line(error: BaseException) -> str:
    """Return the first line of an error's message, at most 200 characters."""
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return first_line if len(first_line) <= 200 else first_line[:197] + "..."


def check_runtime(name: str, check: Callable[[], str], remedy: str = "") -> CheckResult:
    """Test one runtime and return the result. check: runs the test and returns the detail."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # ONNX Runtime prints its failures
            return CheckResult("runtimes", name, True, check())
    except ModuleNotFoundError as error:
        return CheckResult("runtimes", name, False, f"{error.name or name} is not installed", remedy)
    except Exception as error:  # any error of a runtime is the result
        return CheckResult("runtimes", name, False, first_error_line(error), remedy)


def try_torch() -> Iterator[CheckResult]:
    """Test torch on the CPU, in bf16, and on a GPU."""
    import torch

    def product(device: str) -> str:
        matrix = torch.ones(4, 4, device=device)
        if float((matrix @ matrix).sum()) != 64.0:
            raise RuntimeError("wrong result of a matrix multiplication")
        return ""

    yield check_runtime("torch cpu", lambda: product("cpu") + _thread_count_text(torch.get_num_threads()))
    yield check_runtime("torch cpu bf16", _test_bf16, "nothing to install; training uses fp32 instead")
    if torch.version.cuda is None and torch.version.hip is None:
        yield CheckResult(
            "runtimes",
            "torch cuda",
            False,
            f"this torch ({torch.__version__}) is built for the CPU only",
            "with an NVIDIA GPU: choose a CUDA build at https://pytorch.org/get-started/locally",
        )
    else:
        remedy = "check that nvidia-smi works; the driver must support torch's CUDA version"
        yield check_runtime("torch cuda", lambda: product("cuda") + torch.cuda.get_device_name(), remedy)


def _thread_count_text(number: int) -> str:
    return f"{number} thread{'' if number == 1 else 's'}"


def _test_bf16() -> str:
    from smelt.runtimes.device import bf16_speedup

    gain = bf16_speedup()
    if not gain:
        raise RuntimeError("a bf16 matrix multiplication crashes, whatever instructions are listed below")
    return f"bf16 matrix multiplications work; a layer trains {gain:.1f} times as fast as in fp32"


def try_onnxruntime() -> Iterator[CheckResult]:
    """Test ONNX Runtime for the targets of `onnx`."""
    import onnxruntime

    from smelt.pipeline.inspect.machine import has_cuda

    onnxruntime.set_default_logger_severity(4)  # keeps errors of providers off the terminal
    model = _tiny_graph()
    for target, provider in TARGET_PROVIDERS.items():
        name = f"onnxruntime {target.removeprefix('ort-')}"
        remedy = _REMEDIES.get(provider, "")
        if provider not in onnxruntime.get_available_providers():
            yield CheckResult("runtimes", name, False, "not included in this build", remedy)
        elif provider == "CUDAExecutionProvider" and not has_cuda():
            yield CheckResult("runtimes", name, False, "no NVIDIA GPU with a working driver", remedy)
        else:
            yield check_runtime(name, lambda p=provider, t=target: _run_session(model, p, t), remedy)  # type: ignore[misc]


def try_ort_tensorrt() -> Iterator[CheckResult]:
    """Test TensorRT in ONNX Runtime."""
    from smelt.pipeline.inspect.machine import has_cuda
    from smelt.runtimes.ort_tensorrt_provider import missing_package, missing_requirement

    name = "onnxruntime tensorrt"
    if not has_cuda():
        hint = missing_package() or "everything else is installed"
        yield CheckResult("runtimes", name, False, "no NVIDIA GPU with a working driver", hint)
    elif (problem := missing_requirement()) is not None:
        yield CheckResult("runtimes", name, False, "cannot be loaded", problem)
    else:
        remedy = "see docs/reference/stages/tensorrt.md#tensorrt-in-onnx-runtime"
        yield check_runtime(name, _build_tiny_engine, remedy)


def _build_tiny_engine() -> str:
    """Build and run an engine of the tiny graph with ONNX Runtime's TensorRT provider."""
    import tempfile

    import numpy as np

    from smelt.runtimes.ort_tensorrt_backend import ProviderOptions, open_provider_session
    from smelt.runtimes.ort_tensorrt_provider import onnxruntime_version
    from smelt.runtimes.tensorrt_engine import graph_hash

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.onnx"
        path.write_bytes(_tiny_graph())
        session = open_provider_session(path, ProviderOptions(graph_hash(path), {}))
        (result,) = session.run(None, {"x": np.array([1.0, 2.0], dtype=np.float32)})
    if result.tolist() != [2.0, 4.0]:
        raise RuntimeError("wrong result of an addition")
    return f"{onnxruntime_version()}, for target ort-tensorrt"


# Providers that the targets of `onnx` use; other providers of a build are not used.
TARGET_PROVIDERS = {"ort-cpu": "CPUExecutionProvider", "ort-cuda": "CUDAExecutionProvider"}
_REMEDIES = {"CUDAExecutionProvider": "with an NVIDIA GPU: pip install 'onnxruntime-gpu[cuda,cudnn]'"}


def _tiny_graph() -> bytes:
    """Return y = x + x as a serialized model."""
    from onnx import TensorProto, helper

    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in "xy")
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "tiny", [x], [y])
    opset = [helper.make_opsetid("", 17)]
    return bytes(helper.make_model(graph, opset_imports=opset, ir_version=8).SerializeToString())


def _run_session(model: bytes, provider: str, target: str) -> str:
    import numpy as np
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model, options, providers=[provider])
    if provider not in session.get_providers():
        raise RuntimeError("its libraries (CUDA, cuDNN) cannot be loaded")
    (result,) = session.run(None, {"x": np.array([1.0, 2.0], dtype=np.float32)})
    if result.tolist() != [2.0, 4.0]:
        raise RuntimeError("wrong result of an addition")
    return f"onnxruntime {onnxruntime.__version__}, for target {target}"


def try_openvino() -> Iterator[CheckResult]:
    """Test OpenVINO on the CPU."""
    yield check_runtime("openvino", _run_openvino, "pip install 'openvino>=2026'")


def _run_openvino() -> str:
    import numpy as np

    from smelt.runtimes.openvino_backend import (
        cpu_plugin_options,
        has_bf16,
        has_openvino,
        import_openvino,
        release_version,
    )

    if not has_openvino():
        raise ModuleNotFoundError(name="openvino")
    ov = import_openvino()
    core = ov.Core()
    model = core.compile_model(core.read_model(_tiny_graph()), "CPU", cpu_plugin_options("fp32", 1))
    result = model([np.array([1.0, 2.0], dtype=np.float32)])[0]
    if result.tolist() != [2.0, 4.0]:
        raise RuntimeError("wrong result of an addition")
    bf16 = "with bf16" if has_bf16() else "no bf16 on this CPU"
    return f"openvino {release_version(ov)}, for target openvino; {bf16}"


def try_engines() -> Iterator[CheckResult]:
    """Test the builder of TensorRT."""
    yield check_runtime("tensorrt", _create_builder, "with an NVIDIA GPU: pip install tensorrt")


def _create_builder() -> str:
    from smelt.pipeline.inspect.machine import cuda_missing_reason
    from smelt.runtimes.tensorrt_engine import find_tensorrt, import_tensorrt

    if find_tensorrt() is None:
        raise ModuleNotFoundError(name="tensorrt")
    trt = import_tensorrt()
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    if builder is None:
        raise RuntimeError(f"{trt.__name__} {trt.__version__} is installed, but found no usable GPU")
    runs = (
        ""
        if cuda_missing_reason() is None
        else "; engines cannot run on this machine: no CUDA GPU that torch can use"
    )
    return f"{trt.__name__} {trt.__version__}: the builder works{runs}"


_GROUP_TITLES: dict[CheckGroup, str] = {
    "machine": "This machine",
    "packages": "Installed",
    "runtimes": "Runtimes and devices (tested now)",
    "processor": "CPU instructions for fast int8 and bf16",
}
_WIDTH = 80


def run_checks() -> list[CheckResult]:
    """Run all checks and return their results; takes a few seconds, as runtimes are imported and tested."""
    findings: list[CheckResult] = []
    for probe in (
        _machine,
        _packages,
        try_torch,
        try_onnxruntime,
        try_ort_tensorrt,
        try_openvino,
        try_engines,
        _several_machines,
        _processor,
    ):
        findings += _run_probe(probe)
    return findings


def format_check_results(results: list[CheckResult]) -> str:
    """Return the results as text of at most 80 columns."""
    lines: list[str] = []
    for group, title in _GROUP_TITLES.items():
        members = [f for f in results if f.group == group]
        if not members:
            continue
        lines += ["", title] if lines else [title]
        indent = max(len(f.name) for f in members) + 6
        for finding in members:
            status_symbol = {True: "+", False: "-", None: " "}[finding.ok]
            lines += _wrap_lines(f"  {status_symbol} {finding.name}".ljust(indent), finding.detail, indent)
            if finding.remedy:
                lines += _wrap_lines(" " * indent + "-> ", finding.remedy, indent + 3)
    return "\n".join(lines)


def _wrap_lines(start: str, text: str, indent: int) -> list[str]:
    wrapped = textwrap.wrap(
        text, _WIDTH, initial_indent=start, subsequent_indent=" " * indent, break_on_hyphens=False
    )
    return wrapped or [start.rstrip()]


def _run_probe(probe: Callable[[], Iterator[CheckResult]]) -> list[CheckResult]:
    """Return the results of a probe; an exception becomes the last result."""
    results: list[CheckResult] = []
    try:
        results.extend(probe())
    except Exception as error:  # a broken library must not hide the other results
        results.append(
            CheckResult(
                "runtimes", probe.__name__.removeprefix("try").strip("_"), False, first_error_line(error)
            )
        )
    return results


def _machine() -> Iterator[CheckResult]:
    from smelt.evaluate.environment import describe_environment

    environment = describe_environment()
    memory = f"{environment['memory_bytes'] / 2**30:.1f} GiB memory"
    yield CheckResult("machine", "processor", None, environment["cpu"])
    yield CheckResult(
        "machine", "cores", None, f"{environment['cores']} ({environment['logical_cores']} logical), {memory}"
    )
    yield CheckResult("machine", "system", None, f"{environment['os']}, Python {environment['python']}")
    for gpu in environment["gpus"]:
        text = f"{gpu['name']}, {gpu['memory']}, driver {gpu['driver']}, compute {gpu['compute_capability']}"
        yield CheckResult("machine", "gpu", None, text)
    if not environment["gpus"]:
        yield CheckResult("machine", "gpu", None, "no NVIDIA GPU (nvidia-smi is missing or fails)")


def _packages() -> Iterator[CheckResult]:
    from smelt.evaluate.environment import installed_versions

    versions = installed_versions()
    for name, number in versions.items():
        yield CheckResult("packages", name, True, number)
    required = {"torch", "transformers", "onnx", "onnxsim", "onnxscript", "numpy", "sacrebleu"}
    for name in sorted(required - versions.keys()):
        yield CheckResult("packages", name, False, "missing", f"pip install {name}")
    if {"onnxruntime", "onnxruntime-gpu"} <= versions.keys():
        yield CheckResult(
            "packages",
            "onnxruntime",
            False,
            "onnxruntime and onnxruntime-gpu are both installed and overwrite each other's files",
            "pip uninstall -y onnxruntime onnxruntime-gpu, then pip install onnxruntime-gpu",
        )


def _several_machines() -> Iterator[CheckResult]:
    """Check the packages for buckets, clusters and several devices."""
    from smelt.core.system import package_problem
    from smelt.pipeline.execute.ray_cluster import OLDEST_RAY, connection_problem
    from smelt.training.processes import DEEPSPEED_VERSION

    for extra, name, oldest, purpose in (
        ("ray", "ray", OLDEST_RAY, "--executor ray"),
        ("s3", "s3fs", "2026.1", "--store s3://BUCKET"),
        ("deepspeed", "deepspeed", DEEPSPEED_VERSION, "launch: {strategy: deepspeed}"),
    ):
        if (problem := package_problem(name, oldest)) is not None:
            yield CheckResult(
                "packages", name, None, f"{problem}; for {purpose}", f"pip install 'smelt[{extra}]'"
            )
            continue
        detail = f"{version(name)}, for {purpose}"
        if name == "ray" and (address := os.environ.get("RAY_ADDRESS")):
            problem = connection_problem(address)
            detail += f"; RAY_ADDRESS {address}: {problem or 'answers'}"
        yield CheckResult("packages", name, True, detail)


# Instruction sets with their names in Linux (arch/x86/include/asm/cpufeatures.h, arch/arm64 hwcap).
_CPU_FLAGS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86": {
        "AVX2": ("avx2",),
        "AVX-512": ("avx512f",),
        "VNNI (int8)": ("avx512_vnni", "avx_vnni"),
        "bf16": ("avx512_bf16",),
        "AMX (int8)": ("amx_int8",),
        "AMX (bf16)": ("amx_bf16",),
    },
    "arm": {"dot product (int8)": ("asimddp",), "i8mm (int8)": ("i8mm",), "bf16": ("bf16",), "SVE": ("sve",)},
}


def _processor() -> Iterator[CheckResult]:
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        yield CheckResult("processor", "unknown", None, f"not available on {platform.system()}")
        return
    arm = platform.machine().lower() in ("aarch64", "arm64")
    flags = set(info.read_text(encoding="utf-8", errors="replace").split())
    for name, any_of in _CPU_FLAGS["arm" if arm else "x86"].items():
        present = [flag for flag in any_of if flag in flags]
        yield CheckResult("processor", name, bool(present), ", ".join(present) or "no")
