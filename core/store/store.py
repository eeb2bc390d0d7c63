"""The content-addressed store: artifacts and scores, each complete or absent.

Layout: ``artifacts/KEY/`` (a folder per artifact), ``scores/KEY.json``, ``tmp/`` (work in progress, each
folder with its marker ``NAME.owner``, swept of what dead processes left), ``locks/`` (who is making what
now), ``checked/KEY.json`` (the files' times and sizes when their hashes were last compared, and the hash of
the manifest). Nothing is ever written in place: a folder is made under `tmp`, flushed, then renamed.
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

from smelt.core.artifact import MANIFEST, Artifact, FileRecord, Manifest, is_known_kind, read_artifact
from smelt.core.errors import InputError
from smelt.core.files import (
    flush,
    follow_umask,
    load_json,
    seconds_since_written,
    sha256_of,
    unfinished_in,
    write_json,
)
from smelt.core.store.locks import lock, remove_if_free
from smelt.core.store.presence import SILENT_S, is_present, present

OWNER = ".owner"


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
                f"{self.root}: cannot be used as a store: {error.strerror}. Give another with --store"
                " FOLDER.",
                code="unusable-store",
            ) from error
        self._sweep()

    def find(
        self, key: str, mend: str = "Run the recipe again with --rebuild to build it again."
    ) -> Artifact | None:
        """Return the artifact with this key, or None where it was never finished.

        Its bytes are compared with the manifest. That is cheap: hashes are computed only where a file's
        size, times or inode are not those of the last comparison.

        Args:
            key: of the artifact.
            mend: how to repair a damaged one, the end of the message.

        Raises:
            InputError: a file is missing or has other bytes than when it was written.
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
            raise InputError(f"{error} {mend}", code=error.code) from error
        if self._noted(key).get("files") != _file_states(artifact):
            try:
                digest = sha256_of(path / MANIFEST)
            except OSError as error:
                raise InputError(
                    f"{path / MANIFEST}: cannot be read: {error}. {mend}", code="unreadable-file"
                ) from error
            # asked twice: another process may have put a new artifact and its note in place meanwhile
            if all(self._noted(key).get("manifest", digest) != digest for _ in range(2)):
                raise InputError(
                    f"{path / MANIFEST}: its bytes are not those that were written. {mend}",
                    code="changed-manifest",
                )
            artifact.verify(mend)
            self._note_checked(artifact)
        return artifact

    def lock(self, key: str, waiting: Callable[[str], None]) -> AbstractContextManager[None]:
        """Hold the work on `key`, so that two processes never do it at once.

        Args:
            key: of an artifact or score, or any other word for work.
            waiting: called with the holder in words before waiting for it.
        """
        return lock(self.root / "locks" / f"{key}.lock", waiting)

    @contextmanager
    def workspace(self) -> Iterator[Path]:
        """Give an empty folder inside the store that is removed on leaving, whatever happens."""
        path = self.root / "tmp" / f"{os.getpid()}-{secrets.token_hex(8)}"
        with present(path.with_name(path.name + OWNER)):
            path.mkdir()
            try:
                yield path
            finally:
                shutil.rmtree(path, ignore_errors=True)

    def commit(self, folder: Path, manifest: Manifest, replace: bool = False) -> Artifact:
        """Turn the finished `folder` of a workspace into the artifact `manifest.key`.

        The manifest gets the hash of every file; the rename at the end is the moment from which
        the artifact exists. Where another process was quicker, its artifact is kept; with `replace`
        the one that is there goes.
        """
        follow_umask(folder)
        files = {
            path.relative_to(folder).as_posix(): FileRecord(
                sha256=sha256_of(path), size_bytes=path.stat().st_size
            )
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path != folder / MANIFEST
        }
        if odd := [name for name in files if not is_known_kind(name)]:
            raise InputError(
                f"{manifest.stage} wrote {odd[0]!r}, which is no weight, graph, tokenizer or setting; an"
                " artifact holds nothing else.",
                code="unknown-file",
            )
        manifest = manifest.model_copy(update={"files": files})
        write_json(folder / MANIFEST, manifest.model_dump())
        for path in folder.rglob("*"):
            flush(path)
        flush(folder)
        target = self.root / "artifacts" / manifest.key
        # a note of the artifact that was here before would speak against the new one
        (self.root / "checked" / f"{manifest.key}.json").unlink(missing_ok=True)
        with self._set_aside(target) if replace else nullcontext():
            try:
                os.rename(folder, target)
            except OSError:
                if not (target / MANIFEST).is_file():
                    raise
        flush(target.parent)
        artifact = read_artifact(target)
        self._note_checked(artifact)
        return artifact

    def remove(self, key: str) -> None:
        """Forget the artifact `key`, if it is there."""
        path = self.root / "artifacts" / key
        if path.is_dir():
            with self.workspace() as trash:
                os.rename(path, trash / key)
        (self.root / "checked" / f"{key}.json").unlink(missing_ok=True)

    @contextmanager
    def _set_aside(self, target: Path) -> Iterator[None]:
        """Take the artifact that is at `target` away; it comes back where what follows fails."""
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
        """Return the score kept under `key`, or None."""
        return _read_object(self.root / "scores" / f"{key}.json")

    def write_score(self, key: str, value: dict[str, Any]) -> None:
        """Keep `value` under `key`, replacing what was there."""
        write_json(self.root / "scores" / f"{key}.json", value)

    def _noted(self, key: str) -> dict[str, Any]:
        """Return what was noted when the bytes of the artifact were last compared; empty for nothing."""
        return _read_object(self.root / "checked" / f"{key}.json") or {}

    def _note_checked(self, artifact: Artifact) -> None:
        """Remember that the bytes of `artifact` are right as its files are now."""
        with suppress(OSError):  # a full disk: then they are compared again next time
            found = {"files": _file_states(artifact), "manifest": sha256_of(artifact.path / MANIFEST)}
            write_json(self.root / "checked" / f"{artifact.key}.json", found)

    def _sweep(self) -> None:
        """Remove what dead processes left: workspaces, markers, half-written files, names of locks."""
        for marker in (self.root / "tmp").glob(f"*{OWNER}"):
            if not is_present(marker):
                shutil.rmtree(marker.with_suffix(""), ignore_errors=True)
                marker.unlink(missing_ok=True)
        for path in (self.root / "tmp").iterdir():
            if path.is_dir() and not path.with_name(path.name + OWNER).exists() and not _is_fresh(path):
                shutil.rmtree(path, ignore_errors=True)
        for name in ("scores", "checked", "runs", "locks", "tmp"):
            for path in unfinished_in(self.root / name):
                if not _is_fresh(path):
                    path.unlink(missing_ok=True)
        for path in (self.root / "locks").iterdir():
            remove_if_free(path)


def _is_fresh(path: Path) -> bool:
    """Say whether somebody who left no marker may still be at work on `path`."""
    return seconds_since_written(path) < SILENT_S


def _file_states(artifact: Artifact) -> dict[str, list[int]]:
    """Return size, times (ns) and inode of each file: whoever writes to one changes its ctime."""
    states = {}
    for name in (MANIFEST, *artifact.manifest.files):
        try:
            found = (artifact.path / name).stat()
        except (OSError, ValueError):
            continue  # `verify` names it
        states[name] = [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]
    return states


def _read_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in `path`; None where there is none, or one that was cut short."""
    try:
        value = load_json(path)
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
