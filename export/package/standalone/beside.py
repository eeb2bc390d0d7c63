"""What lies beside infer.py: the packages that it needs, and how they become a container."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from smelt.core.errors import MissingDependencyError

INSTALL = "pip install --no-deps -r requirements.txt"
TRIM = (
    "cd \"$(python -c 'import site; print(site.getsitepackages()[0])')\""
    " && rm -rf numpy/tests numpy/*/tests onnxruntime/quantization onnxruntime/tools onnxruntime/transformers"
    # the library of the C API: the module of Python has all of it inside and never loads this one
    " onnxruntime/capi/libonnxruntime.so.*"
)
_RUNTIMES = ("onnxruntime", "onnxruntime-gpu")  # of one version they compute the same on a CPU


def requirements(reader: str) -> list[str]:
    """Return the lines of requirements.txt: the versions with which smelt runs here.

    Args:
        reader: who reads the texts, tokenizers or sentencepiece.

    Raises:
        MissingDependencyError: ONNX Runtime is not installed.
    """
    runtime = next(filter(None, map(_version, _RUNTIMES)), None)
    if runtime is None:
        raise MissingDependencyError("onnxruntime is not installed; pip install onnxruntime.")
    return [f"numpy=={version('numpy')}", f"onnxruntime=={runtime}", f"{reader}=={version(reader)}"]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def requirements_file(reader: str) -> str:
    """Return requirements.txt; what the packages would bring along, infer.py does not import."""
    return "\n".join([f"# {INSTALL}", *requirements(reader)]) + "\n"


def dockerfile() -> str:
    """Return a Dockerfile: the slim image of this Python, the requirements, a user without rights.

    What is removed of the packages is their tests, what makes models instead of running them, and what is
    there for other languages. Where ONNX Runtime missed it, the image would not be built.
    """
    python = ".".join(platform.python_version_tuple()[:2])
    return f"""\
FROM python:{python}-slim
RUN useradd --create-home --uid 1000 model
WORKDIR /model
COPY requirements.txt .
RUN {INSTALL} --no-cache-dir --no-compile && {TRIM} && python -c 'import onnxruntime'
COPY . .
USER model
ENTRYPOINT ["python", "infer.py"]
"""
