"""What is installed, what really works on this machine, and how to get what is missing.

A runtime counts as working only where it has just computed something. No probe can make the doctor
fail: whatever goes wrong inside of one becomes its finding.
"""

from __future__ import annotations

import contextlib
import io
import platform
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

Group = Literal["machine", "packages", "runtimes", "processor"]
_TITLES: dict[Group, str] = {
    "machine": "This machine",
    "packages": "Installed",
    "runtimes": "Runtimes and devices (each has just been tried)",
    "processor": "Processor instructions that make int8 and bf16 fast",
}
_WIDTH = 80


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's answer.

    ok: True works, False does not, None is only said. detail: version or cause. remedy: what to type
    or where to go in order to get what is missing; empty where nothing is.
    """

    group: Group
    name: str
    ok: bool | None
    detail: str
    remedy: str = ""


def diagnose() -> list[Finding]:
    """Look at everything; takes a few seconds, since runtimes are imported and tried."""
    findings: list[Finding] = []
    for look in (_machine, _packages, _torch, _onnxruntime, _providers, _openvino, _engines, _processor):
        findings += _safely(look)
    return findings


def describe(findings: list[Finding]) -> str:
    """Return the findings as text of at most 80 columns."""
    lines: list[str] = []
    for group, title in _TITLES.items():
        members = [f for f in findings if f.group == group]
        if not members:
            continue
        lines += ["", title] if lines else [title]
        indent = max(len(f.name) for f in members) + 6
        for finding in members:
            mark = {True: "+", False: "-", None: " "}[finding.ok]
            lines += _wrap(f"  {mark} {finding.name}".ljust(indent), finding.detail, indent)
            if finding.remedy:
                lines += _wrap(" " * indent + "-> ", finding.remedy, indent + 3)
    return "\n".join(lines)


def _wrap(head: str, text: str, indent: int) -> list[str]:
    wrapped = textwrap.wrap(
        text, _WIDTH, initial_indent=head, subsequent_indent=" " * indent, break_on_hyphens=False
    )
    return wrapped or [head.rstrip()]


def _safely(look: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """Collect what a probe finds, up to where it breaks."""
    found: list[Finding] = []
    try:
        found.extend(look())
    except Exception as error:  # a broken library must not hide what the others say
        found.append(Finding("runtimes", look.__name__.strip("_"), False, _cause(error)))
    return found


def _cause(error: BaseException) -> str:
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return first if len(first) <= 200 else first[:197] + "..."


def _attempt(name: str, work: Callable[[], str], remedy: str = "") -> Finding:
    """Try one runtime; `work` returns what to say of it."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # ONNX Runtime prints its failures
            return Finding("runtimes", name, True, work())
    except ModuleNotFoundError as error:
        return Finding("runtimes", name, False, f"{error.name or name} is not installed", remedy)
    except Exception as error:  # whatever a runtime raises is the finding
        return Finding("runtimes", name, False, _cause(error), remedy)


def _machine() -> Iterator[Finding]:
    from smelt.evaluate.environment import environment

    here = environment()
    memory = f"{here['memory_bytes'] / 2**30:.1f} GiB memory"
    yield Finding("machine", "processor", None, here["cpu"])
    yield Finding("machine", "cores", None, f"{here['cores']} ({here['logical_cores']} logical), {memory}")
    yield Finding("machine", "system", None, f"{here['os']}, Python {here['python']}")
    for gpu in here["gpus"]:
        told = f"{gpu['name']}, {gpu['memory']}, driver {gpu['driver']}, compute {gpu['compute_capability']}"
        yield Finding("machine", "gpu", None, told)
    if not here["gpus"]:
        yield Finding("machine", "gpu", None, "no NVIDIA GPU (nvidia-smi is missing or does not answer)")


def _packages() -> Iterator[Finding]:
    from smelt.evaluate.environment import versions

    found = versions()
    for name, number in found.items():
        yield Finding("packages", name, True, number)
    required = {"torch", "transformers", "onnx", "onnxsim", "onnxscript", "numpy", "sacrebleu"}
    for name in sorted(required - found.keys()):
        yield Finding("packages", name, False, "missing", f"pip install {name}")
    if {"onnxruntime", "onnxruntime-gpu"} <= found.keys():
        yield Finding(
            "packages",
            "onnxruntime",
            False,
            "onnxruntime and onnxruntime-gpu are both installed and overwrite each other's files",
            "pip uninstall -y onnxruntime onnxruntime-gpu, then pip install onnxruntime-gpu",
        )


def _torch() -> Iterator[Finding]:
    import torch

    def product(device: str) -> str:
        ones = torch.ones(4, 4, device=device)
        if float((ones @ ones).sum()) != 64.0:
            raise RuntimeError("a product of two matrices came out wrong")
        return ""

    yield _attempt("torch cpu", lambda: product("cpu") + _threads(torch.get_num_threads()))
    yield _attempt("torch cpu bf16", _bf16, "nothing to install; training takes fp32 by itself")
    if torch.version.cuda is None and torch.version.hip is None:
        yield Finding(
            "runtimes",
            "torch cuda",
            False,
            f"this torch ({torch.__version__}) is built for the CPU only",
            "with an NVIDIA GPU: choose a CUDA build at https://pytorch.org/get-started/locally",
        )
    else:
        remedy = "look whether nvidia-smi answers; the driver must be as new as torch's CUDA"
        yield _attempt("torch cuda", lambda: product("cuda") + torch.cuda.get_device_name(), remedy)


def _threads(number: int) -> str:
    return f"{number} thread{'' if number == 1 else 's'}"


def _bf16() -> str:
    from smelt.runtime.backends.device import bf16_gain

    gain = bf16_gain()
    if not gain:
        raise RuntimeError("a bf16 product ends the process, whatever instructions are listed below")
    return f"bf16 products work; a layer trains {gain:.1f} times as fast as in fp32"


def _onnxruntime() -> Iterator[Finding]:
    import onnxruntime

    from smelt.look.machine import has_cuda

    onnxruntime.set_default_logger_severity(4)  # failing providers write to the terminal otherwise
    model = _tiny_graph()
    for target, provider in _PROVIDERS.items():
        name = f"onnxruntime {target.removeprefix('ort-')}"
        remedy = _REMEDIES.get(provider, "")
        if provider not in onnxruntime.get_available_providers():
            yield Finding("runtimes", name, False, "not in this build", remedy)
        elif provider == "CUDAExecutionProvider" and not has_cuda():
            yield Finding("runtimes", name, False, "no NVIDIA GPU with a working driver", remedy)
        else:
            yield _attempt(name, lambda p=provider, t=target: _session(model, p, t), remedy)  # type: ignore[misc]


def _providers() -> Iterator[Finding]:
    """TensorRT inside of ONNX Runtime."""
    from smelt.look.machine import has_cuda
    from smelt.runtime.backends.ort_tensorrt.provider import PROVIDERS, lack_of, lack_of_package

    for target in PROVIDERS:
        name = f"onnxruntime {target.removeprefix('ort-')}"
        if not has_cuda():
            mend = lack_of_package(target) or "with an NVIDIA GPU nothing else is missing"
            yield Finding("runtimes", name, False, "no NVIDIA GPU with a working driver", mend)
        elif (lack := lack_of(target)) is not None:
            yield Finding("runtimes", name, False, "cannot be loaded", lack)
        else:
            yield _attempt(name, partial(_engine, target), "see docs/tensorrt.md, TensorRT in ONNX Runtime")


def _engine(target: str) -> str:
    """Let a provider of TensorRT build an engine of the tiny graph and run it."""
    import tempfile

    import numpy as np

    from smelt.runtime.backends.ort_tensorrt.provider import PROVIDERS, onnxruntime_here
    from smelt.runtime.backends.ort_tensorrt.session import open_session
    from smelt.runtime.backends.ort_tensorrt.told import Told
    from smelt.runtime.backends.tensorrt_sidecar import hash_of_graph

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.onnx"
        path.write_bytes(_tiny_graph())
        session = open_session(PROVIDERS[target], path, Told(hash_of_graph(path), {}))
        (result,) = session.run(None, {"x": np.array([1.0, 2.0], dtype=np.float32)})
    if result.tolist() != [2.0, 4.0]:
        raise RuntimeError("a sum came out wrong")
    return f"{onnxruntime_here()}, for target {target}"


# What the targets of `onnx` run on; whatever else a build brings along, no target of smelt uses.
_PROVIDERS = {"ort-cpu": "CPUExecutionProvider", "ort-cuda": "CUDAExecutionProvider"}
_REMEDIES = {"CUDAExecutionProvider": "with an NVIDIA GPU: pip install 'onnxruntime-gpu[cuda,cudnn]'"}


def _tiny_graph() -> bytes:
    """Return y = x + x as a serialized model."""
    from onnx import TensorProto, helper

    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in "xy")
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "tiny", [x], [y])
    opset = [helper.make_opsetid("", 17)]
    return bytes(helper.make_model(graph, opset_imports=opset, ir_version=8).SerializeToString())


def _session(model: bytes, provider: str, target: str) -> str:
    import numpy as np
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model, options, providers=[provider])
    if provider not in session.get_providers():
        raise RuntimeError("its libraries (CUDA, cuDNN) cannot be loaded")
    (result,) = session.run(None, {"x": np.array([1.0, 2.0], dtype=np.float32)})
    if result.tolist() != [2.0, 4.0]:
        raise RuntimeError("a sum came out wrong")
    return f"onnxruntime {onnxruntime.__version__}, for target {target}"


def _openvino() -> Iterator[Finding]:
    yield _attempt("openvino", _compiled, "pip install 'openvino>=2026'")


def _compiled() -> str:
    import numpy as np

    from smelt.runtime.backends.openvino_module import (
        has_bf16,
        has_openvino,
        import_openvino,
        options_of,
        version_of,
    )

    if not has_openvino():
        raise ModuleNotFoundError(name="openvino")
    ov = import_openvino()
    core = ov.Core()
    model = core.compile_model(core.read_model(_tiny_graph()), "CPU", options_of("fp32", 1))
    result = model([np.array([1.0, 2.0], dtype=np.float32)])[0]
    if result.tolist() != [2.0, 4.0]:
        raise RuntimeError("a sum came out wrong")
    bf16 = "bf16 too" if has_bf16() else "no bf16 on this processor"
    return f"openvino {version_of(ov)}, for target openvino; {bf16}"


def _engines() -> Iterator[Finding]:
    yield _attempt("tensorrt", _tensorrt, "with an NVIDIA GPU: pip install tensorrt")


def _tensorrt() -> str:
    from smelt.look.machine import cuda_lacks
    from smelt.runtime.backends.tensorrt_module import find_tensorrt, import_tensorrt

    if find_tensorrt() is None:
        raise ModuleNotFoundError(name="tensorrt")
    trt = import_tensorrt()
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    if builder is None:
        raise RuntimeError(f"{trt.__name__} {trt.__version__} is installed, but finds no usable GPU")
    runs = "" if cuda_lacks() is None else "; engines cannot be run here: no CUDA GPU that torch can use"
    return f"{trt.__name__} {trt.__version__}: a builder can be made{runs}"


# Linux's names of instruction sets (arch/x86/include/asm/cpufeatures.h, arch/arm64 hwcap) and what they do.
_FLAGS: dict[str, dict[str, tuple[str, ...]]] = {
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


def _processor() -> Iterator[Finding]:
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        yield Finding("processor", "unknown", None, f"{platform.system()} does not list them")
        return
    arm = platform.machine().lower() in ("aarch64", "arm64")
    flags = set(info.read_text(encoding="utf-8", errors="replace").split())
    for name, any_of in _FLAGS["arm" if arm else "x86"].items():
        present = [flag for flag in any_of if flag in flags]
        yield Finding("processor", name, bool(present), ", ".join(present) or "no")
