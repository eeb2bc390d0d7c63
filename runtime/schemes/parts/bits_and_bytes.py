"""bitsandbytes, imported when the first product of one of its schemes is computed: that takes seconds."""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from smelt.core.packages import require

if TYPE_CHECKING:
    from collections.abc import Iterator

# The oldest release that computes on the CPU what the newest does (0.48, 0.49 and 0.50 were run).
PACKAGES = {"bitsandbytes": "0.48"}


@cache
def library() -> Any:
    """Return the module.

    Raises:
        MissingDependencyError: it is not installed, too old, or does not load.
    """
    from smelt.core.errors import MissingDependencyError

    for package, oldest in PACKAGES.items():
        require(package, oldest, "products of 4-bit and 8-bit codes of bitsandbytes")
    try:
        with quietly(), _nothing_fetched():
            import bitsandbytes
    except (ImportError, OSError, RuntimeError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise MissingDependencyError(
            f"bitsandbytes is installed but cannot be loaded: {first}. `python -m bitsandbytes` says more.",
            code="broken-installation",
        ) from error
    return bitsandbytes


@contextmanager
def quietly() -> Iterator[None]:
    """Let bitsandbytes be imported without a word in its log, also where peft does it.

    On processors that multiply bf16 it says at each import that the package `kernels` is not there, which it
    wants for a layout that is not used here.
    """
    log = logging.getLogger("bitsandbytes.backends.cpu.ops")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@contextmanager
def _nothing_fetched() -> Iterator[None]:
    """Let bitsandbytes do without `kernels` while it is imported: it would fetch compiled code from a hub."""
    absent = "kernels" not in sys.modules
    if absent:
        sys.modules["kernels"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if absent:
            del sys.modules["kernels"]
