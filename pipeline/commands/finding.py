"""What the doctor says of one thing, and how a runtime is tried."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Group = Literal["machine", "packages", "runtimes", "processor"]


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's answer.

    ok: True works, False does not, None is only said. detail: version or cause. remedy: what to type
    or where to go in order to get what is missing; empty where nothing is.
    """

    group: Group
    name: str
    ok: bool | None
    detail: str
    remedy: str = ""


def cause(error: BaseException) -> str:
    """Return the first line of what an error says, not too long."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return first if len(first) <= 200 else first[:197] + "..."


def attempt(name: str, work: Callable[[], str], remedy: str = "") -> Finding:
    """Try one runtime; `work` returns what to say of it."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # ONNX Runtime prints its failures
            return Finding("runtimes", name, True, work())
    except ModuleNotFoundError as error:
        return Finding("runtimes", name, False, f"{error.name or name} is not installed", remedy)
    except Exception as error:  # whatever a runtime raises is the finding
        return Finding("runtimes", name, False, cause(error), remedy)
