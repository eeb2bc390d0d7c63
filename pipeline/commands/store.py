"""The command `smelt store`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click


def _place(command: Any) -> Any:
    return click.option(
        "--store",
        "folder",
        default="runs",
        show_default=True,
        type=click.Path(path_type=Path, file_okay=False),
        help="The store, or the folder with its .store.",
    )(command)


@click.group()
def store() -> None:
    """List, clean or check the store of artifacts and scores."""


@store.command("list")
@_place
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_(folder: Path, as_json: bool) -> None:
    """Show every artifact: key, stage, date, size and the runs that use it."""
    from smelt.commands.store_work import list_json, list_text, open_store

    root = open_store(folder)
    click.echo(list_json(root) if as_json else list_text(root))


@store.command()
@_place
@click.option("--yes", is_flag=True, help="Remove; without this it is only shown.")
def clean(folder: Path, yes: bool) -> None:
    """Remove the artifacts and scores that no run uses.

    A run uses what the links in its folder lead to. A run whose folder was
    moved or deleted uses nothing.
    """
    from smelt.commands.store_work import clean_text, open_store, remove_unused, unused

    root = open_store(folder)
    click.echo(clean_text(remove_unused(root) if yes else unused(root), removed=yes))


@store.command()
@_place
def check(folder: Path) -> None:
    """Compare every file with its hash; exit with 1 where one is damaged."""
    from smelt.commands.store_work import check_text, damages, open_store

    root = open_store(folder)
    found = damages(root)
    click.echo(check_text(root, found))
    sys.exit(1 if found else 0)
