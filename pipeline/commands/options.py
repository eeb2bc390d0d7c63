"""Options that several commands take, and how they print what may hold words of strangers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

FOLDER = click.Path(path_type=Path, file_okay=False)


def show(text: str, err: bool = False) -> None:
    """Print what may hold words of strangers: data, model folders, recipes."""
    from smelt.core.text import printable

    click.echo(printable(text), err=err)


def search(command: Any) -> Any:
    """Add the options that say how texts are generated."""
    most = click.option(
        "--max-new-tokens",
        type=click.IntRange(1, 4096),
        metavar="N",
        help="The longest output (default: the model's, else 128).",
    )
    beams = click.option(
        "--num-beams",
        default=1,
        show_default=True,
        type=click.IntRange(1, 64),
        help="Beams of a beam search; 1 is greedy search.",
    )
    return beams(most(command))


def device(command: Any) -> Any:
    """Add the options that say where to run, and that an engine from elsewhere may run."""
    places = click.Choice(["auto", "cpu", "cuda"])
    command = click.option(
        "--trust-engine", is_flag=True, help="Open a TensorRT engine that was built elsewhere: native code."
    )(command)
    return click.option("--device", default="auto", show_default=True, type=places, help="Where to run.")(
        command
    )
