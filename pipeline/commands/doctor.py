"""What is installed, what really works on this machine, and how to get what is missing.

A runtime counts as working only where it has just computed something. No probe can make the doctor
fail: whatever goes wrong inside of one becomes its finding.
"""

from __future__ import annotations

import platform
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

from smelt.commands import runtime_probes as probes
from smelt.commands.finding import Finding, Group, cause

_TITLES: dict[Group, str] = {
    "machine": "This machine",
    "packages": "Installed",
    "runtimes": "Runtimes and devices (each has just been tried)",
    "processor": "Processor instructions that make int8 and bf16 fast",
}
_WIDTH = 80


def diagnose() -> list[Finding]:
    """Look at everything; takes a few seconds, since runtimes are imported and tried."""
    findings: list[Finding] = []
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
        found.append(Finding("runtimes", look.__name__.removeprefix("try").strip("_"), False, cause(error)))
    return found


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
