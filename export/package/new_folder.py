"""A folder that comes into being complete, or not at all."""

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
from smelt.core.files import flush, seconds_since_written
from smelt.core.store.presence import SILENT_S, is_present, present

FILE_MODE, FOLDER_MODE = 0o644, 0o755
_FULL = (errno.ENOSPC, errno.EDQUOT)
# ... as libraries of Rust and C++ say it, in errors of their own
_FULL_IN_WORDS = ("no space left on device", "disk quota exceeded", "os error 28)", "os error 122)")
_PART, _OWNER = ".part", ".owner"
_LONGEST = 80  # characters of the package's name in that of the folder where it is made


def require_free(out: Path) -> None:
    """Require that a folder can be made at `out`: nothing is there, or an empty folder.

    Raises:
        InputError: something is there, or a file stands in the place of a folder above.
    """
    with told_apart(out):
        if out.is_symlink() or (out.exists() and not out.is_dir()):
            raise InputError(
                f"{out}: there is something already, which is no folder. Give another --out.",
                code="not-a-folder",
                file=str(out),
            )
        if out.is_dir() and any(out.iterdir()):
            raise InputError(
                f"{out}: this folder is not empty. Give another --out, or remove it first.",
                code="folder-not-empty",
                file=str(out),
            )
        if out.exists() and out.samefile(Path.cwd()):
            raise InputError(
                f"{out}: a package is a new folder, and this is the current one. Name it by --out.",
                code="current-folder",
                file=str(out),
            )
        above = next(path for path in out.absolute().parents if path.exists() or path.is_symlink())
        if not above.is_dir():
            raise InputError(
                f"{above}: this is a file, and {out} needs a folder there. Give another --out, or move the"
                " file away.",
                code="parent-not-a-folder",
                file=str(above),
            )


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Give an empty folder beside `out` that becomes `out` on leaving; on an error nothing is left.

    All below it gets the modes 0644 and 0755, whatever the umask: a container's user may read it too. What a
    process left there that was killed while it made `out` is removed; a marker beside each folder tells that
    from the work of one that lives, as in the store (`smelt.core.store.presence`).

    Raises:
        InputError: `out` is there and not empty, or must not be written.
        RunError: the disk is full.
    """
    out = out.absolute()
    require_free(out)
    missing = [parent for parent in out.parents if not parent.exists()]
    beside = out.with_name(f".{out.name[:_LONGEST]}.{secrets.token_hex(4)}{_PART}")
    try:
        with told_apart(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            _sweep(out)
            with present(beside.with_name(beside.name + _OWNER)):
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


def _sweep(out: Path) -> None:
    """Remove what dead processes left of packages that would have become `out`."""
    name = re.compile(rf"\.{re.escape(out.name[:_LONGEST])}\.[0-9a-f]{{8}}{re.escape(_PART)}")
    for found in [path for path in out.parent.iterdir() if name.fullmatch(path.name.removesuffix(_OWNER))]:
        part = found.with_name(found.name.removesuffix(_OWNER))
        marker = part.with_name(part.name + _OWNER)
        at_work = is_present(marker) if marker.exists() else seconds_since_written(part) < SILENT_S
        if not at_work:
            shutil.rmtree(part, ignore_errors=True)
            marker.unlink(missing_ok=True)


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
        if error.errno in _FULL:
            raise _full(out) from error
        where = Path(os.fsdecode(error.filename) if error.filename else out)
        # what is made beside it has a name that the user does not know
        where = out.parent if where.name.endswith((_PART, _OWNER)) else where
        why = error.strerror or str(error)
        raise InputError(
            f"{where}: {why}. Nothing was left at {out}; give another --out.",
            code="unwritable-path",
            file=str(where),
        ) from error
    except Exception as error:
        if not any(words in str(error).lower() for words in _FULL_IN_WORDS):
            raise
        raise _full(out) from error


def _full(out: Path) -> RunError:
    return RunError(
        f"{out}: the disk is full{_free(out)}. Nothing of the package was left there. Make room, or give"
        " another --out.",
        code="disk-full",
        file=str(out),
    )


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
            raise RunError(
                f"{path.name}: a link in a package; it must hold real files.",
                code="link-in-package",
                file=path.name,
            )
        if os.name != "nt":
            path.chmod(FOLDER_MODE if path.is_dir() else FILE_MODE)
        flush(path)
