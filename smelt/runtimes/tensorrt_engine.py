"""The sidecar of an engine, and the import of TensorRT.

The sidecar, `NAME.plan.json`, has the engine's builder, source and GPU. It is read before the engine is
loaded: TensorRT refuses an engine of another version or GPU with an assertion about a magic number. TensorRT
is the package `tensorrt`, or `tensorrt_rtx`, which has the same API.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError, MissingDependencyError
from smelt.core.files import load_json, sha256_of
from smelt.runtimes.graph_walk import external_locations

_SCHEMA = 1
_AMPERE = 8  # major compute capability
_REBUILD_HINT = "Build it here: run the recipe on this machine (with --rebuild if it was run here before)."


@dataclass(frozen=True)
class EngineSidecar:
    """Properties of an engine.

    package, version: of TensorRT. gpu: `name`, `compute_capability` and number of `multiprocessors` of the
    GPU that built it, None if it was built ahead of time, without one. graph, graph_sha256: the ONNX file and
    its weights. size_bytes: of the engine. weights: embedded, refittable, or stripped: in the graph, which is
    then next to it. flags: other builder flags. profiles: input -> min, opt and max shape.
    """

    package: str
    version: str
    gpu: dict[str, str] | None
    graph: str
    graph_sha256: str
    size_bytes: int
    weights: str
    version_compatible: bool
    hardware_compatibility: str
    flags: dict[str, Any]
    profiles: list[dict[str, Any]]


def sidecar_path(plan: Path) -> Path:
    """Return the path of an engine's sidecar."""
    return plan.with_name(f"{plan.name}.json")


def write_sidecar(plan: Path, sidecar: EngineSidecar) -> None:
    """Write the sidecar next to the engine `plan`."""
    text = json.dumps({"schema_version": _SCHEMA, **asdict(sidecar)}, indent=1)
    sidecar_path(plan).write_text(text + "\n", encoding="utf-8")


def record_built_engine(plan: Path) -> None:
    """Record for this user, by its hash, that the engine `plan` was built here: `require_trusted_engines`."""
    record = _trusted_engines_folder() / sha256_of(plan)
    record.parent.mkdir(parents=True, exist_ok=True)
    record.touch()


def require_trusted_engines(folder: Path, trusted: bool) -> None:
    """Require that each engine in `folder` was built by this user here, or that the caller trusts it.

    An engine is native code that runs in the process which opens it; a version-compatible one may also
    contain host code (TensorRT, IRuntime::setEngineHostCodeAllowed). Its manifest proves nothing: its author
    also wrote the manifest.

    Raises:
        InputError: `untrusted-engine`.
    """
    for plan in () if trusted else sorted(folder.glob("*.plan")):
        if not (_trusted_engines_folder() / sha256_of(plan)).is_file():
            raise InputError(
                f"{plan}: this TensorRT engine was not built on this machine by your user. Engines"
                " contain native code, which is executed when they are loaded. Build the engine"
                " here, or, if you trust its author, use smelt.load(..., trust_engine=True)"
                " or --trust-engine.",
                code="untrusted-engine",
            )


def _trusted_engines_folder() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "smelt" / "engines"


def read_sidecar(plan: Path) -> EngineSidecar | None:
    """Return the sidecar of the engine `plan`, None if there is none.

    Raises:
        InputError: the file is damaged, or of a later version of smelt.
    """
    path = sidecar_path(plan)
    if not path.is_file():
        return None
    try:
        content = load_json(path)
        if content.pop("schema_version") != _SCHEMA:
            raise InputError(
                f"{path}: this file was written by another version of smelt. {_REBUILD_HINT}",
                code="wrong-version",
            )
        return EngineSidecar(**content)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{path}: cannot be read: {error}. {_REBUILD_HINT}", code="damaged-file") from error


def current_gpu() -> dict[str, str] | None:
    """Return name, compute capability and number of multiprocessors of torch's GPU, None without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return {
        "name": torch.cuda.get_device_name(),
        "compute_capability": f"{major}.{minor}",
        "multiprocessors": str(torch.cuda.get_device_properties().multi_processor_count),
    }


def check_sidecar(
    plan: Path, sidecar: EngineSidecar, package: str, version: str, gpu: dict[str, str] | None
) -> None:
    """Compare the sidecar of `plan` with the TensorRT and the GPU of this machine.

    What is compared is what TensorRT itself records in an engine and requires, see its documentation,
    "Engine Compatibility", https://docs.nvidia.com/deeplearning/tensorrt/latest/.

    Raises:
        InputError: it cannot run here; the message contains its builder, this machine and the fix.
    """
    size = plan.stat().st_size
    if size != sidecar.size_bytes:
        raise InputError(
            f"{plan}: this file has {size:,} bytes, but {sidecar.size_bytes:,} were written; the copy"
            " is incomplete. Copy it again.",
            code="incomplete-file",
        )
    if not _version_matches(sidecar, package, version):
        hint = "" if sidecar.version_compatible else " For later versions too, use version_compatible: true."
        raise InputError(
            f"{plan}: this engine was built by {sidecar.package} {sidecar.version}, but this machine"
            f" has {package} {version}. {_REBUILD_HINT}{hint}",
            code="wrong-engine-version",
        )
    if gpu is not None and not _gpu_matches(sidecar, gpu):
        raise InputError(
            f"{plan}: this engine was built for {_gpu_label(sidecar.gpu)} (hardware_compatibility:"
            f" {sidecar.hardware_compatibility}), but this machine has {_gpu_label(gpu)}."
            f" {_REBUILD_HINT} For several kinds of GPUs, use hardware_compatibility: ampere+.",
            code="wrong-gpu",
        )
    if sidecar.weights == "stripped":
        _require_graph(plan, sidecar)


def _version_matches(sidecar: EngineSidecar, package: str, version: str) -> bool:
    """Return whether a runtime of this version reads the engine.

    Major, minor, patch and build have to be equal; a version-compatible engine of TensorRT is also read by
    later versions with the same major number. TensorRT for RTX has no such engines.
    """
    if sidecar.package != package:
        return False
    current, built = _version_numbers(version), _version_numbers(sidecar.version)
    if sidecar.version_compatible and package == TENSORRT_PACKAGES[0]:
        return current[:1] == built[:1] and current >= built
    return current == built


def _version_numbers(version: str) -> tuple[int, ...]:
    """Return the compared parts of a version: major, minor, patch, build."""
    return tuple(int(number) for number in version.split(".")[:4] if number.isdigit())


def _gpu_matches(sidecar: EngineSidecar, gpu: dict[str, str]) -> bool:
    if sidecar.gpu is None:  # ahead of time: TensorRT for RTX builds the kernels at loading
        return True
    if sidecar.hardware_compatibility == "ampere+":
        return int(gpu["compute_capability"].split(".")[0]) >= _AMPERE
    return gpu["compute_capability"] == sidecar.gpu["compute_capability"]


def other_model_warning(plan: Path, sidecar: EngineSidecar, gpu: dict[str, str] | None) -> str | None:
    """Return a warning if the engine was built on another model of GPU with the same compute capability.

    TensorRT opens such an engine: it requires an equal compute capability, and only warns about another
    number of multiprocessors or other sizes of memory. A part of a GPU (MIG) has the name of the whole one.
    """
    if sidecar.gpu is None or gpu is None or sidecar.hardware_compatibility != "none":
        return None
    if all(gpu.get(name, value) == value for name, value in sidecar.gpu.items()):
        return None
    return (
        f"{plan}: this engine was built on {_gpu_label(sidecar.gpu)}, and this machine has {_gpu_label(gpu)}."
        " It may be slower than one that is built here, or fail: run the recipe on this machine, or build"
        " with hardware_compatibility: same-cc."
    )


def _gpu_label(gpu: dict[str, str] | None) -> str:
    if gpu is None:
        return "no GPU"
    parts = f"{gpu['multiprocessors']} multiprocessors, " if "multiprocessors" in gpu else ""
    return f"{gpu['name']} ({parts}compute capability {gpu['compute_capability']})"


def _require_graph(plan: Path, sidecar: EngineSidecar) -> None:
    graph = plan.with_name(Path(sidecar.graph).name)
    if not graph.is_file():
        raise InputError(
            f"{plan}: its weights are in {graph.name}, which is missing from the folder. Copy that file too.",
            code="missing-file",
        )
    if graph_hash(graph) != sidecar.graph_sha256:
        raise InputError(
            f"{graph}: {plan.name} was built from another graph. {_REBUILD_HINT}", code="changed-file"
        )


def graph_hash(path: Path) -> str:
    """Return the SHA-256 of an ONNX file, including its external weights next to it."""
    import hashlib

    files = external_data_files(path)
    if not files:
        return sha256_of(path)
    return hashlib.sha256("".join(sha256_of(file) for file in (path, *files)).encode()).hexdigest()


def external_data_files(path: Path) -> list[Path]:
    """Return the files with the external weights of an ONNX file."""
    import onnx

    names = external_locations(onnx.load(path, load_external_data=False))
    return [path.parent / name for name in sorted(names)]


TENSORRT_PACKAGES = ("tensorrt", "tensorrt_rtx")
_INSTALL = (
    "TensorRT is not installed. On a machine with an NVIDIA GPU: pip install tensorrt. To continue without"
    " it, mark the step `optional: true`."
)


def find_tensorrt() -> str | None:
    """Return the name of the installed package without importing it, or None."""
    return next((name for name in TENSORRT_PACKAGES if importlib.util.find_spec(name) is not None), None)


def require_tensorrt() -> str:
    """Return the name of the installed package without importing it; for checks before any work.

    Raises:
        MissingDependencyError: neither package is installed.
    """
    name = find_tensorrt()
    if name is None:
        raise MissingDependencyError(_INSTALL, code="not-installed")
    return name


def import_tensorrt() -> Any:
    """Import TensorRT.

    Raises:
        MissingDependencyError: it is not installed, or its libraries cannot be loaded.
        InputError: it is older than TensorRT 11, which has another API.
    """
    name = require_tensorrt()
    try:
        module = importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:
        raise MissingDependencyError(
            f"{name} is installed but cannot be loaded: {error}. {_INSTALL}", code="broken-installation"
        ) from error
    version = str(getattr(module, "__version__", "0"))
    if name == "tensorrt" and int(version.split(".", maxsplit=1)[0]) < 11:
        raise InputError(
            f"TensorRT {version} is installed; smelt needs 11 or newer. pip install --upgrade 'tensorrt>=11'",
            code="outdated-package",
        )
    return module


def make_logger(trt: Any) -> Any:
    """Return a TensorRT logger that stores messages in `.errors` and `.warnings` (lists of text).

    TensorRT's builder and runtime return None on failure and report the reason only here.
    """

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)  # the bindings require it by name
            self.errors: list[str] = []
            self.warnings: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR):
                self.errors.append(message.strip())
            elif severity == trt.ILogger.WARNING:
                self.warnings.append(message.strip())

    return Logger()
