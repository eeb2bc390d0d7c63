"""Find the runs that use a store, so that `smelt store` can identify unused files.

A run uses the artifacts that its `artifacts` folder links to. Runs next to the store are found by their
folders, all others by a record in the store, `runs/HASH.json`; a marker next to it shows an active run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from smelt.core.files import json_hash, load_json, write_json
from smelt.core.store.heartbeat import heartbeat, is_active
from smelt.core.store.locks import file_lock
from smelt.core.store.store import OWNER_SUFFIX


@dataclass(frozen=True)
class StoreRun:
    """A run that uses the store.

    folder: the run's folder. steps: keys of its linked artifacts by step name. busy: whether it is active.
    """

    folder: Path
    steps: dict[str, str]
    busy: bool


def default_store(folder: Path) -> tuple[Path, str]:
    """Return the default store of a run in `folder`, and a note if that is a new one.

    The default is the nearest `.store` of the same user in a parent folder, else `.store` next to the run.
    """
    for above in folder.parents:
        root = above / ".store"
        if all((root / part).is_dir() for part in ("artifacts", "scores")) and _is_owned(root):
            return root, ""
    root = folder.parent / ".store"
    usual = Path("runs", ".store").resolve()
    if not usual.is_dir():
        return root, ""
    return root, (
        f"Using a new store in {root}; artifacts of runs in {usual.parent} are not reused. To share them, use"
        f" --store {usual}."
    )


def _is_owned(root: Path) -> bool:
    return not hasattr(os, "getuid") or root.stat().st_uid == os.getuid()


@contextmanager
def register_run(store: Path, folder: Path) -> Iterator[None]:
    """Register the run in `folder` with the store at `store`, as active until this context exits."""
    note = _run_record(store, folder)
    note.parent.mkdir(exist_ok=True)
    with ExitStack() as stack:
        with cleaning_lock(store):  # waits until a running `smelt store clean` has finished
            if not note.is_file():
                write_json(note, {"folder": str(folder)})
            stack.enter_context(heartbeat(note.with_suffix(OWNER_SUFFIX)))
        yield


def cleaning_lock(store: Path) -> AbstractContextManager[None]:
    """Return the lock that prevents runs from starting while the store at `store` is cleaned."""
    return file_lock(store / "locks" / "clean.lock")


def list_runs(store: Path) -> list[StoreRun]:
    """Return the known runs that use the store at `store`, sorted by folder."""
    folders = {path.parent.resolve() for path in store.parent.glob("*/artifacts") if path.is_dir()}
    busy = set()
    for note in sorted((store / "runs").glob("*.json")):
        folder = _recorded_folder(note)
        if folder is None:
            continue
        folders.add(folder)
        marker = note.with_suffix(OWNER_SUFFIX)
        if marker.exists() and is_active(marker):
            busy.add(folder)
    runs = [StoreRun(folder, linked_keys(store, folder), folder in busy) for folder in folders]
    return sorted((run for run in runs if run.steps or run.busy), key=lambda run: str(run.folder))


def _run_record(store: Path, folder: Path) -> Path:
    return store / "runs" / f"{json_hash(str(folder))[:32]}.json"


def _recorded_folder(note: Path) -> Path | None:
    try:
        value = load_json(note)
        return Path(value["folder"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def linked_keys(store: Path, folder: Path) -> dict[str, str]:
    """Return the keys of the artifacts in `store` that a run links to, by step, including missing ones."""
    place = (store / "artifacts").resolve()
    found = {}
    for link in sorted((folder / "artifacts").glob("*")):
        target = link.resolve()
        if link.is_symlink() and target.parent == place:
            found[link.name] = target.name
    return found
