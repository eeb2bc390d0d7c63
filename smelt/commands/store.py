"""The command `smelt store`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click


def _store_option(command: Any) -> Any:
    return click.option(
        "--store",
        "folder",
        default="runs",
        show_default=True,
        type=click.Path(path_type=Path, file_okay=False),
        help="The store, or a folder with a .store in it.",
    )(command)


@click.group()
def store() -> None:
    """List, clean or check the stored artifacts and scores."""


@store.command("list")
@_store_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_(folder: Path, as_json: bool) -> None:
    """List all artifacts: key, stage, date, size and the runs that use them."""
    from smelt.commands.store_maintenance import find_store, store_list_json, store_list_text

    root = find_store(folder)
    click.echo(store_list_json(root) if as_json else store_list_text(root))


@store.command()
@_store_option
@click.option("--yes", is_flag=True, help="Remove; without this, only list.")
def clean(folder: Path, yes: bool) -> None:
    """Remove the artifacts and scores that no run uses.

    A run uses the artifacts that its folder links to. A run whose folder was
    moved or deleted uses nothing.
    """
    from smelt.commands.store_maintenance import find_store, find_unused, remove_unused, store_clean_text

    root = find_store(folder)
    click.echo(store_clean_text(remove_unused(root) if yes else find_unused(root), removed=yes))


@store.command()
@_store_option
def check(folder: Path) -> None:
    """Compare every file with its hash; exit with 1 if one is damaged."""
    from smelt.commands.store_maintenance import find_damaged_files, find_store, store_check_text

    root = find_store(folder)
    found = find_damaged_files(root)
    click.echo(store_check_text(root, found))
    sys.exit(1 if found else 0)
