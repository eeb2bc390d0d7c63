"""ONNX Runtime's two providers of TensorRT, and what of theirs is missing on this machine.

Nothing is loaded for the answer: the plan asks, and these libraries are large. Sources: ONNX Runtime's
documentation, "TensorRT Execution Provider"; github.com/NVIDIA/TensorRT-RTX-EP-ABI.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from smelt.runtime.backends.device import Place, cuda_devices, cuda_gpus

_WINDOWS = sys.platform == "win32"
_LIBRARY = "onnxruntime_providers_tensorrt.dll" if _WINDOWS else "libonnxruntime_providers_tensorrt.so"
_LINKED = rb"nvinfer_(\d+)\.dll" if _WINDOWS else rb"libnvinfer\.so\.(\d+)"
_CUDA = rb"cudart64_(\d+)\.dll" if _WINDOWS else rb"libcudart\.so\.(\d+)"
# nvinfer before its parser, which is linked with it
_FILES = (
    ("nvinfer_{}.dll", "nvonnxparser_{}.dll") if _WINDOWS else ("libnvinfer.so.{}", "libnvonnxparser.so.{}")
)
_SYSTEM = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib")
_RTX = "onnxruntime_ep_nv_tensorrt_rtx"


@dataclass(frozen=True)
class Provider:
    """One of them.

    name: as ONNX Runtime calls it. runner: as reports do. title: in sentences. memory: where caches lie
    between two calls.
    """

    name: str
    runner: str
    title: str
    memory: Place


TENSORRT = Provider("TensorrtExecutionProvider", "onnxruntime-tensorrt", "TensorRT in ONNX Runtime", "cuda")
# a plug-in brings no allocator that `OrtValue` takes by the word "cuda"
RTX = Provider(
    "NvTensorRTRTXExecutionProvider", "onnxruntime-tensorrt-rtx", "TensorRT for RTX in ONNX Runtime", "cpu"
)
PROVIDERS = {"ort-tensorrt": TENSORRT, "ort-tensorrt-rtx": RTX}


def place_of(wanted: str, target: str | None) -> Place:
    """Return where graphs for `target` are to work: on the CPU where that is asked for or the provider lacks.

    Raises:
        MissingDependencyError: cuda is asked for, and the provider cannot work here.
    """
    from smelt.core.errors import MissingDependencyError

    if wanted == "cpu" or target not in PROVIDERS:
        return "cpu"
    lack = _lack_of(target)
    if lack is not None and wanted == "cuda":
        raise MissingDependencyError(lack[1], code=lack[0])
    return "cpu" if lack else "cuda"


def lack_of(target: str) -> str | None:
    """Say why the provider of `target` cannot work here and how to get it, None where nothing is known."""
    lack = _lack_of(target)
    return lack and lack[1]


def lack_of_package(target: str) -> str | None:
    """As `lack_of`, whatever GPU there is."""
    lack = _lack_of_package(target)
    return lack and lack[1]


def _lack_of(target: str) -> tuple[str, str] | None:
    """Return code and text of why the provider of `target` cannot work here, None where nothing is known."""
    if not cuda_devices():
        return (
            "no-gpu",
            f"{PROVIDERS[target].title} needs an NVIDIA GPU with a working driver, and there is none here.",
        )
    return _lack_of_package(target)


def _lack_of_package(target: str) -> tuple[str, str] | None:
    return _lack_of_rtx() if target == "ort-tensorrt-rtx" else _lack_of_tensorrt()


def provider_library() -> Path | None:
    """Return the file of ONNX Runtime's TensorRT provider, None where this build has none."""
    spec = find_spec("onnxruntime")
    homes = [Path(home) for home in (spec.submodule_search_locations or ())] if spec else []
    return next((path for home in homes if (path := home / "capi" / _LIBRARY).is_file()), None)


@dataclass(frozen=True)
class Linked:
    """What the provider's library is linked with: the major versions of TensorRT and CUDA."""

    tensorrt: int
    cuda: int | None


def linked_with(library: Path) -> Linked | None:
    """Return what `library` is linked with, None where its bytes do not say it."""
    text = library.read_bytes()
    needed, cuda = re.search(_LINKED, text), re.search(_CUDA, text)
    return Linked(int(needed[1]), int(cuda[1]) if cuda else None) if needed else None


def tensorrt_files(major: int) -> list[Path] | None:
    """Return TensorRT's libraries of that major version in the order of loading, None where they are not."""
    for folder in _folders():
        found = [folder / name.format(major) for name in _FILES]
        if all(path.is_file() for path in found):
            return found
    return None


def _folders() -> Iterator[Path]:
    """Yield where TensorRT's libraries may lie: in its package, on the loader's path, in the system."""
    spec = find_spec("tensorrt_libs")
    yield from (Path(home) for home in ((spec.submodule_search_locations or ()) if spec else ()))
    told = os.environ.get("PATH" if _WINDOWS else "LD_LIBRARY_PATH", "")
    yield from (Path(part) for part in told.split(os.pathsep) if part)
    yield from (Path(folder) for folder in _SYSTEM)


def _lack_of_tensorrt() -> tuple[str, str] | None:
    here = onnxruntime_here()
    library = provider_library()
    if library is None:
        return (
            "not-installed",
            f"{here} has no {TENSORRT.name}: pip uninstall onnxruntime, then"
            " pip install 'onnxruntime-gpu[cuda,cudnn]'.",
        )
    linked = linked_with(library)
    if linked is None or tensorrt_files(linked.tensorrt) is not None:
        return None
    have = ", ".join(f"{name} {number}" for name, number in tensorrt_packages().items())
    package = f"tensorrt-cu{linked.cuda}" if linked.cuda else "tensorrt"
    return (
        "not-installed",
        f"{here} is linked with TensorRT {linked.tensorrt} ({_FILES[0].format(linked.tensorrt)}), which is"
        f" not here{f'; installed is {have}' if have else ''}: pip install"
        f" '{package}=={linked.tensorrt}.*', in an environment of its own, since the step `tensorrt` wants 11"
        " or newer.",
    )


def _lack_of_rtx() -> tuple[str, str] | None:
    if find_spec(_RTX) is None:
        return (
            "not-installed",
            f"ONNX Runtime's plug-in {RTX.name} is not installed:"
            " pip install onnxruntime-ep-nv-tensorrt-rtx (GeForce RTX 30xx and newer).",
        )
    known = [(name, number) for name, number in cuda_gpus() if _fits_rtx(number)]
    if cuda_gpus() and not known:
        seen = ", ".join(f"{name} (compute capability {number})" for name, number in cuda_gpus())
        return (
            "wrong-gpu",
            "TensorRT for RTX takes GPUs of compute capability 8.6, 8.9, and 12.0 or newer; here is"
            f" {seen}. Give target: ort-tensorrt.",
        )
    return None


def _fits_rtx(capability: str) -> bool:
    """Say whether TensorRT for RTX is for such a GPU (tensorrt_rtx_provider_options.h of the plug-in 0.5)."""
    return capability in ("8.6", "8.9") or int(capability.split(".", maxsplit=1)[0]) >= 12


def rtx_library() -> str:
    """Return the file of the plug-in; its package loads TensorRT for RTX on import."""
    from importlib import import_module

    return str(import_module(_RTX).get_library_path())


def onnxruntime_here() -> str:
    """Return the package of ONNX Runtime and its version, in words."""
    found = {name: _number(name) for name in ("onnxruntime-gpu", "onnxruntime")}
    return next((f"{name} {number}" for name, number in found.items() if number), "no ONNX Runtime")


def tensorrt_packages() -> dict[str, str]:
    """Return the versions of the packages of TensorRT that are installed."""
    names = ("tensorrt", "tensorrt-cu13", "tensorrt-cu13-libs", "tensorrt-cu12", "tensorrt-cu12-libs")
    return {name: number for name in names if (number := _number(name)) is not None}


def rtx_packages() -> dict[str, str]:
    """Return the versions of the packages of the plug-in that are installed."""
    base = "onnxruntime-ep-nv-tensorrt-rtx"
    return {n: v for n in (base, f"{base}-cu13", f"{base}-cu12") if (v := _number(n)) is not None}


def _number(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
