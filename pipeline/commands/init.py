"""The command `smelt init`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


@click.command(short_help="Look at a model, write a first recipe.")
@click.argument("model")
@click.option(
    "--data",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A folder with train, validation and test, or a file, which is divided; may be repeated.",
)
@click.option("--out", metavar="FILE", help="The recipe (default: NAME.yaml here); - prints it.")
@click.option("--task", help="What the model is for, where its family can do several tasks.")
@click.option(
    "--column", "columns", multiple=True, metavar="ROLE=NAME", help="Where a column has another name."
)
@click.option("--source-language", metavar="CODE", help="Of a multilingual model, as in en_XX.")
@click.option("--target-language", metavar="CODE", help="Of a multilingual model, as in de_DE.")
@click.option("--fast", is_flag=True, help="As fast as we know to make it, by a longer training.")
@click.option("--force", is_flag=True, help="Write over a file that is there.")
def init(
    model: str,
    data: tuple[Path, ...],
    out: str | None,
    task: Any,
    columns: tuple[str, ...],
    source_language: str | None,
    target_language: str | None,
    fast: bool,
    force: bool,
) -> None:
    """Look at MODEL (a folder, a hub id or an .onnx file) and write a first recipe for it."""
    from smelt.core.data import EVERY_TASK
    from smelt.core.errors import InputError, nearest
    from smelt.look.data import parse_columns
    from smelt.look.init_recipe import Wishes, init_recipe

    if task is not None and task not in EVERY_TASK:
        known = ", ".join(EVERY_TASK)
        raise InputError(
            f"--task {task}: no such task; there are {known}.{nearest(task, EVERY_TASK)}", code="unknown-task"
        )
    named = parse_columns(columns).model_dump(exclude_unset=True)
    wishes = Wishes(task, named, (source_language, target_language), fast)
    text, path = init_recipe(model, data, out, task, force, wishes)
    if path is None:
        click.echo(text, nl=False)
        return
    click.echo(f"Wrote {path}.")
    if not data:
        click.echo("Name your files in it under data.")
    click.echo(f"Next: smelt plan {path}")
