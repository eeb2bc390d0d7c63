"""Folders of cached files in the store that later steps use again: a teacher's logits, statistics.

Layout: ``kept/KEY/`` with the files and ``kept.json`` with their description, their source artifacts, and the
hash of each. Complete or absent; damaged files count as absent, because they can be made again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from smelt.core.artifact import FileRecord
from smelt.core.files import apply_umask, folder_size, fsync_path, load_json, sha256_of, write_json
from smelt.core.store.store import Store

CACHE_NOTE_FILE = "kept.json"
_MAX_NOTE_BYTES = 1_000_000


class CacheNote(BaseModel):
    """The content of `kept.json`. what: a description. artifacts: the keys of the source artifacts."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    schema_version: int = 1
    key: str
    what: str
    artifacts: tuple[str, ...]
    files: dict[str, FileRecord]


@dataclass(frozen=True)
class CachedFiles:
    """A folder of cached files, with its note; the note is None if unreadable."""

    path: Path
    note: CacheNote | None

    @property
    def size_bytes(self) -> int:
        """The size of all its files in bytes."""
        return folder_size(self.path)

    @property
    def description(self) -> str:
        """The description of the files."""
        return "damaged" if self.note is None else self.note.what

    def find_damage(self) -> tuple[Path, str] | None:
        """Return a damaged file and the damage; None if all are intact."""
        if self.note is None or self.note.key != self.path.name:
            return self.path / CACHE_NOTE_FILE, "not a note that this version of smelt can read"
        for name, record in self.note.files.items():
            file = self.path / name
            if not file.is_file():
                return file, "missing"
            if file.stat().st_size != record.size_bytes:
                return file, f"{file.stat().st_size:,} bytes instead of {record.size_bytes:,}"
            if sha256_of(file) != record.sha256:
                return file, "its bytes are not those that were written"
        return None


def list_cached_files(root: Path) -> list[CachedFiles]:
    """Return the cached files of the store at `root`, by key."""
    return [_read_cached_files(path) for path in sorted((root / "kept").glob("*")) if path.is_dir()]


def find_cached_files(store: Store, key: str) -> CachedFiles | None:
    """Return the cached files under `key`, not checked for damage; None if there are none."""
    path = store.root / "kept" / key
    return _read_cached_files(path) if path.is_dir() else None


def commit_cached_files(
    store: Store, folder: Path, key: str, description: str, artifacts: Sequence[str]
) -> CachedFiles:
    """Move the finished `folder` of a workspace to the cache under `key`, by an atomic rename.

    Raises:
        OSError: it could not be written to the disk.
    """
    apply_umask(folder)
    files = {
        path.name: FileRecord(sha256=sha256_of(path), size_bytes=path.stat().st_size)
        for path in sorted(folder.iterdir())
    }
    note = CacheNote(key=key, what=description, artifacts=tuple(artifacts), files=files)
    write_json(folder / CACHE_NOTE_FILE, note.model_dump(mode="json"))
    for path in folder.iterdir():
        fsync_path(path)
    target = store.root / "kept" / key
    target.parent.mkdir(exist_ok=True)
    os.rename(folder, target)
    fsync_path(target.parent)
    return CachedFiles(target, note)


def remove_cached_files(path: Path) -> None:
    """Remove a folder of cached files."""
    shutil.rmtree(path, ignore_errors=True)


def _read_cached_files(path: Path) -> CachedFiles:
    return CachedFiles(path, _read_note(path / CACHE_NOTE_FILE))


def _read_note(path: Path) -> CacheNote | None:
    try:
        if path.stat().st_size > _MAX_NOTE_BYTES:
            return None
        value: Any = load_json(path)
        note = CacheNote.model_validate(value)
    except (OSError, ValueError, RecursionError):
        return None
    return note if all(Path(name).name == name for name in note.files) else None
