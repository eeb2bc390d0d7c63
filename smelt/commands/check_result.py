"""The result of one check of `smelt doctor`, and the test of a runtime."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

CheckGroup = Literal["machine", "packages", "runtimes", "processor"]


@dataclass(frozen=True)
class CheckResult:
    """One line of the output of `smelt doctor`.

    ok: True if it works, False if not, None for information. detail: version or cause. remedy: command or
    page to install what is missing; empty if nothing is.
    """

    group: CheckGroup
    name: str
    ok: bool | None
    detail: str
    remedy: str = ""


def first_error_line(error: BaseException) -> str:
    """Return the first line of an error's message, at most 200 characters."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return first if len(first) <= 200 else first[:197] + "..."


def check_runtime(name: str, check: Callable[[], str], remedy: str = "") -> CheckResult:
    """Test one runtime and return the result. check: runs the test and returns the detail."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # ONNX Runtime prints its failures
            return CheckResult("runtimes", name, True, check())
    except ModuleNotFoundError as error:
        return CheckResult("runtimes", name, False, f"{error.name or name} is not installed", remedy)
    except Exception as error:  # any error of a runtime is the result
        return CheckResult("runtimes", name, False, first_error_line(error), remedy)
