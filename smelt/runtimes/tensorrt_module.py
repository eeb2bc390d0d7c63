"""Imports TensorRT: the package `tensorrt`, or `tensorrt_rtx`, which has the same API."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from smelt.core.errors import InputError, MissingDependencyError

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
