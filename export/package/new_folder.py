"""A folder that comes into being complete, or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from smelt.core.errors import InputError, RunError
from smelt.core.files import flush

FILE_MODE, FOLDER_MODE = 0o644, 0o755
_FULL = (errno.ENOSPC, errno.EDQUOT)
_PART = ".part"


def require_free(out: Path) -> None:
    """Require that a folder can be made at `out`: nothing is there, or an empty folder.

    Raises:
        InputError: something is there.
    """
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise InputError(f"{out}: there is something already, which is no folder. Give another --out.")
    with told_apart(out):
        if out.is_dir() and any(out.iterdir()):
            raise InputError(f"{out}: this folder is not empty. Give another --out, or remove it first.")


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Give an empty folder beside `out` that becomes `out` on leaving; on an error nothing is left.

    All below it gets the modes 0644 and 0755, whatever the umask: a container's user may read it too.

    Raises:
        InputError: `out` is there and not empty, or must not be written.
        RunError: the disk is full.
    """
    out = out.absolute()
    require_free(out)
    missing = [parent for parent in out.parents if not parent.exists()]
    beside = out.with_name(f".{out.name[:80]}.{secrets.token_hex(4)}{_PART}")
    try:
        with told_apart(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            beside.mkdir()
            yield beside
            _settle(beside)
            with contextlib.suppress(FileNotFoundError):
                out.rmdir()  # an empty one, which Windows does not rename over
            beside.rename(out)
            flush(out.parent)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        for parent in missing:  # the deepest first; one that somebody else has filled meanwhile stays
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise


@contextlib.contextmanager
def told_apart(out: Path) -> Iterator[None]:
    """Let errors of the file system below `out` become smelt's.

    Raises:
        InputError: something may not be read or written, or cannot be there.
        RunError: the disk is full.
    """
    try:
        yield
    except OSError as error:
        where = error.filename or out
        if error.errno in _FULL:
            raise RunError(
                f"{out}: the disk is full{_free(out)}. Nothing of the package was left there. Make room, or"
                " give another --out."
            ) from error
        why = error.strerror or str(error)
        raise InputError(f"{where}: {why}. Nothing was left at {out}; give another --out.") from error


def _free(out: Path) -> str:
    there = next((parent for parent in out.parents if parent.exists()), None)
    with contextlib.suppress(OSError):
        return "" if there is None else f" ({shutil.disk_usage(there).free:,} bytes are free)"
    return ""


def _settle(folder: Path) -> None:
    """Give all files their modes and bring them to the disk.

    Raises:
        RunError: a form left a link.
    """
    for path in (folder, *sorted(folder.rglob("*"))):
        if path.is_symlink():
            raise RunError(f"{path.name}: a link in a package; it must hold real files.")
        if os.name != "nt":
            path.chmod(FOLDER_MODE if path.is_dir() else FILE_MODE)
        flush(path)
