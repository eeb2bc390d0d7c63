"""Options shared by several commands, and printing of untrusted text.

The result of one check of `smelt doctor`, and the test of a runtime.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click

FOLDER_TYPE = click.Path(path_type=Path, file_okay=False)


def print_untrusted(text: str, err: bool = False) -> None:
    """Print untrusted text, from data, model folders or recipes, with control characters escaped."""
    from smelt.core.text import escape_controls

    click.echo(escape_controls(text), err=err)


def generation_options(command: Any) -> Any:
    """Add the options for text generation."""
    most = click.option(
        "--max-new-tokens",
        type=click.IntRange(1, 4096),
        metavar="N",
        help="Maximum output length (default: the model's, else 128).",
    )
    beams = click.option(
        "--num-beams",
        default=1,
        show_default=True,
        type=click.IntRange(1, 64),
        help="Number of beams; 1 is greedy search.",
    )
    return beams(most(command))


def device_options(command: Any) -> Any:
    """Add the options for the device and for trusting TensorRT engines."""
    places = click.Choice(["auto", "cpu", "cuda"])
    command = click.option(
        "--trust-engine", is_flag=True, help="Allow a TensorRT engine built elsewhere (it is native code)."
    )(command)
    return click.option("--device", default="auto", show_default=True, type=places, help="Device to run on.")(
        command
    )


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
