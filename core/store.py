"""The content-addressed store: artifacts and scores, each complete or absent.

Layout: ``artifacts/KEY/`` (a folder per artifact), ``scores/KEY.json``, ``tmp/`` (work in progress,
swept of what dead processes left). Nothing is ever written in place: a folder is made under `tmp`,
flushed, then renamed.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from smelt.core.artifact import MANIFEST, Artifact, FileRecord, Manifest, read_artifact
from smelt.core.errors import InputError
from smelt.core.files import sha256_of, write_json


class Store:
    """Artifacts and scores under one folder, addressed by their keys."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        try:
            for name in ("artifacts", "scores", "tmp"):
                (self.root / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{self.root}: cannot be used as a store: {error.strerror}.") from error
        self._sweep()

    def find(self, key: str) -> Artifact | None:
        """Return the artifact with this key, or None where it was never finished."""
        path = self.root / "artifacts" / key
        return read_artifact(path) if path.is_dir() else None

    @contextmanager
    def workspace(self) -> Iterator[Path]:
        """Give an empty folder inside the store that is removed on leaving, whatever happens."""
        path = Path(tempfile.mkdtemp(dir=self.root / "tmp", prefix=f"{os.getpid()}-"))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def commit(self, folder: Path, manifest: Manifest) -> Artifact:
        """Turn the finished `folder` of a workspace into the artifact `manifest.key`.

        The manifest gets the hash of every file; the rename at the end is the moment from which
        the artifact exists. Where another process was quicker, its artifact is kept.
        """
        files = {
            str(path.relative_to(folder)): FileRecord(sha256=sha256_of(path), size_bytes=path.stat().st_size)
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path.name != MANIFEST
        }
        manifest = manifest.model_copy(update={"files": files})
        write_json(folder / MANIFEST, manifest.model_dump())
        for path in folder.rglob("*"):
            _flush(path)
        _flush(folder)
        target = self.root / "artifacts" / manifest.key
        try:
            os.rename(folder, target)
        except OSError:
            if not (target / MANIFEST).is_file():
                raise
        _flush(target.parent)
        return read_artifact(target)

    def remove(self, key: str) -> None:
        """Forget the artifact `key`, if it is there."""
        path = self.root / "artifacts" / key
        if path.is_dir():
            with self.workspace() as trash:
                os.rename(path, trash / key)

    def read_score(self, key: str) -> dict[str, Any] | None:
        """Return the score kept under `key`, or None."""
        path = self.root / "scores" / f"{key}.json"
        if not path.is_file():
            return None
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            return None
        return value if isinstance(value, dict) else None

    def write_score(self, key: str, value: dict[str, Any]) -> None:
        """Keep `value` under `key`, replacing what was there."""
        write_json(self.root / "scores" / f"{key}.json", value)

    def _sweep(self) -> None:
        """Remove workspaces whose process no longer lives."""
        for path in (self.root / "tmp").iterdir():
            owner = path.name.split("-")[0]
            if owner.isdigit() and not _alive(int(owner)):
                shutil.rmtree(path, ignore_errors=True)


def _alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _flush(path: Path) -> None:
    """Ask the system to write a file's or folder's content to the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open a folder to flush it
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
