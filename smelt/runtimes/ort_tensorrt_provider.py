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
    problem = _missing_requirement()
    if problem is not None and requested == "cuda":
        raise MissingDependencyError(problem[1], code=problem[0])
    return "cpu" if problem else "cuda"


def missing_requirement() -> str | None:
    """Return why the provider cannot work here and how to fix it; None if no reason is known."""
    problem = _missing_requirement()
    return problem and problem[1]


def missing_package() -> str | None:
    """Return the reason of `missing_requirement`, whatever GPU there is."""
    problem = _missing_package()
    return problem and problem[1]


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
    package_folders = (
        [Path(package_folder) for package_folder in (spec.submodule_search_locations or ())] if spec else []
    )
    return next(
        (
            path
            for package_folder in package_folders
            if (path := package_folder / "capi" / _LIBRARY).is_file()
        ),
        None,
    )


@dataclass(frozen=True)
class LinkedVersions:
    """The major versions of TensorRT and CUDA that the provider's library is linked with."""

    tensorrt: int
    cuda: int | None


def linked_versions(library: Path) -> LinkedVersions | None:
    """Return the versions that `library` is linked with, None where its bytes do not contain them."""
    text = library.read_bytes()
    version_match, cuda = re.search(_LINKED, text), re.search(_CUDA, text)
    return LinkedVersions(int(version_match[1]), int(cuda[1]) if cuda else None) if version_match else None


def find_tensorrt_libraries(major: int) -> list[Path] | None:
    """Return TensorRT's libraries of that major version in loading order, None where they are missing."""
    for folder in _library_folders():
        library_paths = [folder / name.format(major) for name in _FILES]
        if all(path.is_file() for path in library_paths):
            return library_paths
    return None


def _library_folders() -> Iterator[Path]:
    """Yield possible folders of TensorRT's libraries: its package, the loader's path, the system."""
    spec = find_spec("tensorrt_libs")
    yield from (Path(location) for location in ((spec.submodule_search_locations or ()) if spec else ()))
    search_path = os.environ.get("PATH" if _WINDOWS else "LD_LIBRARY_PATH", "")
    yield from (Path(search_folder) for search_folder in search_path.split(os.pathsep) if search_folder)
    yield from (Path(folder) for folder in _SYSTEM)


def _missing_package() -> tuple[str, str] | None:
    ort_version = onnxruntime_version()
    library = provider_library()
    if library is None:
        return (
            "not-installed",
            f"{ort_version} has no {PROVIDER}: pip uninstall onnxruntime, then"
            " pip install 'onnxruntime-gpu[cuda,cudnn]'.",
        )
    libs = linked_versions(library)
    if libs is None or find_tensorrt_libraries(libs.tensorrt) is not None:
        return None
    wheels = ", ".join(f"{name} {number}" for name, number in tensorrt_packages().items())
    package = f"tensorrt-cu{libs.cuda}" if libs.cuda else "tensorrt"
    return (
        "not-installed",
        f"{ort_version} is linked with TensorRT {libs.tensorrt} ({_FILES[0].format(libs.tensorrt)}), which is"
        f" not installed{f' (found {wheels})' if wheels else ''}: pip install '{package}=={libs.tensorrt}.*',"
        " in a separate environment, since the stage `tensorrt` needs 11 or newer.",
    )


def onnxruntime_version() -> str:
    """Return the package of ONNX Runtime and its version, as text."""
    versions = package_versions(("onnxruntime-gpu", "onnxruntime"))
    return next((f"{name} {number}" for name, number in versions.items()), "no ONNX Runtime")


def tensorrt_packages() -> dict[str, str]:
    """Return the versions of the packages of TensorRT that are installed."""
    return package_versions(
        ("tensorrt", "tensorrt-cu13", "tensorrt-cu13-libs", "tensorrt-cu12", "tensorrt-cu12-libs")
    )
