"""Folders of files beside the artifacts that later steps need again: a teacher's logits, statistics.

Layout: ``kept/KEY/`` with the files and ``kept.json``, which says what they are, of which artifacts, and the
hash of each. Complete or absent; what is damaged is taken for absent, because it can be made again.
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
from smelt.core.files import flush, follow_umask, load_json, sha256_of, size_of, write_json
from smelt.core.store.store import Store

NOTE = "kept.json"
_MAX_NOTE_BYTES = 1_000_000


class Note(BaseModel):
    """What `kept.json` says. what: in words. artifacts: the keys of those that the files are made of."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    schema_version: int = 1
    key: str
    what: str
    artifacts: tuple[str, ...]
    files: dict[str, FileRecord]


@dataclass(frozen=True)
class KeptFiles:
    """A folder of kept files, with its note; None where that cannot be read."""

    path: Path
    note: Note | None

    @property
    def size_bytes(self) -> int:
        """Of all its files."""
        return size_of(self.path)

    @property
    def words(self) -> str:
        """What it is."""
        return "damaged" if self.note is None else self.note.what

    def damage(self) -> tuple[Path, str] | None:
        """Return a file that is not as it was written, and what is wrong with it; None where all are."""
        if self.note is None or self.note.key != self.path.name:
            return self.path / NOTE, "not a note that this version of smelt reads"
        for name, record in self.note.files.items():
            file = self.path / name
            if not file.is_file():
                return file, "missing"
            if file.stat().st_size != record.size_bytes:
                return file, f"{file.stat().st_size:,} bytes, {record.size_bytes:,} were written"
            if sha256_of(file) != record.sha256:
                return file, "its bytes are not those that were written"
        return None


def all_kept(root: Path) -> list[KeptFiles]:
    """Return what the store at `root` keeps besides artifacts and scores, by key."""
    return [_read(path) for path in sorted((root / "kept").glob("*")) if path.is_dir()]


def find_kept(store: Store, key: str) -> KeptFiles | None:
    """Return what is kept under `key`, its damage not yet looked for; None where there is nothing."""
    path = store.root / "kept" / key
    return _read(path) if path.is_dir() else None


def commit_kept(store: Store, folder: Path, key: str, what: str, artifacts: Sequence[str]) -> KeptFiles:
    """Keep the finished `folder` of a workspace under `key`; the rename at the end is when it is there.

    Raises:
        OSError: it could not be written to the disk.
    """
    follow_umask(folder)
    files = {
        path.name: FileRecord(sha256=sha256_of(path), size_bytes=path.stat().st_size)
        for path in sorted(folder.iterdir())
    }
    note = Note(key=key, what=what, artifacts=tuple(artifacts), files=files)
    write_json(folder / NOTE, note.model_dump(mode="json"))
    for path in folder.iterdir():
        flush(path)
    target = store.root / "kept" / key
    target.parent.mkdir(exist_ok=True)
    os.rename(folder, target)
    flush(target.parent)
    return KeptFiles(target, note)


def remove_kept(path: Path) -> None:
    """Remove a folder of kept files."""
    shutil.rmtree(path, ignore_errors=True)


def _read(path: Path) -> KeptFiles:
    return KeptFiles(path, _note(path / NOTE))


def _note(path: Path) -> Note | None:
    try:
        if path.stat().st_size > _MAX_NOTE_BYTES:
            return None
        value: Any = load_json(path)
        note = Note.model_validate(value)
    except (OSError, ValueError, RecursionError):
        return None
    return note if all(Path(name).name == name for name in note.files) else None
