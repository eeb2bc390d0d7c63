"""What stands beside an engine, `NAME.plan.json`: what built it, of what, for what; read before it is loaded.

TensorRT refuses an engine of another version or GPU with an assertion about a magic number.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError
from smelt.core.files import load_json, sha256_of

_SCHEMA = 1
_AMPERE = 8  # major compute capability
_BUILD = "Build it here: run the recipe on this machine (--rebuild, if it has been run here)."


@dataclass(frozen=True)
class Sidecar:
    """What an engine is.

    package, version: of TensorRT. gpu: `name` and `compute_capability` of the one that built it, None where
    it was built ahead of time, without one. graph, graph_sha256: the ONNX file and its weights. size_bytes:
    of the engine. weights: embedded, refittable, or stripped: in the graph, which then lies beside it. flags:
    what the builder was told besides. profiles: input -> min, opt and max shape.
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
    """Return where the sidecar of an engine lies."""
    return plan.with_name(f"{plan.name}.json")


def write_sidecar(plan: Path, sidecar: Sidecar) -> None:
    """Write it beside the engine `plan`."""
    text = json.dumps({"schema_version": _SCHEMA, **asdict(sidecar)}, indent=1)
    sidecar_path(plan).write_text(text + "\n", encoding="utf-8")


def note_built(plan: Path) -> None:
    """Record, for this user, that the engine `plan` was built here, by its hash; see `require_trusted`."""
    record = _records() / sha256_of(plan)
    record.parent.mkdir(parents=True, exist_ok=True)
    record.touch()


def require_trusted(folder: Path, trusted: bool) -> None:
    """Require that each engine in `folder` was built by this user here, or that the caller trusts it.

    An engine is native code that runs in the process which opens it; a version-compatible one may bring host
    code besides (TensorRT, IRuntime::setEngineHostCodeAllowed). Its manifest proves nothing: whoever wrote
    the engine wrote that too.

    Raises:
        InputError: `untrusted-engine`.
    """
    for plan in () if trusted else sorted(folder.glob("*.plan")):
        if not (_records() / sha256_of(plan)).is_file():
            raise InputError(
                f"{plan}: this TensorRT engine was not built here by you. Engines are native code: to open"
                " one runs whatever its author put in. Build it here, or, if you trust who made it, use"
                " smelt.load(..., trust_engine=True) or --trust-engine.",
                code="untrusted-engine",
            )


def _records() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "smelt" / "engines"


def read_sidecar(plan: Path) -> Sidecar | None:
    """Return what stands beside the engine `plan`, None where nothing does.

    Raises:
        InputError: the file is damaged, or of a later smelt.
    """
    path = sidecar_path(plan)
    if not path.is_file():
        return None
    try:
        said = load_json(path)
        if said.pop("schema_version") != _SCHEMA:
            raise InputError(f"{path}: written by another version of smelt. {_BUILD}", code="wrong-version")
        return Sidecar(**said)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{path}: cannot be read: {error}. {_BUILD}", code="damaged-file") from error


def gpu_here() -> dict[str, str] | None:
    """Return name and compute capability of the GPU that torch uses, None where it sees none."""
    import torch

    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return {"name": torch.cuda.get_device_name(), "compute_capability": f"{major}.{minor}"}


def check_sidecar(plan: Path, said: Sidecar, package: str, version: str, gpu: dict[str, str] | None) -> None:
    """Compare what stands beside `plan` with the TensorRT and the GPU that are here.

    Raises:
        InputError: it cannot run here; the message says what built it, what is here and what to do.
    """
    size = plan.stat().st_size
    if size != said.size_bytes:
        raise InputError(
            f"{plan}: {size:,} bytes, but {said.size_bytes:,} were written; the copy is not whole. Copy"
            " it again.",
            code="incomplete-file",
        )
    if not _version_fits(said, package, version):
        hint = (
            "" if said.version_compatible else " An engine for later versions too: version_compatible: true."
        )
        raise InputError(
            f"{plan}: built by {said.package} {said.version}; here is {package} {version}. {_BUILD}{hint}",
            code="wrong-engine-version",
        )
    if gpu is not None and not _gpu_fits(said, gpu):
        raise InputError(
            f"{plan}: built for {_named(said.gpu)} (hardware_compatibility: {said.hardware_compatibility});"
            f" here is {_named(gpu)}. {_BUILD} For more kinds of GPUs: hardware_compatibility: ampere+.",
            code="wrong-gpu",
        )
    if said.weights == "stripped":
        _require_graph(plan, said)


def _version_fits(said: Sidecar, package: str, version: str) -> bool:
    if said.package != package:
        return False
    here, built = _numbers(version), _numbers(said.version)
    return here >= built if said.version_compatible else here == built


def _numbers(version: str) -> tuple[int, ...]:
    """Return the parts that count: major, minor, patch."""
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())


def _gpu_fits(said: Sidecar, gpu: dict[str, str]) -> bool:
    if said.gpu is None:  # ahead of time: TensorRT for RTX makes the kernels when it is loaded
        return True
    if said.hardware_compatibility == "ampere+":
        return int(gpu["compute_capability"].split(".")[0]) >= _AMPERE
    return gpu["compute_capability"] == said.gpu["compute_capability"]


def _named(gpu: dict[str, str] | None) -> str:
    return "no GPU" if gpu is None else f"{gpu['name']} (compute capability {gpu['compute_capability']})"


def _require_graph(plan: Path, said: Sidecar) -> None:
    graph = plan.with_name(Path(said.graph).name)
    if not graph.is_file():
        raise InputError(
            f"{plan}: its weights lie in {graph.name}, which is not beside it. Copy that file too.",
            code="missing-file",
        )
    if hash_of_graph(graph) != said.graph_sha256:
        raise InputError(
            f"{graph}: not the graph that {plan.name} was built from. {_BUILD}", code="changed-file"
        )


def hash_of_graph(path: Path) -> str:
    """Return the SHA-256 of an ONNX file, or of its and its weights' where these lie beside it."""
    import hashlib

    files = external_files(path)
    if not files:
        return sha256_of(path)
    return hashlib.sha256("".join(sha256_of(file) for file in (path, *files)).encode()).hexdigest()


def external_files(path: Path) -> list[Path]:
    """Return the files beside an ONNX file in which its weights lie."""
    import onnx

    tensors = onnx.load(path, load_external_data=False).graph.initializer
    names = {e.value for tensor in tensors for e in tensor.external_data if e.key == "location"}
    return [path.parent / name for name in sorted(names)]
