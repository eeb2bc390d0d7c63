"""Which runs use a store: what `smelt store` must know before it calls anything unused.

A run's links in its `artifacts` folder say what it uses. Runs beside the store are found there; a run
elsewhere is known by the note that it leaves in the store, `runs/HASH.json`; beside it is a marker while it
works.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from smelt.core.files import hash_of, load_json, write_json
from smelt.core.store.locks import lock
from smelt.core.store.presence import is_present, present
from smelt.core.store.store import OWNER


@dataclass(frozen=True)
class Run:
    """A run that uses the store.

    folder: where its report is. steps: its linked artifacts, step name -> key. busy: it works now.
    """

    folder: Path
    steps: dict[str, str]
    busy: bool


def place_of_store(folder: Path) -> tuple[Path, str]:
    """Return the store of a run in `folder` that names none, and what to say where that is a new one.

    It is the nearest `.store` in a folder above, of the same user; without one it is made beside the run.
    """
    for above in folder.parents:
        root = above / ".store"
        if all((root / part).is_dir() for part in ("artifacts", "scores")) and _is_own(root):
            return root, ""
    root = folder.parent / ".store"
    usual = Path("runs", ".store").resolve()
    if not usual.is_dir():
        return root, ""
    return root, (
        f"a new store is begun in {root}: what runs in {usual.parent} made is not found there"
        f" (--store {usual} shares it)."
    )


def _is_own(root: Path) -> bool:
    return not hasattr(os, "getuid") or root.stat().st_uid == os.getuid()


@contextmanager
def at_work(store: Path, folder: Path) -> Iterator[None]:
    """Note that the run in `folder` uses the store at `store`, and that it works until this context ends."""
    note = _note(store, folder)
    note.parent.mkdir(exist_ok=True)
    with ExitStack() as stack:
        with cleaning(store):  # what is being removed now is gone before this run looks for it
            if not note.is_file():
                write_json(note, {"folder": str(folder)})
            stack.enter_context(present(note.with_suffix(OWNER)))
        yield


def cleaning(store: Path) -> AbstractContextManager[None]:
    """Hold what keeps runs from beginning on the store at `store`, and it from being cleaned meanwhile."""
    return lock(store / "locks" / "clean.lock")


def runs_of(store: Path) -> list[Run]:
    """Return the runs that are known to use the store at `store`, by the name of their folder."""
    folders = {path.parent.resolve() for path in store.parent.glob("*/artifacts") if path.is_dir()}
    busy = set()
    for note in sorted((store / "runs").glob("*.json")):
        folder = _folder_in(note)
        if folder is None:
            continue
        folders.add(folder)
        marker = note.with_suffix(OWNER)
        if marker.exists() and is_present(marker):
            busy.add(folder)
    runs = [Run(folder, linked_keys(store, folder), folder in busy) for folder in folders]
    return sorted((run for run in runs if run.steps or run.busy), key=lambda run: str(run.folder))


def _note(store: Path, folder: Path) -> Path:
    return store / "runs" / f"{hash_of(str(folder))[:32]}.json"


def _folder_in(note: Path) -> Path | None:
    try:
        value = load_json(note)
        return Path(value["folder"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def linked_keys(store: Path, folder: Path) -> dict[str, str]:
    """Return the keys of the artifacts in `store` that the run's links lead to, also where they are gone."""
    place = (store / "artifacts").resolve()
    found = {}
    for link in sorted((folder / "artifacts").glob("*")):
        target = link.resolve()
        if link.is_symlink() and target.parent == place:
            found[link.name] = target.name
    return found
