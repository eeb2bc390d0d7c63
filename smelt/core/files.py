"""Read and write files atomically, so that a crash never leaves a partial file."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from smelt.core.errors import InputError
from smelt.core.messages import BIDI_CONTROLS

MANIFEST = "manifest.json"  # of an artifact

_MAX_JSON_BYTES = 256_000_000  # bytes; the largest tokenizer.json has 34 million
# Suffix of a file while it is being written.
_PARTIAL_SUFFIX = ".part"
# Error numbers of file systems that cannot flush a folder.
_FSYNC_UNSUPPORTED = {errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EACCES}


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's bytes as 64 hexadecimal digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def json_hash(value: Any) -> str:
    """Return the SHA-256 of a JSON-able value; the order of keys does not matter."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write text (as UTF-8) or bytes; readers see all of it or nothing.

    It is written to a temporary file, flushed to disk, then renamed. The file gets the umask's permissions
    (`tempfile` would restrict it to the owner).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{_PARTIAL_SUFFIX}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content.encode("utf-8") if isinstance(content, str) else content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_path(path.parent)


def write_json(path: Path, value: Any, indent: int | None = 1) -> None:
    """Write `value` as JSON, atomically. indent: None is several times faster, for large files."""
    write_atomically(path, json.dumps(value, indent=indent, ensure_ascii=False) + "\n")


_HASH_KEY = "content_sha256"


def without_hash(value: Any) -> Any:
    """Return the JSON object `value` without the hash of its content, which is not compared."""
    return {n: v for n, v in value.items() if n != _HASH_KEY} if isinstance(value, Mapping) else value


def hashed_content(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON object `value` with the hash of its content, which replaces an earlier one."""
    content = json.loads(json.dumps(without_hash(value)))
    return {**content, _HASH_KEY: json_hash(content)}


def verified_content(value: Any) -> dict[str, Any]:
    """Return the content of the result of `hashed_content`.

    Raises:
        ValueError: it is not a JSON object, has no hash, or was modified since it was hashed.
    """
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    content: dict[str, Any] = without_hash(value)
    if value.get(_HASH_KEY) != json_hash(content):
        raise ValueError("it has been modified since it was written (hash mismatch)")
    return content


def write_hashed_json(path: Path, value: Mapping[str, Any], indent: int | None = 1) -> None:
    """Write the JSON object `value` with the hash of its content, as `write_json`."""
    write_json(path, hashed_content(value), indent)


def read_hashed_json(path: Path) -> dict[str, Any] | None:
    """Return the content of a file of `write_hashed_json`; None if it is absent or damaged."""
    try:
        return verified_content(load_json(path))
    except (OSError, ValueError, RecursionError):
        return None


def partial_files(folder: Path) -> Iterator[Path]:
    """Yield unfinished files of `write_atomically` in `folder`."""
    yield from list(folder.glob(f".*{_PARTIAL_SUFFIX}"))


def fsync_path(path: Path) -> None:
    """Flush a file's or folder's content to the disk.

    Raises:
        OSError: it could not be written, for example because the disk is full.
    """
    folder = path.is_dir()
    if os.name == "nt" and folder:
        return  # Windows cannot open a folder to flush it
    # Windows flushes only files that are open for writing
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not folder or error.errno not in _FSYNC_UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)


def apply_umask(folder: Path) -> None:
    """Give `folder`, which is inside a folder of smelt, and its contents the permissions of new files.

    Libraries write some files for their owner only; who may read the store may read all of them. The umask
    can be read only by setting it, for all threads at once, so it is read from a new file and folder.
    """
    if os.name == "nt":
        return
    file_mode, folder_mode = _default_modes(folder.parent)
    for path in (folder, *folder.rglob("*")):
        if path.is_symlink():
            continue
        mode = folder_mode if path.is_dir() else file_mode
        if stat.S_IMODE(path.stat().st_mode) != mode:
            with contextlib.suppress(OSError):  # file systems without permissions raise
                path.chmod(mode)


def _default_modes(folder: Path) -> tuple[int, int]:
    """Return the permissions of a new file and of a new folder in `folder`."""
    sample = folder / f".{secrets.token_hex(8)}"
    os.close(os.open(sample, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    file_mode = stat.S_IMODE(sample.stat().st_mode)
    sample.unlink()
    sample.mkdir()
    folder_mode = stat.S_IMODE(sample.stat().st_mode)
    sample.rmdir()
    return file_mode, folder_mode


def seconds_since_written(path: Path) -> float:
    """Return the seconds since `path` was last written or touched; infinity if it does not exist.

    Both times are from the clock of the file system, which may be another machine's. If it cannot be read
    (a full disk), this is 0: just now.
    """
    probe = path.with_name(f".{secrets.token_hex(8)}{_PARTIAL_SUFFIX}")
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        probe_time = probe.stat().st_mtime
    except OSError:
        return 0.0
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    try:
        return probe_time - path.stat().st_mtime
    except FileNotFoundError:
        return math.inf
    except OSError:
        return 0.0


def folder_size(folder: Path) -> int:
    """Return the bytes of all files below `folder`; files that disappear meanwhile count 0."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            file_status = path.stat()
            total += file_status.st_size if stat.S_ISREG(file_status.st_mode) else 0
    return total


def resolve_path(base: Path, path: str | Path) -> Path:
    """Return `path` relative to the folder `base` of the file that names it; `~` is the user's home.

    A name with ~ that is not a user's is an ordinary name.
    """
    try:
        return base / Path(path).expanduser()
    except RuntimeError:
        return base / path


def path_exists(path: Path) -> bool:
    """Return whether the file or folder `path` exists; false for an invalid name."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def load_json(path: Path) -> Any:
    """Return the content of the JSON file `path`, from any source.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not JSON, nested too deep, larger than 256 MB, or holds half of a surrogate pair,
            which cannot be written to a file.
    """
    if path.stat().st_size > _MAX_JSON_BYTES:
        raise ValueError(f"it is larger than {_MAX_JSON_BYTES:,} bytes")
    text = path.read_text(encoding="utf-8")
    try:
        value = json.loads(text)
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return value


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`, or an empty one if there is no such file.

    Raises:
        InputError: it is not JSON.
    """
    if not path.is_file():
        return {}
    try:
        value = load_json(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: invalid JSON: {error}. Correct the file", code="invalid-json") from error
    return value if isinstance(value, dict) else {}


# The kinds of files that stages write. Other files (a script, a library, a pickle, a link for a shell)
# could be executed when the artifact is opened, or by the software that it is packaged for.
_ARTIFACT_SUFFIXES = frozenset(
    {".json", ".safetensors", ".onnx", ".onnx_data", ".data", ".plan", ".spm", ".model", ".jinja"}
)
_ARTIFACT_TEXT_FILES = frozenset(
    {"vocab.txt", "merges.txt"}
)  # of tokenizers; others may be a requirements.txt
# Names that are portable between systems and shells, show as they are, and are not hidden.
_UNSAFE = r"<>:\"|?*\\/\x00-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029" + "".join(BIDI_CONTROLS)
_SAFE_FILE_NAME = re.compile(
    rf"(?!(?:con|prn|aux|nul|com\d|lpt\d)(?:\.|$))[^.\-{_UNSAFE}][^{_UNSAFE}]*(?<![ .])", re.IGNORECASE
)


def is_artifact_file(name: str) -> bool:
    """Return whether a file name, relative to an artifact's folder, is of a kind that stages write."""
    path = PurePosixPath(name)
    if name == MANIFEST or not all(map(_SAFE_FILE_NAME.fullmatch, path.parts)):
        return False
    return path.suffix.lower() in _ARTIFACT_SUFFIXES or path.name in _ARTIFACT_TEXT_FILES
