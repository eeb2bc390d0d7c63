"""Write the files next to infer.py: requirements.txt, an example request and a Dockerfile."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from smelt.core.data import IMAGE_CLASSIFICATION
from smelt.core.errors import MissingDependencyError

INSTALL_COMMAND = "pip install --no-deps -r requirements.txt"
TRIM_COMMAND = (
    "cd \"$(python -c 'import site; print(site.getsitepackages()[0])')\""
    " && rm -rf numpy/tests numpy/*/tests onnxruntime/quantization onnxruntime/tools onnxruntime/transformers"
    # the library of the C API: the Python module does not load it
    " onnxruntime/capi/libonnxruntime.so.*"
)
USER, PORT = 1000, 8000  # of the container
_RUNTIMES = ("onnxruntime", "onnxruntime-gpu")  # of one version they compute the same on a CPU


def requirements(reader: str) -> list[str]:
    """Return the lines of requirements.txt: the versions that smelt runs with here.

    Args:
        reader: the library that reads texts or images: tokenizers, sentencepiece or pillow.

    Raises:
        MissingDependencyError: ONNX Runtime is not installed.
    """
    runtime = next(filter(None, map(_version, _RUNTIMES)), None)
    if runtime is None:
        raise MissingDependencyError(
            "onnxruntime is not installed. Run: pip install onnxruntime", code="not-installed"
        )
    return [f"numpy=={version('numpy')}", f"onnxruntime=={runtime}", f"{reader}=={version(reader)}"]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def requirements_file(reader: str) -> str:
    """Return requirements.txt; infer.py does not import the packages' own dependencies."""
    return "\n".join([f"# {INSTALL_COMMAND}", *requirements(reader)]) + "\n"


def curl_command(task: str) -> str:
    """Return the shell command that sends a request to the service."""
    url = f"http://127.0.0.1:{PORT}/predict"
    if task == IMAGE_CLASSIFICATION:
        return f"curl -H 'Content-Type: image/jpeg' --data-binary @photo.jpg {url}"
    return f"""curl --json '{{"inputs": ["TEXT", "ANOTHER"]}}' {url}"""


def dockerfile() -> str:
    """Return a Dockerfile: the slim image of this Python, the requirements, the service, a user.

    Tests of the packages, tools that create models, and libraries for other languages are removed. The build
    fails if ONNX Runtime needs one of them. The user is a number, because Kubernetes cannot check from a name
    that it is not root.
    """
    python = ".".join(platform.python_version_tuple()[:2])
    return f"""\
FROM python:{python}-slim
RUN useradd --create-home --uid {USER} model
WORKDIR /model
COPY requirements.txt .
RUN {INSTALL_COMMAND} --no-cache-dir --no-compile && {TRIM_COMMAND} && python -c 'import onnxruntime'
COPY . .
USER {USER}
ENV HOST=0.0.0.0 PORT={PORT} PYTHONDONTWRITEBYTECODE=1
EXPOSE {PORT}
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD ["python", "serve.py", "--health"]
CMD ["python", "serve.py"]
"""
