"""The content-addressed store: artifacts, scores, cached files and checkpoints, each complete or absent.

Layout: ``artifacts/KEY/`` (a folder per artifact), ``scores/KEY.json``, ``tmp/`` (work in progress, each
folder with its marker ``NAME.owner``, cleaned of leftovers of dead processes), ``locks/`` (work that is
being done), ``checked/KEY.json`` (the files' times and sizes when their hashes were last compared, and the
hash of the manifest). Nothing is written in place: a folder is made under `tmp`, flushed, then renamed.

Intermediate results of stages that later steps use again, such as a teacher's logits or statistics, are
stored under a key of all their dependencies, in ``kept/KEY/`` with ``kept.json``: their description, their
source artifacts, and the hash of each file. A folder is complete or absent. Damaged files count as absent,
because they can be made again.

Checkpoints are stored in ``unfinished/KEY/N``, N the index of a training in its step.

With a remote store (`smelt.core.remote_store`) the folder is its cache on this machine: artifacts and scores
that are missing here are copied from it, finished ones are copied to it. `kept` and `unfinished` stay here.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from smelt.core.artifact import Artifact, FileRecord, Manifest, read_artifact
from smelt.core.errors import InputError
from smelt.core.files import (
    MANIFEST,
    apply_umask,
    folder_size,
    fsync_path,
    is_artifact_file,
    json_hash,
    load_json,
    partial_files,
    seconds_since_written,
    sha256_of,
    write_json,
)
from smelt.core.locks import STALE_AFTER_S, file_lock, heartbeat, is_active, remove_stale_lock
from smelt.core.messages import Message, warning
from smelt.core.remote_store import DamagedFileError, RemoteStore, describe_driver_error

OWNER_SUFFIX = ".owner"


class Store:
    """Artifacts and scores under one folder, addressed by their keys.

    Args:
        root: the folder.
        remote: store of several machines, of which the folder is the cache.
        warn: called with a warning where the remote store fails; work goes on with the folder.
    """

    def __init__(
        self,
        root: Path,
        remote: RemoteStore | None = None,
        warn: Callable[[Message], None] = lambda message: None,
    ) -> None:
        self.root, self.remote, self.warn = root.resolve(), remote, warn
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
        if not path.is_dir() and not self._pull(key):
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
        self._push(lambda remote: remote.push(artifact))  # one that was made while it could not be reached
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
        artifact = self._move_to_artifacts(folder, manifest.key, replace)
        self._push(lambda remote: remote.push(artifact, replace))
        return artifact

    def _move_to_artifacts(self, folder: Path, key: str, replace: bool = False) -> Artifact:
        """Flush the complete `folder` of an artifact and rename it; an existing one is kept or replaced."""
        for path in folder.rglob("*"):
            fsync_path(path)
        fsync_path(folder)
        target = self.root / "artifacts" / key
        # a note of the previous artifact would not match the new one
        (self.root / "checked" / f"{key}.json").unlink(missing_ok=True)
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
        path = self.root / "scores" / f"{key}.json"
        value = read_json_or_none(path)
        if value is not None:
            self._push(lambda remote: remote.push_score(key, path))
            return value
        with self._using_remote() as remote:
            value = None if remote is None else remote.read_score(key)
        if value is not None:
            write_json(path, value)
        return value

    def write_score(self, key: str, value: dict[str, Any]) -> None:
        """Store `value` under `key`, replacing an earlier one."""
        path = self.root / "scores" / f"{key}.json"
        write_json(path, value)
        self._push(lambda remote: remote.push_score(key, path, replace=True))

    def _pull(self, key: str) -> bool:
        """Copy the artifact `key` from the remote store; return whether it is there, and intact."""
        with self._using_remote() as remote:
            if remote is None:
                return False
            with self.workspace() as space:
                folder = space / "out"
                folder.mkdir()
                if remote.pull(key, folder) is None:
                    return False
                apply_umask(folder)
                self._move_to_artifacts(folder, key)
                return True
        return False

    def _push(self, push: Callable[[RemoteStore], None]) -> None:
        """Copy something to the remote store, if there is one; if that fails, it stays here."""
        with self._using_remote(to_write=True) as remote:
            if remote is not None:
                push(remote)

    @contextmanager
    def _using_remote(self, to_write: bool = False) -> Iterator[RemoteStore | None]:
        """Yield the remote store, None if there is none or it was given up; errors become warnings."""
        remote = self.remote
        if remote is None or remote.is_given_up:
            yield None
            return
        failed = True
        try:
            yield remote
            failed = False
        except DamagedFileError as error:
            failed = False
            self.warn(warning("damaged-remote-file", f"{remote}: {error}. It is made and written again."))
        except Exception as error:  # every driver has errors of its own
            what = describe_driver_error(error)
            self.warn(
                warning(
                    "push-failed",
                    f"{remote}: cannot be written to: {what}. What was made is in {self.root}; run the same"
                    " command again to copy it.",
                )
                if to_write
                else warning(
                    "pull-failed",
                    f"{remote}: cannot be read: {what}. What it has may be made again here.",
                )
            )
        finally:
            remote.count_failure(failed)
            if failed and remote.is_given_up:
                self.warn(
                    warning(
                        "remote-store-given-up",
                        f"{remote}: failed {remote.failures} times in a row and is not used any more. Run"
                        " the same command again when it can be reached.",
                    )
                )

    def _read_checked(self, key: str) -> dict[str, Any]:
        """Return the note of the last comparison of the artifact's bytes; empty if there is none."""
        return read_json_or_none(self.root / "checked" / f"{key}.json") or {}

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


def read_json_or_none(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in `path`; None if there is none, or it is incomplete."""
    try:
        value = load_json(path)
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


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
            found = self.store.read_score(key)
            if found is None:
                found = {"artifact": what.get("artifact"), "made": make()}
                self.store.write_score(key, found)
        return found["made"]

    @contextmanager
    def cached_files(
        self, what: Mapping[str, Any], make: Callable[[Path], None]
    ) -> Iterator[tuple[Path, bool]]:
        """Yield the folder with the files of `make`, and whether they were cached.

        Damaged files are made again.
        """
        key = self.files_key(what)
        words, artifacts = str(what["what"]), list(what["artifacts"])
        with self.store.lock(key, self._report_wait):
            found, cached = self.find_intact(key, words), True
            if found is None:
                cached, started = False, time.monotonic()
                with self.store.workspace() as space:
                    folder = space / "out"
                    folder.mkdir()
                    make(folder)
                    found = commit_cached_files(self.store, folder, key, words, artifacts)
                took = f"made in {time.monotonic() - started:,.1f} s and cached"
            else:
                took = "from the cache"
            self.log(f"  {words}: {found.size_bytes / 1e6:,.1f} MB, {took}")
        yield found.path, cached

    def value_key(self, what: Mapping[str, Any]) -> str:
        """Return the key of a cached value."""
        return json_hash({"kept": dict(what), "libraries": dict(self.versions)})

    def files_key(self, what: Mapping[str, Any]) -> str:
        """Return the key of cached files."""
        return json_hash({"files": dict(what), "libraries": dict(self.versions)})

    def find_intact(self, key: str, words: str) -> CachedFiles | None:
        """Return the cached files `key`; damaged ones are removed."""
        found = find_cached_files(self.store, key)
        wrong = found.find_damage() if found is not None else None
        if found is None or wrong is None:
            return found
        self.log(f"  {words}: {wrong[0]}: {wrong[1]}; made again")
        remove_cached_files(found.path)
        return None

    def _report_wait(self, holder: str) -> None:
        self.log(f"waiting for {holder}, which computes the same files")


class StepCheckpoints:
    """Folders for the checkpoints of a step; they are removed when the step is done."""

    def __init__(self, root: Path, key: str) -> None:
        self.folder = root / "unfinished" / key
        self._trainings = 0

    def next_folder(self) -> Path:
        """Return the folder of the step's next training, which may not exist."""
        self._trainings += 1
        return self.folder / str(self._trainings)

    def remove(self) -> None:
        """Remove all checkpoints."""
        shutil.rmtree(self.folder, ignore_errors=True)


def list_step_checkpoints(root: Path) -> dict[Path, int]:
    """Return the folders of interrupted steps, and their bytes."""
    return {path: folder_size(path) for path in sorted((root / "unfinished").glob("*")) if path.is_dir()}
