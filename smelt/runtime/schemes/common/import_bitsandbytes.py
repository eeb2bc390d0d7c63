"""Imports bitsandbytes at the first multiplication of one of its schemes, because it takes seconds."""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from smelt.core.packages import require_package

if TYPE_CHECKING:
    from collections.abc import Iterator

# The oldest release that computes on the CPU what the newest does (0.48, 0.49 and 0.50 were tested).
BITSANDBYTES_PACKAGES = {"bitsandbytes": "0.48"}


@cache
def import_bitsandbytes() -> Any:
    """Return the module.

    Raises:
        MissingDependencyError: it is not installed, too old, or does not load.
    """
    from smelt.core.errors import MissingDependencyError

    for package, oldest in BITSANDBYTES_PACKAGES.items():
        require_package(package, oldest, "matrix multiplications of bitsandbytes schemes")
    try:
        with silence_bitsandbytes(), _without_kernel_download():
            import bitsandbytes
    except (ImportError, OSError, RuntimeError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise MissingDependencyError(
            f"bitsandbytes is installed but cannot be loaded: {first}. Run `python -m bitsandbytes` for"
            " details.",
            code="broken-installation",
        ) from error
    return bitsandbytes


@contextmanager
def silence_bitsandbytes() -> Iterator[None]:
    """Suppress bitsandbytes' log messages during its import, also by peft.

    On processors that multiply bf16 it reports at each import that the package `kernels` is missing, which it
    needs for an unused layout.
    """
    log = logging.getLogger("bitsandbytes.backends.cpu.ops")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@contextmanager
def _without_kernel_download() -> Iterator[None]:
    """Hide `kernels` while bitsandbytes is imported: it would download compiled code from a hub."""
    absent = "kernels" not in sys.modules
    if absent:
        sys.modules["kernels"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if absent:
            del sys.modules["kernels"]
