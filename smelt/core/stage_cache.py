"""Intermediate results of stages that later steps use again, such as a teacher's logits or statistics.

They are stored under a key of all their dependencies: JSON values among the scores of the store, files in
``kept/KEY/`` with ``kept.json``: their description, their source artifacts, and the hash of each file. A
folder is complete or absent. Damaged files count as absent, because they can be made again.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from smelt.core.artifact import FileRecord
from smelt.core.files import (
    apply_umask,
    folder_size,
    fsync_path,
    json_hash,
    read_hashed_json,
    sha256_of,
    write_hashed_json,
)
from smelt.core.store import Store

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
        """Return a damaged file and what is wrong with it; None if all are intact."""
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
    write_hashed_json(folder / CACHE_NOTE_FILE, note.model_dump(mode="json"))
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
        note = CacheNote.model_validate(read_hashed_json(path))
    except (OSError, ValueError):
        return None
    return note if all(Path(name).name == name for name in note.files) else None


@dataclass(frozen=True)
class StageCache:
    """Returns cached results to a stage.

    versions: of the libraries, on which all results depend. log: writes a line to the log.
    """

    store: Store
    versions: Mapping[str, str]
    log: Callable[[str], None]

    def cached_value(self, what: Mapping[str, Any], make: Callable[[], Any]) -> Any:
        """Return the result of `make` (JSON), from the store if it is cached."""
        key = self.value_key(what)
        with self.store.lock(key, self._report_wait):
            entry = self.store.read_score(key)
            if entry is None:
                entry = {"artifact": what.get("artifact"), "made": make()}
                self.store.write_score(key, entry)
        return entry["made"]

    @contextmanager
    def cached_files(
        self, what: Mapping[str, Any], make: Callable[[Path], None]
    ) -> Iterator[tuple[Path, bool]]:
        """Yield the folder with the files of `make`, and whether they were cached.

        Damaged files are made again.
        """
        key = self.files_key(what)
        description, artifacts = str(what["what"]), list(what["artifacts"])
        with self.store.lock(key, self._report_wait):
            entry, cached = self.find_intact(key, description), True
            if entry is None:
                cached, started = False, time.monotonic()
                with self.store.workspace() as space:
                    folder = space / "out"
                    folder.mkdir()
                    make(folder)
                    entry = commit_cached_files(self.store, folder, key, description, artifacts)
                source = f"made in {time.monotonic() - started:,.1f} s and cached"
            else:
                source = "from the cache"
            self.log(f"  {description}: {entry.size_bytes / 1e6:,.1f} MB, {source}")
        yield entry.path, cached

    def value_key(self, what: Mapping[str, Any]) -> str:
        """Return the key of a cached value."""
        return json_hash({"kept": dict(what), "libraries": dict(self.versions)})

    def files_key(self, what: Mapping[str, Any]) -> str:
        """Return the key of cached files."""
        return json_hash({"files": dict(what), "libraries": dict(self.versions)})

    def find_intact(self, key: str, words: str) -> CachedFiles | None:
        """Return the cached files `key`; damaged ones are removed."""
        entry = find_cached_files(self.store, key)
        damage = entry.find_damage() if entry is not None else None
        if entry is None or damage is None:
            return entry
        self.log(f"  {words}: {damage[0]}: {damage[1]}; made again")
        remove_cached_files(entry.path)
        return None

    def _report_wait(self, holder: str) -> None:
        self.log(f"waiting for {holder}, which computes the same files")
