"""The content-addressed store: artifacts and scores, each complete or absent.

Layout: ``artifacts/KEY/`` (a folder per artifact), ``scores/KEY.json``, ``tmp/`` (work in progress, each
folder with its marker ``NAME.owner``, cleaned of leftovers of dead processes), ``locks/`` (work that is
being done), ``checked/KEY.json`` (the files' times and sizes when their hashes were last compared, and the
hash of the manifest). Nothing is written in place: a folder is made under `tmp`, flushed, then renamed.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from smelt.core.artifact import MANIFEST, Artifact, FileRecord, Manifest, is_artifact_file, read_artifact
from smelt.core.errors import InputError
from smelt.core.files import (
    apply_umask,
    fsync_path,
    load_json,
    partial_files,
    seconds_since_written,
    sha256_of,
    write_json,
)
from smelt.core.store.locks import STALE_AFTER_S, file_lock, heartbeat, is_active, remove_stale_lock

OWNER_SUFFIX = ".owner"


class Store:
    """Artifacts and scores under one folder, addressed by their keys."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        try:
            for name in ("artifacts", "scores", "tmp", "locks", "checked"):
                folder = self.root / name
                folder.mkdir(parents=True, exist_ok=True)
                if not os.access(folder, os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, f"{folder} may not be written to")
        except OSError as error:
            raise InputError(
                f"{self.root}: cannot be used as a store: {error.strerror}. Use another with --store FOLDER.",
                code="unusable-store",
            ) from error
        self._remove_leftovers()

    def find(
        self, key: str, hint: str = "Run the recipe again with --rebuild to build it again."
    ) -> Artifact | None:
        """Return the artifact with this key, or None if it was never finished.

        Its files are compared with the manifest: hashes are computed only for files whose size, times or
        inode have changed since the last comparison.

        Args:
            key: of the artifact.
            hint: how to repair a damaged one, the end of the message.

        Raises:
            InputError: a file is missing or its bytes have changed.
        """
        path = self.root / "artifacts" / key
        if not path.is_dir():
            return None
        try:
            artifact = read_artifact(path)
            if artifact.key != key:
                raise InputError(
                    f"{path / MANIFEST}: this is the manifest of another artifact.", code="wrong-manifest"
                )
        except InputError as error:
            raise InputError(f"{error} {hint}", code=error.code) from error
        if self._read_checked(key).get("files") != _file_states(artifact):
            try:
                digest = sha256_of(path / MANIFEST)
            except OSError as error:
                raise InputError(
                    f"{path / MANIFEST}: cannot be read: {error}. {hint}", code="unreadable-file"
                ) from error
            # checked twice: another process may have stored a new artifact and its note meanwhile
            if all(self._read_checked(key).get("manifest", digest) != digest for _ in range(2)):
                raise InputError(
                    f"{path / MANIFEST}: the file has been modified since it was written. {hint}",
                    code="changed-manifest",
                )
            artifact.verify(hint)
            self._write_checked(artifact)
        return artifact

    def lock(self, key: str, waiting: Callable[[str], None]) -> AbstractContextManager[None]:
        """Hold the lock of `key`, so that two processes never do the same work at once.

        Args:
            key: of an artifact or score, or any other name of work.
            waiting: called with the owner as text before waiting for it.
        """
        return file_lock(self.root / "locks" / f"{key}.lock", waiting)

    @contextmanager
    def workspace(self) -> Iterator[Path]:
        """Yield an empty folder inside the store that is always removed on leaving."""
        path = self.root / "tmp" / f"{os.getpid()}-{secrets.token_hex(8)}"
        with heartbeat(path.with_name(path.name + OWNER_SUFFIX)):
            path.mkdir()
            try:
                yield path
            finally:
                shutil.rmtree(path, ignore_errors=True)

    def commit(self, folder: Path, manifest: Manifest, replace: bool = False) -> Artifact:
        """Turn the finished `folder` of a workspace into the artifact `manifest.key`.

        The manifest gets the hash of every file; the artifact exists from the final rename on. If another
        process was faster, its artifact is kept; with `replace` the existing one is
        removed.
        """
        apply_umask(folder)
        files = {
            path.relative_to(folder).as_posix(): FileRecord(
                sha256=sha256_of(path), size_bytes=path.stat().st_size
            )
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path != folder / MANIFEST
        }
        if odd := [name for name in files if not is_artifact_file(name)]:
            raise InputError(
                f"{manifest.stage} wrote {odd[0]!r}, but an artifact may contain only weights, graphs,"
                " tokenizer files and settings.",
                code="unknown-file",
            )
        manifest = manifest.model_copy(update={"files": files})
        write_json(folder / MANIFEST, manifest.model_dump())
        for path in folder.rglob("*"):
            fsync_path(path)
        fsync_path(folder)
        target = self.root / "artifacts" / manifest.key
        # a note of the previous artifact would not match the new one
        (self.root / "checked" / f"{manifest.key}.json").unlink(missing_ok=True)
        with self._set_aside(target) if replace else nullcontext():
            try:
                os.rename(folder, target)
            except OSError:
                if not (target / MANIFEST).is_file():
                    raise
        fsync_path(target.parent)
        artifact = read_artifact(target)
        self._write_checked(artifact)
        return artifact

    def remove(self, key: str) -> None:
        """Remove the artifact `key` if it exists."""
        path = self.root / "artifacts" / key
        if path.is_dir():
            with self.workspace() as trash:
                os.rename(path, trash / key)
        (self.root / "checked" / f"{key}.json").unlink(missing_ok=True)

    @contextmanager
    def _set_aside(self, target: Path) -> Iterator[None]:
        """Move the artifact at `target` away; restore it if the context fails."""
        with self.workspace() as trash:
            old = trash / target.name
            if target.is_dir():
                os.rename(target, old)
            try:
                yield
            except BaseException:
                if old.is_dir():
                    os.rename(old, target)
                raise

    def read_score(self, key: str) -> dict[str, Any] | None:
        """Return the score stored under `key`, or None."""
        return _read_json_or_none(self.root / "scores" / f"{key}.json")

    def write_score(self, key: str, value: dict[str, Any]) -> None:
        """Store `value` under `key`, replacing an earlier one."""
        write_json(self.root / "scores" / f"{key}.json", value)

    def _read_checked(self, key: str) -> dict[str, Any]:
        """Return the note of the last comparison of the artifact's bytes; empty if there is none."""
        return _read_json_or_none(self.root / "checked" / f"{key}.json") or {}

    def _write_checked(self, artifact: Artifact) -> None:
        """Note that the bytes of `artifact` are intact with the present states of its files."""
        with suppress(OSError):  # a full disk: they are compared again next time
            found = {"files": _file_states(artifact), "manifest": sha256_of(artifact.path / MANIFEST)}
            write_json(self.root / "checked" / f"{artifact.key}.json", found)

    def _remove_leftovers(self) -> None:
        """Remove leftovers of dead processes: workspaces, markers, partial files, lock files."""
        for marker in (self.root / "tmp").glob(f"*{OWNER_SUFFIX}"):
            if not is_active(marker):
                shutil.rmtree(marker.with_suffix(""), ignore_errors=True)
                marker.unlink(missing_ok=True)
        for path in (self.root / "tmp").iterdir():
            if (
                path.is_dir()
                and not path.with_name(path.name + OWNER_SUFFIX).exists()
                and not _may_be_in_use(path)
            ):
                shutil.rmtree(path, ignore_errors=True)
        for name in ("scores", "checked", "runs", "locks", "tmp"):
            for path in partial_files(self.root / name):
                if not _may_be_in_use(path):
                    path.unlink(missing_ok=True)
        for path in (self.root / "locks").iterdir():
            remove_stale_lock(path)


def _may_be_in_use(path: Path) -> bool:
    """Return whether a process without a marker may still be working on `path`."""
    return seconds_since_written(path) < STALE_AFTER_S


def _file_states(artifact: Artifact) -> dict[str, list[int]]:
    """Return size, times (ns) and inode of each file: every write changes the ctime."""
    states = {}
    for name in (MANIFEST, *artifact.manifest.files):
        try:
            found = (artifact.path / name).stat()
        except (OSError, ValueError):
            continue  # `verify` reports it
        states[name] = [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]
    return states


def _read_json_or_none(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in `path`; None if there is none, or it is incomplete."""
    try:
        value = load_json(path)
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
