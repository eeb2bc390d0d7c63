"""A store of several machines behind each one's own, in a bucket or folder by fsspec URL.

Layout below the URL: ``files/SHA256``, each file of an artifact under the hash of its bytes;
``artifacts/KEY.json``, the manifests; ``scores/KEY.json``; if a run asks for it, ``unfinished/KEY/N/``, the
last checkpoint of a training. A manifest is written after its files, so an
artifact is complete or absent. Files are never changed, so two writers of one key are harmless also if their
bytes differ: the artifact is that of the later manifest.

What is read is compared with the hashes of the manifest; manifests and scores have hashes of their own.
Damaged files count as absent and are written again.
"""

from __future__ import annotations

import json
import re
import secrets
import tempfile
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from smelt.core.artifact import Artifact, Manifest, read_manifest
from smelt.core.errors import InputError, MissingDependencyError, did_you_mean
from smelt.core.files import MANIFEST, sha256_of, verified_content
from smelt.core.messages import escape_controls, hide_password

# Seconds for the first answer; the drivers would try again for minutes.
_ANSWER_S = 30.0
# Failures in a row after which a remote store is not used for a while: each may take as long as a time-out.
_MAX_FAILURES = 3
_PAUSE_S, _MAX_PAUSE_S = 60.0, 600.0  # doubled by each further failure
_PACKAGES = {"s3": "s3", "s3a": "s3"}  # extra of smelt by protocol


class DamagedFileError(Exception):
    """A file of the remote store that has other bytes than were written."""


def is_store_url(text: str) -> bool:
    """Return whether `text` is the URL of a remote store, or looks like one, not a folder.

    C:/folder is a folder; s3:/bucket and chained URLs (simplecache::s3://bucket) are URLs that are refused.
    """
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+:[/:]", text) is not None


@cache
def open_remote_store(url: str) -> RemoteStore:
    """Return the remote store at `url`, after writing, reading and removing a small file in it.

    Raises:
        MissingDependencyError: the package for the protocol is not installed (`not-installed`).
        InputError: `invalid-store-url`, `unknown-protocol`, `missing-bucket`, `no-store-rights`, or
            `store-unreachable`.
    """
    remote = RemoteStore(url)
    outcome: list[BaseException | None] = []

    def check() -> None:
        try:
            remote.check()
            outcome.append(None)
        except Exception as error:  # every driver has errors of its own
            outcome.append(error)

    # not a pool, whose end would wait for a driver that does not answer
    thread = threading.Thread(target=check, name="smelt-store-check", daemon=True)
    thread.start()
    thread.join(_ANSWER_S)
    if not outcome:
        raise InputError(
            f"{remote}: no answer within {_ANSWER_S:.0f} s. Check address and network.",
            code="store-unreachable",
        )
    if outcome[0] is not None:
        raise _access_error(str(remote), outcome[0]) from outcome[0]
    return remote


class RemoteStore:
    """Artifacts and scores at a URL. Methods raise the errors of the driver, of any kind."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._fs, self._root = _open_file_system(url)
        self._known: set[str] = set()  # files that are there for certain
        self._damaged: set[str] = set()  # files and keys to write again
        self.failures = 0  # in a row
        self._paused_until = 0.0

    def __str__(self) -> str:
        """Return the URL without its password."""
        return hide_password(self.url)

    def __reduce__(self) -> tuple[Any, ...]:
        # an open connection belongs to one process
        return open_remote_store, (self.url,)

    @property
    def is_paused(self) -> bool:
        """Whether the last uses failed, so that it is not used for a while."""
        return self.failures >= _MAX_FAILURES and time.monotonic() < self._paused_until

    def end_pause(self) -> None:
        """Use it again now."""
        self._paused_until = 0.0

    def count_failure(self, failed: bool) -> float | None:
        """Count the failures in a row, of which the last use may be one; return the seconds of a pause."""
        self.failures = self.failures + 1 if failed else 0
        if self.failures < _MAX_FAILURES:
            return None
        pause = float(min(_MAX_PAUSE_S, _PAUSE_S * 2 ** (self.failures - _MAX_FAILURES)))
        self._paused_until = time.monotonic() + pause
        return pause

    def check(self) -> None:
        """Write, read and remove a small file."""
        if not self._fs.async_impl:  # object stores have no folders, and some would create the bucket
            for name in ("files", "artifacts", "scores"):
                self._fs.makedirs(f"{self._root}/{name}", exist_ok=True)
        path = f"{self._root}/.smelt-{secrets.token_hex(8)}"
        self._fs.pipe_file(path, b"smelt")
        if self._fs.cat_file(path) != b"smelt":
            raise OSError("a file was not read as it had been written")
        with suppress(PermissionError):  # rights to add, not to remove, are enough
            self._fs.rm_file(path)

    def pull(self, key: str, folder: Path) -> Manifest | None:
        """Write the artifact `key` to the empty `folder`, compare it with its hashes; None if it is absent.

        Raises:
            DamagedFileError: the manifest or a file is not what was written.
        """
        manifest = self._pull_manifest(key, folder)
        if manifest is None:
            return None
        for name, record in manifest.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                # before it is copied: another file may fill the disk
                size = self._size_of(f"files/{record.sha256}")
                if size == record.size_bytes:
                    self._fs.get_file(f"{self._root}/files/{record.sha256}", str(path))
            except FileNotFoundError:
                size = None
            if size is None or size != record.size_bytes or sha256_of(path) != record.sha256:
                self._damaged.add(record.sha256)
                damage = "is missing" if size is None else "has other bytes than were written"
                raise self._damage(key, f"files/{record.sha256} ({name}) {damage}")
            self._known.add(record.sha256)
        self._known.add(key)
        return manifest

    def read_manifest(self, key: str) -> Manifest | None:
        """Return the manifest of the artifact `key`, whose files are not read; None if it is absent.

        Raises:
            DamagedFileError: it is not what was written.
        """
        with tempfile.TemporaryDirectory() as folder:
            return self._pull_manifest(key, Path(folder))

    def _pull_manifest(self, key: str, folder: Path) -> Manifest | None:
        content = self._read(f"artifacts/{key}.json")
        if content is None:
            return None
        (folder / MANIFEST).write_bytes(content)
        try:
            manifest = read_manifest(folder)
        except InputError as error:
            raise self._damage(key, f"artifacts/{key}.json: {error}") from error
        if manifest.key != key:
            raise self._damage(key, f"artifacts/{key}.json: the manifest of another artifact")
        return manifest

    def push(self, artifact: Artifact, replace: bool = False) -> None:
        """Write `artifact`, its manifest last; nothing if it is there, unless damaged or with `replace`."""
        key = artifact.key
        if not replace and key not in self._damaged and (key in self._known or self._has_manifest(key)):
            self._known.add(key)
            return
        for name, record in artifact.manifest.files.items():
            remote_path = f"files/{record.sha256}"
            if record.sha256 in self._known and record.sha256 not in self._damaged:
                continue
            if record.sha256 in self._damaged or self._size_of(remote_path) != record.size_bytes:
                self._write(remote_path, artifact.path / name)
            self._known.add(record.sha256)
            self._damaged.discard(record.sha256)
        self._write(f"artifacts/{key}.json", artifact.path / MANIFEST)
        self._known.add(key)
        self._damaged.discard(key)

    def read_score(self, key: str) -> dict[str, Any] | None:
        """Return the score stored under `key`, or None.

        Raises:
            DamagedFileError: it is not what was written.
        """
        path = f"scores/{key}.json"
        content = self._read(path)
        if content is None:
            return None
        try:
            value = verified_content(json.loads(content))
        except (ValueError, RecursionError) as error:
            raise DamagedFileError(f"{path}: {error}") from error
        self._known.add(f"scores/{key}")
        return value

    def push_score(self, key: str, file: Path, replace: bool = False) -> None:
        """Write the score in `file`; nothing if there is one, unless with `replace`."""
        remote_path = f"scores/{key}.json"
        if replace or (f"scores/{key}" not in self._known and self._size_of(remote_path) is None):
            self._write(remote_path, file)
        self._known.add(f"scores/{key}")

    def push_checkpoint(self, key: str, folder: Path, note: str) -> None:
        """Write a checkpoint's files below ``unfinished/PLACE``, its `note` last; remove earlier ones."""
        names = sorted((path.name for path in folder.iterdir()), key=note.__eq__)
        for name in names:
            self._write(f"unfinished/{key}/{name}", folder / name)
        for path in self._fs.ls(f"{self._root}/unfinished/{key}", detail=False, refresh=True):
            if path.rpartition("/")[2] not in names:
                self._fs.rm_file(path)

    def pull_checkpoint(self, key: str, folder: Path, note: str) -> None:
        """Copy the files of a checkpoint to `folder`, its `note` last; nothing if there is none."""
        prefix = f"{self._root}/unfinished/{key}"
        if self._size_of(f"unfinished/{key}/{note}") is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        names = [path.rpartition("/")[2] for path in self._fs.ls(prefix, detail=False, refresh=True)]
        for name in sorted(names, key=note.__eq__):
            self._fs.get_file(f"{prefix}/{name}", str(folder / name))

    def remove_checkpoints(self, key: str) -> None:
        """Remove the checkpoints of a step."""
        with suppress(FileNotFoundError):
            self._fs.rm(f"{self._root}/unfinished/{key}", recursive=True)

    def _has_manifest(self, key: str) -> bool:
        return self._size_of(f"artifacts/{key}.json") is not None

    def _damage(self, key: str, text: str) -> DamagedFileError:
        self._damaged.add(key)
        return DamagedFileError(text)

    def _size_of(self, key: str) -> int | None:
        """Return the bytes of a file; None if there is none."""
        try:
            return int(self._fs.info(f"{self._root}/{key}")["size"])
        except FileNotFoundError:
            return None

    def _read(self, key: str) -> bytes | None:
        try:
            return bytes(self._fs.cat_file(f"{self._root}/{key}"))
        except FileNotFoundError:
            return None

    def _write(self, key: str, file: Path) -> None:
        """Write a file; readers see all of it or nothing."""
        target = f"{self._root}/{key}"
        if not self._fs.async_impl:
            self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        if self._fs.async_impl:  # an object store: an object appears when all of it has been written
            self._fs.put_file(str(file), target)
            return
        temporary_path = f"{self._root}/.{secrets.token_hex(8)}.part"
        try:
            self._fs.put_file(str(file), temporary_path)
            self._fs.mv(temporary_path, target)
        except BaseException:
            with suppress(Exception):
                self._fs.rm_file(temporary_path)
            raise


def describe_driver_error(error: BaseException) -> str:
    """Return the first line of a driver's error, which may lack a message."""
    text = str(error).strip() or type(error).__name__
    return escape_controls(text.splitlines()[0][:300]).rstrip(".")


def _open_file_system(url: str) -> tuple[Any, str]:
    """Return the file system of a URL and the path of the store in it.

    Raises:
        MissingDependencyError, InputError: as `open_remote_store`.
    """
    import fsspec

    _require_plain_url(url)
    protocol = url.partition("://")[0]
    protocols = fsspec.available_protocols()
    if protocol not in protocols:
        raise InputError(
            f"{hide_password(url)}: unknown protocol '{protocol}'. Expected one of fsspec's, such as s3, gs,"
            f" az, sftp or file.{did_you_mean(protocol, protocols)}",
            code="unknown-protocol",
        )
    try:
        fs, root = fsspec.core.url_to_fs(url)
    except ImportError as error:
        extra = _PACKAGES.get(protocol)
        command = f" (pip install 'smelt[{extra}]')" if extra else ""
        raise MissingDependencyError(
            f"{hide_password(url)}: {describe_driver_error(error)}{command}.", code="not-installed"
        ) from error
    except Exception as error:
        raise _access_error(hide_password(url), error) from error
    root = str(root).rstrip("/")
    if not root or (fs.async_impl and root.startswith("/")):  # else files would be written to the root
        raise _invalid_url(
            url, f"it names no bucket or folder. Expected, for example, {protocol}://bucket/prefix"
        )
    return fs, root


def _require_plain_url(url: str) -> None:
    """Require protocol://path: fsspec also takes other texts, for other places than a reader does.

    Raises:
        InputError: `invalid-store-url`.
    """
    protocol = re.split(":", url, maxsplit=1)[0]
    if "::" in url:
        raise _invalid_url(
            url, "URLs of several file systems are not supported. Give that of the bucket alone"
        )
    if "://" not in url:
        remainder = url.partition(":")[2].lstrip("/")
        raise _invalid_url(url, f"expected two slashes: {protocol}://{remainder}, or ./{url} for a folder")
    if protocol in ("file", "local") and not url.startswith(f"{protocol}:///"):
        raise _invalid_url(url, f"expected three slashes and an absolute path: {protocol}:///mnt/store")


def _invalid_url(url: str, text: str) -> InputError:
    return InputError(f"{hide_password(url)}: no URL of a store: {text}.", code="invalid-store-url")


def _access_error(url: str, error: BaseException) -> InputError:
    """Return the error about a store that cannot be used."""
    text = describe_driver_error(error)
    if isinstance(error, FileNotFoundError):
        return InputError(
            f"{url}: no such bucket or folder ({text}). Create it, or correct the URL.",
            code="missing-bucket",
        )
    if isinstance(error, PermissionError | NotImplementedError) or "Credentials" in type(error).__name__:
        return InputError(
            f"{url}: no right to write and read there ({text}). Check the credentials, for S3 those of"
            " `aws configure` or AWS_ACCESS_KEY_ID, and the bucket's policy.",
            code="no-store-rights",
        )
    return InputError(
        f"{url}: cannot be reached: {text}. Check address and network, for other servers than Amazon's"
        " AWS_ENDPOINT_URL.",
        code="store-unreachable",
    )
