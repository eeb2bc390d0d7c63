"""Other people's tools that open smelt's packages, each in a folder of its own below build/.

`optimum()` returns the environment of a process in which Optimum and transformers 4 are imported, on the
torch, onnx and onnxruntime that are here (15 MB to fetch), `genai()` that of one
with onnxruntime-genai on the same onnxruntime. `gptqmodel()` runs a script with GPTQModel, on the torch and
transformers that are here (10 MB to fetch). `hqq()` is the search for zero points of HQQ's package (0.1 MB to
fetch). `node()` returns a folder in which Node imports
@huggingface/transformers (120 MB to fetch). All skip the test with the reason where that cannot be done.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

OPTIMUM_PACKAGES = (
    "optimum-onnx==0.1.0", "optimum==2.1.0", "transformers==4.57.6", "tokenizers==0.22.2",
    "huggingface_hub==0.36.2", *("requests", "urllib3", "idna", "charset-normalizer", "certifi"),
)  # fmt: skip
GENAI_PACKAGES = ("onnxruntime-genai==0.18.0",)
# as it is: its wheel would be compiled; it asks for a newer torch, and what is used of it needs none
GPTQMODEL_PACKAGE = "gptqmodel==7.7.0"
_GPTQMODEL_DEPENDENCIES = (
    *("pypcre==0.6.4", "logbar==0.4.15", "device-smi==0.5.7", "tokenicer==0.0.14", "defuser==0.0.28"),
    *("threadpoolctl==3.8.0", "requests", "urllib3", "idna", "charset-normalizer", "certifi", "pillow"),
)
HQQ_PACKAGE = "hqq==0.2.8.post1"  # likewise: of its source one file is read, which imports torch alone
TRITON_PACKAGES = ("tritonclient==2.73.0",)
TRANSFORMERS_JS_PACKAGE = "@huggingface/transformers@4.3.1"
_BASE = Path(__file__).resolve().parents[3] / "build"
_SECONDS = 600


def run_in_optimum(script: str, request: dict[str, Any]) -> Any:
    """Run `script` of tests/support/processes with Optimum; return its answer to `request`."""
    site = _require("optimum", _fetch_optimum, "-".join(OPTIMUM_PACKAGES[:3]))
    environment = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return _run_request([sys.executable, str(Path(__file__).with_name(script))], request, environment)


def run_in_gptqmodel(script: str, request: dict[str, Any]) -> Any:
    """Run `script` of tests/support/processes with GPTQModel; return its answer to `request`."""
    site = _require("gptqmodel", _fetch_gptqmodel, GPTQMODEL_PACKAGE)
    paths = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return _run_request([sys.executable, str(Path(__file__).with_name(script))], request, environment)


def genai_environment() -> dict[str, str]:
    """Return the environment of a process of this Python that imports onnxruntime-genai."""
    site = _require("genai", _fetch_genai, GENAI_PACKAGES[0])
    return os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}


def triton_schema() -> Any:
    """Return Triton's own module of model_config.proto, as its client ships it (30 kB of 0.2 MB to fetch)."""
    site = _require("triton", _fetch_triton, TRITON_PACKAGES[0])
    # alone: the package around it wants grpc
    return _load_module(site / "tritonclient" / "grpc" / "model_config_pb2.py")


def hqq_module() -> Any:
    """Return the module of HQQ's package that searches zero points."""
    return _load_module(_require("hqq", _fetch_hqq, HQQ_PACKAGE) / "hqq" / "core" / "optimize.py")


def _load_module(path: Path) -> Any:
    """Return the module that the file `path` is, without the package around it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_in_node(script: str, request: dict[str, Any]) -> Any:
    """Run `script` of tests/support/processes in Node with transformers.js; return its answer."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("there is no node and npm here")
    home = _require("node", _fetch_node, TRANSFORMERS_JS_PACKAGE.replace("/", "-"))
    shutil.copyfile(Path(__file__).with_name(script), home / script)  # imports are found from where it lies
    return _run_request(["node", str(home / script)], request, dict(os.environ))


def _run_request(command: list[str], request: dict[str, Any], environment: dict[str, str]) -> Any:
    done = subprocess.run(
        command, input=json.dumps(request), capture_output=True, encoding="utf-8", env=environment,
        timeout=_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-1000:]
    return json.loads(done.stdout.splitlines()[-1])


def _require(name: str, fetch: Callable[[Path], str | None], version: str) -> Path:
    tool_folder = _make_folder(name, fetch, version)
    if isinstance(tool_folder, str):
        pytest.skip(f"{name} cannot be fetched: {tool_folder}")
    return tool_folder


@functools.cache
def _make_folder(name: str, fetch: Callable[[Path], str | None], version: str) -> Path | str:
    """Return the finished folder, or why there is none; the answer holds for the whole test run."""
    tool_folder = _BASE / name / version
    tool_folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{tool_folder}.lock"):
        if tool_folder.is_dir():
            return tool_folder
        with tempfile.TemporaryDirectory(dir=tool_folder.parent) as space:
            half = Path(space) / "half"
            half.mkdir()
            try:
                problem = fetch(half)
            except subprocess.SubprocessError as error:
                return str(error)
            if problem is None:
                half.rename(tool_folder)
            return problem or tool_folder


def _fetch_optimum(folder: Path) -> str | None:
    return _fetch(OPTIMUM_PACKAGES, folder)


def _fetch_genai(folder: Path) -> str | None:
    return _fetch(GENAI_PACKAGES, folder)


def _fetch_triton(folder: Path) -> str | None:
    return _fetch(TRITON_PACKAGES, folder)


def _fetch_gptqmodel(folder: Path) -> str | None:
    """Put the package's own source next to what it imports."""
    return _fetch_source(GPTQMODEL_PACKAGE, folder) or _fetch(_GPTQMODEL_DEPENDENCIES, folder)


def _fetch_hqq(folder: Path) -> str | None:
    return _fetch_source(HQQ_PACKAGE, folder)


def _fetch_source(package: str, folder: Path) -> str | None:
    """Put a package into `folder` as it lies in the archive of its source; return why that cannot be done."""
    name = package.partition("==")[0]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    if problem := _failure([*pip, "--no-binary", name, "--dest", ".", package], folder):
        return problem
    (archive,) = folder.glob(f"{name}-*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    (folder / archive.name.removesuffix(".tar.gz") / name).rename(folder / name)
    return None


def _fetch(packages: tuple[str, ...], folder: Path) -> str | None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    return _failure([*pip, "--target", str(folder), *packages], folder)


def _fetch_node(folder: Path) -> str | None:
    (folder / "package.json").write_text('{"private": true, "type": "module"}')
    quiet = ["--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
    return _failure(["npm", "install", *quiet, TRANSFORMERS_JS_PACKAGE], folder)


def _failure(command: list[str], folder: Path) -> str | None:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, encoding="utf-8", timeout=_SECONDS, check=False
    )
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no reason given"])[-1]
