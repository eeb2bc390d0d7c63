"""A lock that two processes cannot hold at once, and that ends with its holder.

It is the kernel's lock on an open file (flock, on Windows LockFileEx; both through `filelock`), so a
process that dies, however, gives it back. The file's content names the holder for messages only.

Where the file system knows no such locks (some network ones), it is a lease: a file beside it that its
holder touches again and again. A holder that died on this machine is seen at once; one of another machine
has lost the lease when nothing was heard of it for `LEASE_S`. It may live nonetheless, so the same work may
then be done twice, and the first to finish wins (see `Store.commit`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from smelt.core.files import seconds_since_written
from smelt.core.store.holder import read_holder, this_process, write_holder

# Seconds of silence after which the lease of another machine's process may be taken.
LEASE_S = 600.0
# Seconds after which a lease that names nobody is that of a process that died between making and naming it.
_NAMELESS_S = 30.0
# Seconds between two looks at a lock that is waited for, and at a lease.
_LOOK_S, _LOOK_AT_LEASE_S = 0.1, 0.5
# What file systems answer that know no locks.
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_LOCK, _LEASE = ".lock", ".lease"


def _silent(holder: str) -> None:
    """Wait without a word."""


@contextlib.contextmanager
def lock(path: Path, waiting: Callable[[str], None] = _silent) -> Iterator[None]:
    """Hold the lock file `path`; wait for whoever holds it.

    Args:
        path: made where it is missing (its folder must be there), removed on leaving.
        waiting: called once before a wait with the holder in words ("process 1234", "process 7 on node2").
            What it raises ends the wait, so it can also refuse to wait.
    """
    descriptor = _acquire(path, waiting)
    if descriptor is None:
        with _leased(path, waiting):
            yield
        return
    try:
        yield
    finally:
        _release(path, descriptor)


def try_lock(descriptor: int) -> bool | None:
    """Take the kernel's lock on an open file; False: somebody else has it; None: there are no locks here.

    Raises:
        OSError: the system cannot tell.
    """
    from filelock import lock_descriptor

    try:
        return lock_descriptor(descriptor, blocking=False)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise


def is_locked(path: Path) -> bool | None:
    """Say whether somebody holds the kernel's lock on the file `path`; None where that cannot be seen."""
    try:
        descriptor = _open(path, 0)
    except OSError:
        return None
    try:
        taken = try_lock(descriptor)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return None if taken is None else not taken


def remove_if_free(path: Path) -> None:
    """Remove the file of a lock (.lock, .lease) whose holder died; one that is held stays, like others."""
    if path.suffix == _LEASE:
        _remove_dead_lease(path)
    if path.suffix != _LOCK:
        return
    with contextlib.suppress(OSError):
        descriptor = _open(path, 0)
        try:
            # as in `lock`, it is removed while it is held
            free = try_lock(descriptor) is True and _is_still(path, descriptor)
            if free and sys.platform != "win32":
                path.unlink()
        finally:
            os.close(descriptor)
        if free and sys.platform == "win32":
            path.unlink()  # which fails, and does no harm, where somebody has opened it meanwhile


def _acquire(path: Path, waiting: Callable[[str], None]) -> int | None:
    """Return the descriptor of the locked file, or None where there are no locks."""
    from filelock import lock_descriptor

    told = False
    while True:
        descriptor = _open(path, os.O_CREAT)
        try:
            taken = try_lock(descriptor)
            if taken is None:
                if os.fstat(descriptor).st_size == 0:  # made here, and it locks nothing
                    path.unlink(missing_ok=True)
                os.close(descriptor)
                return None
            if not taken:
                if not told:
                    waiting(str(read_holder(path) or "another process"))
                told = True
                lock_descriptor(descriptor, poll_interval=_LOOK_S)
            if _is_still(path, descriptor):
                with contextlib.suppress(OSError):  # a full disk: the name is for messages only
                    write_holder(descriptor, this_process())
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the last holder removed this file: the next one makes another


def _release(path: Path, descriptor: int) -> None:
    if sys.platform != "win32":
        # removed while it is held, so whoever opened it meanwhile sees that and makes it anew
        with contextlib.suppress(OSError):
            path.unlink()
    os.close(descriptor)
    if sys.platform == "win32":  # where no open file can be removed; one that is waited for stays
        with contextlib.suppress(OSError):
            path.unlink()


def _open(path: Path, flags: int) -> int:
    """Open a lock file for writing, which locks on network file systems need, else for reading."""
    try:
        return os.open(path, os.O_RDWR | flags, 0o666)
    except PermissionError:
        if not path.exists():
            raise
        return os.open(path, os.O_RDONLY)  # another user's


def _is_still(path: Path, descriptor: int) -> bool:
    """Say whether the open file is what `path` names: its last holder may have removed it."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _lease(path: Path) -> Any:
    from filelock import SoftFileLease

    return SoftFileLease(path, lease_duration=LEASE_S, heartbeat_interval=LEASE_S / 10)


@contextlib.contextmanager
def _leased(path: Path, waiting: Callable[[str], None]) -> Iterator[None]:
    """Hold the lease beside the lock file `path`; wait for whoever holds it."""
    from filelock import Timeout

    place = path.with_name(path.name + _LEASE)
    _remove_dead_lease(place)  # who refuses to wait would never see how long it is silent
    lease = _lease(place)
    told = False
    while not lease.is_locked:
        try:
            lease.acquire(blocking=False)
        except Timeout:
            if not told:
                waiting(_of_lease(lease))
            told = True
            time.sleep(_LOOK_AT_LEASE_S)
            _break_nameless(lease, place)
    try:
        yield
    finally:
        lease.release()


def _of_lease(lease: Any) -> str:
    """Return the holder of a lease in words."""
    owner = lease.owner
    if owner is None:
        return "another process"
    # filelock adds the namespace of the process's number to the name of the machine
    host, here = owner.hostname.partition("?")[0], this_process()
    return f"process {owner.pid}" + ("" if host == here.host else f" on {host}")


def _break_nameless(lease: Any, path: Path) -> None:
    """Give up the lease of a process that died before it wrote who it is; filelock waits for it for ever."""
    with contextlib.suppress(OSError):
        if path.stat().st_size == 0 and seconds_since_written(path) > _NAMELESS_S:
            lease.force_break()


def _remove_dead_lease(path: Path) -> None:
    """Remove the lease of a process of this machine that died, or of which nothing was heard for long."""
    from filelock import Timeout

    lease = _lease(path)
    with contextlib.suppress(OSError, Timeout):
        if not path.exists():
            return
        if seconds_since_written(path) > 2 * LEASE_S:
            lease.force_break()
        _break_nameless(lease, path)
        lease.acquire(blocking=False)
        lease.release()
