"""Options shared by several commands, and printing of untrusted text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
