"""A lock that two processes cannot hold at once, and that ends with its holder.

It is the kernel's lock on an open file (flock(2)), so a process that dies, however, gives it back; the
file's content names the holder for messages only. On Windows, and on file systems without such locks,
nothing is locked: the same work may then be done twice, and the first to finish wins (see `Store.commit`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

# What file systems answer that know no locks (some network ones).
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


def _silent(holder: str) -> None:
    """Wait without a word."""


@contextlib.contextmanager
def lock(path: Path, waiting: Callable[[str], None] = _silent) -> Iterator[None]:
    """Hold the lock file `path`; wait for whoever holds it.

    Args:
        path: made where it is missing (its folder must be there), removed on leaving.
        waiting: called once before a wait with the holder in words ("process 1234"). What it raises
            ends the wait, so it can also refuse to wait.
    """
    descriptor = _acquire(path, waiting)
    try:
        yield
    finally:
        if descriptor is not None:
            # removed while it is held, so whoever opened it meanwhile sees that and makes it anew
            with contextlib.suppress(OSError):
                path.unlink()
            os.close(descriptor)


def is_free(path: Path) -> bool:
    """Say whether nobody holds a lock on the file or folder `path`; True where locks do not work."""
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return True


def remove_if_free(path: Path) -> None:
    """Remove the lock file of a holder that died; one that is held stays."""
    if sys.platform == "win32":
        return
    import fcntl

    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_still(path, descriptor):  # as in `lock`, it is removed while it is held
                path.unlink()
        finally:
            os.close(descriptor)


def hold_folder(path: Path) -> int | None:
    """Lock the folder `path`; return what `os.close` gives back, or None where locks do not work."""
    if sys.platform == "win32":
        return None
    import fcntl

    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _acquire(path: Path, waiting: Callable[[str], None]) -> int | None:
    """Return the descriptor of the locked file, or None where there are no locks."""
    if sys.platform == "win32":
        return None
    told = False
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            told = _wait(descriptor, waiting, told)
            if _is_still(path, descriptor):
                with contextlib.suppress(OSError):  # a full disk: the name is for messages only
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, f"process {os.getpid()}".encode(), 0)
                return descriptor
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, OSError) and error.errno in _NO_LOCKS:
                return None
            raise
        os.close(descriptor)  # the last holder removed this file: the next one makes another


def _wait(descriptor: int, waiting: Callable[[str], None], told: bool) -> bool:
    """Lock the open file; return whether anybody had to be waited for, now or before (`told`)."""
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not told:
            waiting(_holder(descriptor))
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return True
    return told


def _is_still(path: Path, descriptor: int) -> bool:
    """Say whether the open file is what `path` names: its last holder may have removed it."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _holder(descriptor: int) -> str:
    return os.pread(descriptor, 100, 0).decode(errors="replace") or "another process"
