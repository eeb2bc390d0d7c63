"""The content-addressed store: artifacts, scores, cached files and checkpoints, each complete or absent.

Layout: ``artifacts/KEY/`` (a folder per artifact), ``scores/KEY.json``, ``tmp/`` (work in progress, each
folder with its marker ``NAME.owner``, cleaned of leftovers of dead processes), ``locks/`` (work that is
being done), ``checked/KEY.json`` (the files' times and sizes when their hashes were last compared),
``kept/`` (see `smelt.core.stage_cache`). Nothing is written in place: a folder is made under `tmp`, flushed,
then renamed. Every JSON file that is read again has a hash of its content; a damaged one counts as absent,
except an artifact's manifest, which is an error as any changed file of an artifact is.

Checkpoints are stored in ``unfinished/KEY/N``, N the index of a training in its step.

With a remote store (`smelt.core.remote_store`) the folder is its cache on this machine: artifacts and scores
that are missing here are copied from it, finished ones are copied to it. `kept` and `unfinished` stay here.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from smelt.core.artifact import (
    Artifact,
    FileRecord,
    Manifest,
    read_artifact,
    read_manifest,
    write_manifest,
)
from smelt.core.errors import InputError, RunError
from smelt.core.files import (
    MANIFEST,
    apply_umask,
    folder_size,
    fsync_path,
    is_artifact_file,
    partial_files,
    read_hashed_json,
    sha256_of,
    write_hashed_json,
)
from smelt.core.locks import file_lock, remove_stale_lock
from smelt.core.messages import Message, warning, with_count
from smelt.core.process_group import process_rank
from smelt.core.remote_store import DamagedFileError, RemoteStore, describe_driver_error
from smelt.core.workspaces import may_be_in_use, remove_leftover_workspaces, workspace

CHECKPOINT_FILE = "checkpoint.json"  # the note of a checkpoint, written last


class Store:
    """Artifacts and scores under one folder, addressed by their keys.

    Args:
        root: the folder.
        remote: store of several machines, of which the folder is the cache.
        warn: called with a warning where the remote store fails; work goes on with the folder.

    A store of others that cannot be written to can be read; what it lacks is an error. is_writable: whether
    it can be written to.
    """

    def __init__(
        self,
        root: Path,
        remote: RemoteStore | None = None,
        warn: Callable[[Message], None] = lambda message: None,
    ) -> None:
        self.root, self.remote, self.warn = root.resolve(), remote, warn
        self.pushes_checkpoints = False  # to the remote store
        self._pending: dict[str, Callable[[RemoteStore], None]] = {}  # by the name of what is copied
        try:
            for name in ("artifacts", "scores", "tmp", "locks", "checked"):
                folder = self.root / name
                folder.mkdir(parents=True, exist_ok=True)
                if not os.access(folder, os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, f"{folder} may not be written to")
        except OSError as error:
            parts = [self.root / name for name in ("artifacts", "scores")]
            is_readable = all(path.is_dir() and os.access(path, os.R_OK | os.X_OK) for path in parts)
            if remote is not None or not is_readable:
                raise self._unusable(error) from error
            self.is_writable = False
        else:
            self.is_writable = True
            self._remove_leftovers()

    def require_present(self) -> None:
        """Require that the folders of the store exist.

        Raises:
            RunError: the store was removed (`store-removed`).
        """
        names = ("artifacts", "scores", *(("tmp", "locks") if self.is_writable else ()))
        if not all((self.root / name).is_dir() for name in names):
            raise RunError(
                f"{self.root}: this store was removed while it was used. Run the same command again to build"
                " again what was in it.",
                code="store-removed",
            )

    def _unusable(self, error: OSError) -> InputError:
        return InputError(
            f"{self.root}: cannot be used as a store: {error.strerror}. Use another with --store FOLDER.",
            code="unusable-store",
        )

    def find(
        self, key: str, hint: str = "Run the recipe again with --rebuild to build it again."
    ) -> Artifact | None:
        """Return the artifact with this key; None if it was never finished, or has missing files.

        Its files are compared with the manifest: hashes are computed only for files whose size, times or
        inode have changed since the last comparison.

        Args:
            key: of the artifact.
            hint: how to repair a damaged one, the end of the message.

        Raises:
            InputError: the bytes of a file have changed.
        """
        path = self.root / "artifacts" / key
        if not self._is_complete(path) and not self._pull(key):
            return None
        try:
            artifact = read_artifact(path, hint)
            if artifact.key != key:
                raise InputError(
                    f"{path / MANIFEST}: this is the manifest of another artifact.", code="wrong-manifest"
                )
        except InputError as error:
            text = str(error)
            raise InputError(text if text.endswith(hint) else f"{text} {hint}", code=error.code) from error
        if self._read_checked(key).get("files") != _file_states(artifact):
            artifact.verify(hint)
            self._write_checked(artifact)
        # one that was made while it could not be reached
        self._push(key, lambda remote: remote.push(artifact))
        return artifact

    def lock(self, key: str, waiting: Callable[[str], None]) -> AbstractContextManager[None]:
        """Hold the lock of `key`, so that two processes never do the same work at once.

        In a store that cannot be written to there is no lock, and no work.

        Args:
            key: of an artifact or score, or any other name of work.
            waiting: called with the owner as text before waiting for it.
        """
        if not self.is_writable:
            return nullcontext()
        self.require_present()
        return file_lock(self.root / "locks" / f"{key}.lock", waiting)

    @contextmanager
    def workspace(self) -> Iterator[Path]:
        """Yield an empty folder inside the store that is always removed on leaving.

        Raises:
            InputError: the store cannot be written to (`unusable-store`).
            RunError: it was removed (`store-removed`).
        """
        if not self.is_writable:
            error = PermissionError(errno.EACCES, "it can be read, not written to, and lacks what is needed")
            raise self._unusable(error) from error
        self.require_present()
        with workspace(self.root / "tmp") as path:
            yield path

    def commit(self, folder: Path, manifest: Manifest, replace: bool = False) -> Artifact:
        """Turn the finished `folder` of a workspace into the artifact `manifest.key`.

        The manifest gets the hash of every file; the artifact exists from the final rename on. If another
        process was faster, its artifact is kept; with `replace` the existing one is
        removed.
        """
        self.require_present()
        apply_umask(folder)
        files = {
            path.relative_to(folder).as_posix(): FileRecord(
                sha256=sha256_of(path), size_bytes=path.stat().st_size
            )
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path != folder / MANIFEST
        }
        if invalid := [name for name in files if not is_artifact_file(name)]:
            raise InputError(
                f"{manifest.stage} wrote {invalid[0]!r}, but an artifact may contain only weights, graphs,"
                " tokenizer files and settings.",
                code="unknown-file",
            )
        manifest = manifest.model_copy(update={"files": files})
        write_manifest(folder, manifest)
        artifact = self._move_to_artifacts(folder, manifest.key, replace)
        self._push(artifact.key, lambda remote: remote.push(artifact, replace))
        return artifact

    def _move_to_artifacts(self, folder: Path, key: str, replace: bool = False) -> Artifact:
        """Flush the complete `folder` of an artifact and rename it; an existing one is kept or replaced."""
        for path in folder.rglob("*"):
            fsync_path(path)
        fsync_path(folder)
        target = self.root / "artifacts" / key
        replace = replace or not self._is_complete(target)
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

    def _is_complete(self, path: Path) -> bool:
        """Return whether an artifact's folder exists with all its files, whose bytes are not compared.

        One with missing files gives a warning; it is built again and replaced, as a missing one is.
        """
        if not path.is_dir():
            return False
        try:
            names = (MANIFEST, *read_manifest(path).files)
        except InputError as error:
            names = (MANIFEST,)
            if error.code != "not-an-artifact":
                return True  # damaged, which `find` reports
        missing = next((name for name in names if not os.path.exists(path / name)), None)
        if missing is None:
            return True
        text = f"{path / missing}: this file of an artifact is missing. The artifact is built again."
        self.warn(warning("incomplete-artifact", text))
        return False

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
        """Return the score stored under `key`; None if there is none, or it is damaged."""
        path = self.root / "scores" / f"{key}.json"
        value = read_hashed_json(path)
        if value is not None:
            self._push(path.name, lambda remote: remote.push_score(key, path))
            return value
        with self._using_remote() as remote:
            value = None if remote is None else remote.read_score(key)
        if value is not None:
            write_hashed_json(path, value, indent=None)
        return value

    def has_score(self, key: str) -> bool:
        """Return whether the folder of the store has a score under `key`; a remote store is not read."""
        return (self.root / "scores" / f"{key}.json").is_file()

    def write_score(self, key: str, value: dict[str, Any]) -> None:
        """Store `value` under `key`, replacing an earlier one; not in a store that cannot be written to."""
        if not self.is_writable:
            self.warn(warning("read-only-store", f"{self.root}: may not be written to: scores are not kept."))
            return
        self.require_present()
        path = self.root / "scores" / f"{key}.json"
        write_hashed_json(path, value, indent=None)
        self._push(path.name, lambda remote: remote.push_score(key, path, replace=True))

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

    def _push(self, name: str, push: Callable[[RemoteStore], None]) -> None:
        """Copy something to the remote store, if there is one; if that fails, `push_pending` tries again."""
        if self.remote is None:
            return
        self._pending[name] = push
        with self._using_remote(to_write=True) as remote:
            if remote is not None:
                push(remote)
                del self._pending[name]

    def push_pending(self) -> int:
        """Copy to the remote store what could not be copied before; return how much it still lacks."""
        for name, push in list(self._pending.items()):
            if self.remote is not None:
                self.remote.end_pause()
            self._push(name, push)
            if name in self._pending:
                break  # each attempt may take as long as a time-out
        if count := len(self._pending):
            text = f"{with_count(count, 'result')} of this run could not be copied to {self.remote}."
            text += f" Run the same command again; finished steps are taken from {self.root}."
            self.warn(warning("not-in-remote-store", text))
        return count

    @contextmanager
    def _using_remote(self, to_write: bool = False) -> Iterator[RemoteStore | None]:
        """Yield the remote store, None if there is none or it is paused; errors become warnings."""
        remote = self.remote
        if remote is None or remote.is_paused:
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
            cause = describe_driver_error(error)
            self.warn(
                warning(
                    "push-failed",
                    f"{remote}: cannot be written to: {cause}. What was made is in {self.root}, and is copied"
                    " at the end of the run if the bucket answers then.",
                )
                if to_write
                else warning(
                    "pull-failed",
                    f"{remote}: cannot be read: {cause}. What it has may be made again here.",
                )
            )
        finally:
            pause = remote.count_failure(failed)
            if pause is not None:
                self.warn(
                    warning(
                        "remote-store-paused",
                        f"{remote}: failed {remote.failures} times in a row. It is tried again after"
                        f" {pause:.0f} s, and at the end of the run.",
                    )
                )

    def use_remote(self, use: Callable[[RemoteStore], None], to_write: bool = False) -> None:
        """Call `use` with the remote store, unless there is none or it is paused; errors become warnings."""
        with self._using_remote(to_write) as remote:
            if remote is not None:
                use(remote)

    def _read_checked(self, key: str) -> dict[str, Any]:
        """Return the note of the last comparison of the artifact's bytes; empty if there is none."""
        return read_hashed_json(self.root / "checked" / f"{key}.json") or {}

    def _write_checked(self, artifact: Artifact) -> None:
        """Note that the bytes of `artifact` are intact with the present states of its files."""
        with suppress(OSError):  # a full disk: they are compared again next time
            states = {"files": _file_states(artifact)}
            write_hashed_json(self.root / "checked" / f"{artifact.key}.json", states)

    def _remove_leftovers(self) -> None:
        """Remove leftovers of dead processes: workspaces, markers, partial files, lock files."""
        remove_leftover_workspaces(self.root / "tmp")
        for name in ("scores", "checked", "runs", "locks", "tmp"):
            for path in partial_files(self.root / name):
                if not may_be_in_use(path):
                    path.unlink(missing_ok=True)
        for path in (self.root / "locks").iterdir():
            remove_stale_lock(path)


def _file_states(artifact: Artifact) -> dict[str, list[int]]:
    """Return size, times (ns) and inode of each file: every write changes the ctime."""
    states = {}
    for name in (MANIFEST, *artifact.manifest.files):
        try:
            file_status = (artifact.path / name).stat()
        except (OSError, ValueError):
            continue  # `verify` reports it
        states[name] = [
            file_status.st_size,
            file_status.st_mtime_ns,
            file_status.st_ctime_ns,
            file_status.st_ino,
        ]
    return states


class StepCheckpoints:
    """Folders for the checkpoints of a step; they are removed when the step is done.

    With `Store.pushes_checkpoints` they are copied to the remote store, and from there if this one has none.
    is_resumed: whether there were some.
    """

    def __init__(self, store: Store, key: str) -> None:
        self.store, self.folder = store, store.root / "unfinished" / key
        self.is_resumed = self.folder.is_dir()
        self._trainings = 0

    def next_folder(self) -> Path:
        """Return the folder of the step's next training, which may not exist."""
        self._trainings += 1
        folder = self.folder / str(self._trainings)
        if self.store.pushes_checkpoints and process_rank() == 0 and not (folder / CHECKPOINT_FILE).is_file():
            path = self._place(folder)
            self.store.use_remote(lambda remote: remote.pull_checkpoint(path, folder, CHECKPOINT_FILE))
            self.is_resumed |= folder.is_dir()
        return folder

    def saved(self, folder: Path) -> None:
        """Copy a checkpoint to the remote store; a failure is a warning."""
        if self.store.pushes_checkpoints:
            path = self._place(folder)
            self.store.use_remote(
                lambda remote: remote.push_checkpoint(path, folder, CHECKPOINT_FILE), to_write=True
            )

    def remove(self) -> None:
        """Remove all checkpoints."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.is_resumed = False
        if self.store.pushes_checkpoints:
            self.store.use_remote(lambda remote: remote.remove_checkpoints(self.folder.name), to_write=True)

    def _place(self, folder: Path) -> str:
        return folder.relative_to(self.folder.parent).as_posix()


def list_step_checkpoints(root: Path) -> dict[Path, int]:
    """Return the folders of interrupted steps, and their bytes."""
    return {path: folder_size(path) for path in sorted((root / "unfinished").glob("*")) if path.is_dir()}
