"""Reading and writing files so that a crash never leaves half of one behind, and others may read them."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError

_MOST_JSON = 256_000_000  # bytes; the largest tokenizer.json has 34 million
# The end of a file's name while it is being written.
_PART = ".part"
# What file systems answer that cannot flush a folder.
_NO_FLUSH = {errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EACCES}


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's bytes as 64 hexadecimal digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def hash_of(value: Any) -> str:
    """Return the SHA-256 of a JSON-able value; the order of keys does not matter."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def write_atomically(path: Path, text: str) -> None:
    """Write `text` beside `path`, flush it to disk, then rename: readers see all of it or nothing.

    The file gets the permissions that the umask leaves (`tempfile` would make it the owner's alone).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}{_PART}")
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    flush(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    write_atomically(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def unfinished_in(folder: Path) -> Iterator[Path]:
    """Yield the files in `folder` that `write_atomically` had begun and not finished."""
    yield from list(folder.glob(f".*{_PART}"))


def flush(path: Path) -> None:
    """Ask the system to write a file's or folder's content to the disk.

    Raises:
        OSError: it could not be written, for example because the disk is full.
    """
    folder = path.is_dir()
    if os.name == "nt" and folder:
        return  # Windows cannot open a folder to flush it
    # Windows flushes only what is open for writing
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not folder or error.errno not in _NO_FLUSH:
            raise
    finally:
        os.close(descriptor)


def follow_umask(folder: Path) -> None:
    """Give `folder`, which lies in a folder of ours, and all below it the permissions of newly made ones.

    Libraries write some files for their owner alone; whoever may read the store may read all of them. The
    umask can be read only by setting it, for all threads at once, so a new file and folder show it.
    """
    if os.name == "nt":
        return
    for_file, for_folder = _new_modes(folder.parent)
    for path in (folder, *folder.rglob("*")):
        if path.is_symlink():
            continue
        mode = for_folder if path.is_dir() else for_file
        if stat.S_IMODE(path.stat().st_mode) != mode:
            with contextlib.suppress(OSError):  # file systems without permissions refuse
                path.chmod(mode)


def _new_modes(folder: Path) -> tuple[int, int]:
    """Return the permissions of a file and of a folder that are newly made in `folder`."""
    sample = folder / f".{secrets.token_hex(8)}"
    os.close(os.open(sample, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    for_file = stat.S_IMODE(sample.stat().st_mode)
    sample.unlink()
    sample.mkdir()
    for_folder = stat.S_IMODE(sample.stat().st_mode)
    sample.rmdir()
    return for_file, for_folder


def seconds_since_written(path: Path) -> float:
    """Return how long ago `path` was last written to or touched; infinity where it is gone.

    Both moments are told by the clock of the file system, which may be another machine's. Where it cannot
    be asked (a full disk), this is 0: just now.
    """
    probe = path.with_name(f".{secrets.token_hex(8)}{_PART}")
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        now = probe.stat().st_mtime
    except OSError:
        return 0.0
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    try:
        return now - path.stat().st_mtime
    except FileNotFoundError:
        return math.inf
    except OSError:
        return 0.0


def size_of(folder: Path) -> int:
    """Return the bytes of all files below `folder`; what goes away meanwhile counts nothing."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            found = path.stat()
            total += found.st_size if stat.S_ISREG(found.st_mode) else 0
    return total


def placed(base: Path, said: str | Path) -> Path:
    """Return the path that `said` means in a file of the folder `base`; `~` is the user's home.

    A name with ~ that is no user's is a name like others.
    """
    try:
        return base / Path(said).expanduser()
    except RuntimeError:
        return base / said


def is_there(path: Path) -> bool:
    """Say whether there is a file or folder `path`; of a name that none can have, that there is not."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def load_json(path: Path) -> Any:
    """Return what the JSON file `path` holds, whoever wrote it.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no JSON, nested too deep, longer than 256 MB, or holds half of a surrogate pair,
            which no file can be written with.
    """
    if path.stat().st_size > _MOST_JSON:
        raise ValueError(f"it has more than {_MOST_JSON:,} bytes")
    text = path.read_text(encoding="utf-8")
    try:
        value = json.loads(text)
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    return value


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`, or an empty one where there is no such file.

    Raises:
        InputError: it is no JSON.
    """
    if not path.is_file():
        return {}
    try:
        value = load_json(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: broken JSON: {error}", code="invalid-json") from error
    return value if isinstance(value, dict) else {}
