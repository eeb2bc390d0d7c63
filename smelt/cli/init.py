"""The command `smelt init`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


@click.command(short_help="Write a first recipe for a model.")
@click.argument("model")
@click.option(
    "--data",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Folder with train, validation and test, or one file, which is split; may be repeated.",
)
@click.option("--out", metavar="FILE", help="File to write (default: NAME.yaml here); - prints the recipe.")
@click.option("--task", help="Task, if the model's family supports several.")
@click.option(
    "--column",
    "columns",
    multiple=True,
    metavar="ROLE=NAME",
    help="Name of a column, such as label=stars; may be repeated.",
)
@click.option("--source-language", metavar="CODE", help="Multilingual models: source, such as en_XX.")
@click.option("--target-language", metavar="CODE", help="Multilingual models: target, such as de_DE.")
@click.option("--fast", is_flag=True, help="Propose stronger compression with longer training.")
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
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
    """Write a first recipe for MODEL (a folder, a hub id or an .onnx file)."""
    from smelt.core.errors import InputError, did_you_mean
    from smelt.data.splits import ALL_TASKS
    from smelt.pipeline.inspect.data_files import parse_columns
    from smelt.pipeline.inspect.init_recipe import InitOptions, init_recipe

    if task is not None and task not in ALL_TASKS:
        known = ", ".join(ALL_TASKS)
        raise InputError(
            f"--task {task}: unknown task. Supported tasks: {known}.{did_you_mean(task, ALL_TASKS)}",
            code="unknown-task",
        )
    named = parse_columns(columns).model_dump(exclude_unset=True)
    options = InitOptions(task, named, (source_language, target_language), fast)
    text, path = init_recipe(model, data, out, task, force, options)
    if path is None:
        click.echo(text, nl=False)
        return
    click.echo(f"Wrote {path}.")
    if not data:
        click.echo("Set your files under data in the recipe.")
    click.echo(f"Next: smelt plan {path}")
