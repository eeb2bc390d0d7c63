"""What lies beside infer.py: the packages that it needs, how it is asked, and how it becomes a container."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from smelt.core.data import IMAGES
from smelt.core.errors import MissingDependencyError

INSTALL = "pip install --no-deps -r requirements.txt"
TRIM = (
    "cd \"$(python -c 'import site; print(site.getsitepackages()[0])')\""
    " && rm -rf numpy/tests numpy/*/tests onnxruntime/quantization onnxruntime/tools onnxruntime/transformers"
    # the library of the C API: the module of Python has all of it inside and never loads this one
    " onnxruntime/capi/libonnxruntime.so.*"
)
USER, PORT = 1000, 8000  # of the container
_RUNTIMES = ("onnxruntime", "onnxruntime-gpu")  # of one version they compute the same on a CPU


def requirements(reader: str) -> list[str]:
    """Return the lines of requirements.txt: the versions with which smelt runs here.

    Args:
        reader: who reads texts or images: tokenizers, sentencepiece or pillow.

    Raises:
        MissingDependencyError: ONNX Runtime is not installed.
    """
    runtime = next(filter(None, map(_version, _RUNTIMES)), None)
    if runtime is None:
        raise MissingDependencyError(
            "onnxruntime is not installed; pip install onnxruntime.", code="not-installed"
        )
    return [f"numpy=={version('numpy')}", f"onnxruntime=={runtime}", f"{reader}=={version(reader)}"]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def requirements_file(reader: str) -> str:
    """Return requirements.txt; what the packages would bring along, infer.py does not import."""
    return "\n".join([f"# {INSTALL}", *requirements(reader)]) + "\n"


def ask(task: str) -> str:
    """Return the line of a shell that asks the service."""
    url = f"http://127.0.0.1:{PORT}/predict"
    if task == IMAGES:
        return f"curl -H 'Content-Type: image/jpeg' --data-binary @photo.jpg {url}"
    return f"""curl --json '{{"inputs": ["TEXT", "ANOTHER"]}}' {url}"""


def dockerfile() -> str:
    """Return a Dockerfile: the slim image of this Python, the requirements, the service, as a user.

    What is removed of the packages is their tests, what makes models instead of running them, and what is
    there for other languages. Where ONNX Runtime missed it, the image would not be built. The user is a
    number, since Kubernetes cannot tell from a name that it is not root.
    """
    python = ".".join(platform.python_version_tuple()[:2])
    return f"""\
FROM python:{python}-slim
RUN useradd --create-home --uid {USER} model
WORKDIR /model
COPY requirements.txt .
RUN {INSTALL} --no-cache-dir --no-compile && {TRIM} && python -c 'import onnxruntime'
COPY . .
USER {USER}
ENV HOST=0.0.0.0 PORT={PORT} PYTHONDONTWRITEBYTECODE=1
EXPOSE {PORT}
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD ["python", "serve.py", "--health"]
CMD ["python", "serve.py"]
"""
