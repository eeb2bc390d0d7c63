"""Check what is installed, what works on this machine, and how to install what is missing.

A runtime counts as working only if it computes a correct result. Errors in a check become its result, so
that `smelt doctor` does not fail.
"""

from __future__ import annotations

import platform
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

from smelt.commands import runtime_probes as probes
from smelt.commands.check_result import CheckGroup, CheckResult, first_error_line

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
    for look in (
        _machine,
        _packages,
        probes.try_torch,
        probes.try_onnxruntime,
        probes.try_providers,
        probes.try_openvino,
        probes.try_engines,
        _processor,
    ):
        findings += _run_probe(look)
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
            mark = {True: "+", False: "-", None: " "}[finding.ok]
            lines += _wrap_lines(f"  {mark} {finding.name}".ljust(indent), finding.detail, indent)
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
    found: list[CheckResult] = []
    try:
        found.extend(probe())
    except Exception as error:  # a broken library must not hide the other results
        found.append(
            CheckResult(
                "runtimes", probe.__name__.removeprefix("try").strip("_"), False, first_error_line(error)
            )
        )
    return found


def _machine() -> Iterator[CheckResult]:
    from smelt.evaluate.environment import describe_environment

    here = describe_environment()
    memory = f"{here['memory_bytes'] / 2**30:.1f} GiB memory"
    yield CheckResult("machine", "processor", None, here["cpu"])
    yield CheckResult(
        "machine", "cores", None, f"{here['cores']} ({here['logical_cores']} logical), {memory}"
    )
    yield CheckResult("machine", "system", None, f"{here['os']}, Python {here['python']}")
    for gpu in here["gpus"]:
        text = f"{gpu['name']}, {gpu['memory']}, driver {gpu['driver']}, compute {gpu['compute_capability']}"
        yield CheckResult("machine", "gpu", None, text)
    if not here["gpus"]:
        yield CheckResult("machine", "gpu", None, "no NVIDIA GPU (nvidia-smi is missing or fails)")


def _packages() -> Iterator[CheckResult]:
    from smelt.evaluate.environment import installed_versions

    found = installed_versions()
    for name, number in found.items():
        yield CheckResult("packages", name, True, number)
    required = {"torch", "transformers", "onnx", "onnxsim", "onnxscript", "numpy", "sacrebleu"}
    for name in sorted(required - found.keys()):
        yield CheckResult("packages", name, False, "missing", f"pip install {name}")
    if {"onnxruntime", "onnxruntime-gpu"} <= found.keys():
        yield CheckResult(
            "packages",
            "onnxruntime",
            False,
            "onnxruntime and onnxruntime-gpu are both installed and overwrite each other's files",
            "pip uninstall -y onnxruntime onnxruntime-gpu, then pip install onnxruntime-gpu",
        )


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
