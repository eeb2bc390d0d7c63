"""ONNX Runtime's TensorRT provider, and its requirements that this machine lacks.

No library is loaded for the check: the plan uses it, and these libraries are large. Source: ONNX Runtime's
documentation, "TensorRT Execution Provider".
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from smelt.core.system import package_versions
from smelt.runtimes.device import DeviceType, cuda_device_count

_WINDOWS = sys.platform == "win32"
_LIBRARY = "onnxruntime_providers_tensorrt.dll" if _WINDOWS else "libonnxruntime_providers_tensorrt.so"
_LINKED = rb"nvinfer_(\d+)\.dll" if _WINDOWS else rb"libnvinfer\.so\.(\d+)"
_CUDA = rb"cudart64_(\d+)\.dll" if _WINDOWS else rb"libcudart\.so\.(\d+)"
# nvinfer before its parser, which is linked with it
_FILES = (
    ("nvinfer_{}.dll", "nvonnxparser_{}.dll") if _WINDOWS else ("libnvinfer.so.{}", "libnvonnxparser.so.{}")
)
_SYSTEM = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib")
PROVIDER = "TensorrtExecutionProvider"


def provider_device(requested: str, target: str | None) -> DeviceType:
    """Return the device of graphs for `target`: the CPU where requested or where the provider is missing.

    Raises:
        MissingDependencyError: cuda is requested, and the provider cannot work here.
    """
    from smelt.core.errors import MissingDependencyError

    if requested == "cpu" or target != "ort-tensorrt":
        return "cpu"
    lack = _missing_requirement()
    if lack is not None and requested == "cuda":
        raise MissingDependencyError(lack[1], code=lack[0])
    return "cpu" if lack else "cuda"


def missing_requirement() -> str | None:
    """Return why the provider cannot work here and how to fix it; None if no reason is known."""
    lack = _missing_requirement()
    return lack and lack[1]


def missing_package() -> str | None:
    """Return the reason of `missing_requirement`, whatever GPU there is."""
    lack = _missing_package()
    return lack and lack[1]


def _missing_requirement() -> tuple[str, str] | None:
    """Return code and text of why the provider cannot work here; None if no reason is known."""
    if not cuda_device_count():
        return (
            "no-gpu",
            "TensorRT in ONNX Runtime needs an NVIDIA GPU with a working driver; none was found.",
        )
    return _missing_package()


def provider_library() -> Path | None:
    """Return the file of ONNX Runtime's TensorRT provider, None where this build has none."""
    spec = find_spec("onnxruntime")
    homes = [Path(home) for home in (spec.submodule_search_locations or ())] if spec else []
    return next((path for home in homes if (path := home / "capi" / _LIBRARY).is_file()), None)


@dataclass(frozen=True)
class LinkedVersions:
    """The major versions of TensorRT and CUDA that the provider's library is linked with."""

    tensorrt: int
    cuda: int | None


def linked_versions(library: Path) -> LinkedVersions | None:
    """Return the versions that `library` is linked with, None where its bytes do not contain them."""
    text = library.read_bytes()
    needed, cuda = re.search(_LINKED, text), re.search(_CUDA, text)
    return LinkedVersions(int(needed[1]), int(cuda[1]) if cuda else None) if needed else None


def find_tensorrt_libraries(major: int) -> list[Path] | None:
    """Return TensorRT's libraries of that major version in loading order, None where they are missing."""
    for folder in _library_folders():
        found = [folder / name.format(major) for name in _FILES]
        if all(path.is_file() for path in found):
            return found
    return None


def _library_folders() -> Iterator[Path]:
    """Yield possible folders of TensorRT's libraries: its package, the loader's path, the system."""
    spec = find_spec("tensorrt_libs")
    yield from (Path(home) for home in ((spec.submodule_search_locations or ()) if spec else ()))
    search_path = os.environ.get("PATH" if _WINDOWS else "LD_LIBRARY_PATH", "")
    yield from (Path(part) for part in search_path.split(os.pathsep) if part)
    yield from (Path(folder) for folder in _SYSTEM)


def _missing_package() -> tuple[str, str] | None:
    here = onnxruntime_version()
    library = provider_library()
    if library is None:
        return (
            "not-installed",
            f"{here} has no {PROVIDER}: pip uninstall onnxruntime, then"
            " pip install 'onnxruntime-gpu[cuda,cudnn]'.",
        )
    linked = linked_versions(library)
    if linked is None or find_tensorrt_libraries(linked.tensorrt) is not None:
        return None
    have = ", ".join(f"{name} {number}" for name, number in tensorrt_packages().items())
    package = f"tensorrt-cu{linked.cuda}" if linked.cuda else "tensorrt"
    return (
        "not-installed",
        f"{here} is linked with TensorRT {linked.tensorrt} ({_FILES[0].format(linked.tensorrt)}), which is"
        f" not installed{f' (found {have})' if have else ''}: pip install '{package}=={linked.tensorrt}.*',"
        " in a separate environment, since the stage `tensorrt` needs 11 or newer.",
    )


def onnxruntime_version() -> str:
    """Return the package of ONNX Runtime and its version, as text."""
    found = package_versions(("onnxruntime-gpu", "onnxruntime"))
    return next((f"{name} {number}" for name, number in found.items()), "no ONNX Runtime")


def tensorrt_packages() -> dict[str, str]:
    """Return the versions of the packages of TensorRT that are installed."""
    return package_versions(
        ("tensorrt", "tensorrt-cu13", "tensorrt-cu13-libs", "tensorrt-cu12", "tensorrt-cu12-libs")
    )
