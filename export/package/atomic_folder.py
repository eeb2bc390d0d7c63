"""Create a folder atomically: complete or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from smelt.core.errors import InputError, RunError
from smelt.core.files import fsync_path, seconds_since_written
from smelt.core.store.heartbeat import STALE_AFTER_S, heartbeat, is_active

FILE_MODE, FOLDER_MODE = 0o644, 0o755
_DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)
# ... as libraries of Rust and C++ report it, in errors of their own
_DISK_FULL_MESSAGES = ("no space left on device", "disk quota exceeded", "os error 28)", "os error 122)")
_PART_SUFFIX, _OWNER_SUFFIX = ".part", ".owner"
_MAX_NAME_LENGTH = 80  # characters of the package's name in the name of the temporary folder


def require_empty_destination(out: Path) -> None:
    """Require that a folder can be created at `out`: nothing is there, or an empty folder.

    Raises:
        InputError: the path exists, or a parent is a file.
    """
    with translate_os_errors(out):
        if out.is_symlink() or (out.exists() and not out.is_dir()):
            raise InputError(
                f"{out}: this path exists and is not a folder. Set another --out.",
                code="not-a-folder",
                file=str(out),
            )
        if out.is_dir() and any(out.iterdir()):
            raise InputError(
                f"{out}: this folder is not empty. Set another --out, or remove it first.",
                code="folder-not-empty",
                file=str(out),
            )
        if out.exists() and out.samefile(Path.cwd()):
            raise InputError(
                f"{out}: this is the current folder; a package needs a new one. Set --out to a new folder.",
                code="current-folder",
                file=str(out),
            )
        above = next(path for path in out.absolute().parents if path.exists() or path.is_symlink())
        if not above.is_dir():
            raise InputError(
                f"{above}: this is a file, but {out} needs a folder there. Set another --out, or move the"
                " file.",
                code="parent-not-a-folder",
                file=str(above),
            )


@contextlib.contextmanager
def atomic_folder(out: Path) -> Iterator[Path]:
    """Yield an empty folder next to `out` that becomes `out` on exit; on an error nothing remains.

    All files and folders get the modes 0644 and 0755, whatever the umask, because a container's user may read
    them too. Folders of killed processes that were creating `out` are removed; a marker next to each folder
    distinguishes them from those of running processes, as in the store (`smelt.core.store.heartbeat`).

    Raises:
        InputError: `out` exists and is not empty, or cannot be written.
        RunError: the disk is full.
    """
    out = out.absolute()
    require_empty_destination(out)
    missing = [parent for parent in out.parents if not parent.exists()]
    beside = out.with_name(f".{out.name[:_MAX_NAME_LENGTH]}.{secrets.token_hex(4)}{_PART_SUFFIX}")
    try:
        with translate_os_errors(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            _remove_stale(out)
            with heartbeat(beside.with_name(beside.name + _OWNER_SUFFIX)):
                beside.mkdir()
                yield beside
                _finalize_files(beside)
                with contextlib.suppress(FileNotFoundError):
                    out.rmdir()  # an empty folder, which Windows does not replace by a rename
                beside.rename(out)
                fsync_path(out.parent)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        for parent in missing:  # the deepest first; one that has been filled meanwhile is kept
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise


def _remove_stale(out: Path) -> None:
    """Remove unfinished packages of dead processes for `out`."""
    name = re.compile(rf"\.{re.escape(out.name[:_MAX_NAME_LENGTH])}\.[0-9a-f]{{8}}{re.escape(_PART_SUFFIX)}")
    for found in [
        path for path in out.parent.iterdir() if name.fullmatch(path.name.removesuffix(_OWNER_SUFFIX))
    ]:
        part = found.with_name(found.name.removesuffix(_OWNER_SUFFIX))
        marker = part.with_name(part.name + _OWNER_SUFFIX)
        at_work = is_active(marker) if marker.exists() else seconds_since_written(part) < STALE_AFTER_S
        if not at_work:
            shutil.rmtree(part, ignore_errors=True)
            marker.unlink(missing_ok=True)


@contextlib.contextmanager
def translate_os_errors(out: Path) -> Iterator[None]:
    """Convert errors of the file system below `out` to smelt's.

    Raises:
        InputError: a file cannot be read, written or created.
        RunError: the disk is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _DISK_FULL_ERRORS:
            raise _disk_full_error(out) from error
        where = Path(os.fsdecode(error.filename) if error.filename else out)
        # the temporary folder has a name that the user does not know
        where = out.parent if where.name.endswith((_PART_SUFFIX, _OWNER_SUFFIX)) else where
        why = error.strerror or str(error)
        raise InputError(
            f"{where}: {why}. Nothing was written to {out}. Set another --out.",
            code="unwritable-path",
            file=str(where),
        ) from error
    except Exception as error:
        if not any(words in str(error).lower() for words in _DISK_FULL_MESSAGES):
            raise
        raise _disk_full_error(out) from error


def _disk_full_error(out: Path) -> RunError:
    return RunError(
        f"{out}: the disk is full{_free_space(out)}. The package was not written. Free disk space, or set"
        " another --out.",
        code="disk-full",
        file=str(out),
    )


def _free_space(out: Path) -> str:
    there = next((parent for parent in out.parents if parent.exists()), None)
    with contextlib.suppress(OSError):
        return "" if there is None else f" ({shutil.disk_usage(there).free:,} bytes are free)"
    return ""


def _finalize_files(folder: Path) -> None:
    """Set the modes of all files and flush them to the disk.

    Raises:
        RunError: the package contains a link.
    """
    for path in (folder, *sorted(folder.rglob("*"))):
        if path.is_symlink():
            raise RunError(
                f"{path.name}: this file is a link; a package must contain regular files only.",
                code="link-in-package",
                file=path.name,
            )
        if os.name != "nt":
            path.chmod(FOLDER_MODE if path.is_dir() else FILE_MODE)
        fsync_path(path)
