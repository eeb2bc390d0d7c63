"""Locks between processes that end with their owner.

A lock is the kernel's lock on an open file (flock, on Windows LockFileEx; both through `filelock`), so a
process that dies in any way releases it. The content of the file names the owner for messages only.

On file systems without such locks (some network ones), it is a lease: a file next to it that its owner
touches repeatedly. A dead owner on this machine is detected at once; one on another machine loses the lease
after `LEASE_S` without a touch. It may still be alive, so the same work may then be done twice, and the first
to finish wins (see `Store.commit`).
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
from smelt.core.store.lock_owner import current_owner, read_owner, write_owner

# Seconds without a touch after which the lease of another machine's process expires.
LEASE_S = 600.0
# Seconds after which a lease without an owner belongs to a process that died while making it.
_OWNERLESS_S = 30.0
# Seconds between two checks of a lock, and of a lease.
_POLL_S, _LEASE_POLL_S = 0.1, 0.5
# Error numbers of file systems without locks.
_LOCKS_UNSUPPORTED = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_LOCK_SUFFIX, _LEASE_SUFFIX = ".lock", ".lease"


def _ignore_wait(holder: str) -> None:
    """Wait silently."""


@contextlib.contextmanager
def file_lock(path: Path, on_wait: Callable[[str], None] = _ignore_wait) -> Iterator[None]:
    """Hold the lock file `path`; wait for its present owner.

    Args:
        path: created if missing (its folder must exist), removed on leaving.
        on_wait: called once before a wait with the owner as text ("process 1234", "process 7 on node2").
            An exception from it ends the wait, so it can also refuse to wait.
    """
    descriptor = _acquire(path, on_wait)
    if descriptor is None:
        with _hold_lease(path, on_wait):
            yield
        return
    try:
        yield
    finally:
        _release(path, descriptor)


def try_lock(descriptor: int) -> bool | None:
    """Take the kernel's lock on an open file; False: another process has it; None: no lock support.

    Raises:
        OSError: of any other kind.
    """
    from filelock import lock_descriptor

    try:
        return lock_descriptor(descriptor, blocking=False)
    except OSError as error:
        if error.errno in _LOCKS_UNSUPPORTED:
            return None
        raise


def is_locked(path: Path) -> bool | None:
    """Return whether a process holds the kernel's lock on the file `path`; None if unknown."""
    try:
        descriptor = _open_lock_file(path, 0)
    except OSError:
        return None
    try:
        taken = try_lock(descriptor)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return None if taken is None else not taken


def remove_stale_lock(path: Path) -> None:
    """Remove the file of a lock (.lock, .lease) whose owner died; held locks and other files are kept."""
    if path.suffix == _LEASE_SUFFIX:
        _remove_stale_lease(path)
    if path.suffix != _LOCK_SUFFIX:
        return
    with contextlib.suppress(OSError):
        descriptor = _open_lock_file(path, 0)
        try:
            # as in `file_lock`, it is removed while held
            free = try_lock(descriptor) is True and _is_same_file(path, descriptor)
            if free and sys.platform != "win32":
                path.unlink()
        finally:
            os.close(descriptor)
        if free and sys.platform == "win32":
            path.unlink()  # fails, without harm, if another process has opened it meanwhile


def _acquire(path: Path, on_wait: Callable[[str], None]) -> int | None:
    """Return the descriptor of the locked file, or None without lock support."""
    from filelock import lock_descriptor

    told = False
    while True:
        descriptor = _open_lock_file(path, os.O_CREAT)
        try:
            taken = try_lock(descriptor)
            if taken is None:
                if os.fstat(descriptor).st_size == 0:  # created here, and not lockable
                    path.unlink(missing_ok=True)
                os.close(descriptor)
                return None
            if not taken:
                if not told:
                    on_wait(str(read_owner(path) or "another process"))
                told = True
                lock_descriptor(descriptor, poll_interval=_POLL_S)
            if _is_same_file(path, descriptor):
                with contextlib.suppress(OSError):  # a full disk: the name is for messages only
                    write_owner(descriptor, current_owner())
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the last owner removed this file: the next one creates another


def _release(path: Path, descriptor: int) -> None:
    if sys.platform != "win32":
        # removed while it is held, so another process that opened it meanwhile creates it again
        with contextlib.suppress(OSError):
            path.unlink()
    os.close(descriptor)
    if sys.platform == "win32":  # where an open file cannot be removed; one with waiting processes is kept
        with contextlib.suppress(OSError):
            path.unlink()


def _open_lock_file(path: Path, flags: int) -> int:
    """Open a lock file for writing, as locks on network file systems require, else for reading."""
    try:
        return os.open(path, os.O_RDWR | flags, 0o666)
    except PermissionError:
        if not path.exists():
            raise
        return os.open(path, os.O_RDONLY)  # another user's


def _is_same_file(path: Path, descriptor: int) -> bool:
    """Return whether `path` is still the open file: its last owner may have removed it."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _make_lease(path: Path) -> Any:
    from filelock import SoftFileLease

    return SoftFileLease(path, lease_duration=LEASE_S, heartbeat_interval=LEASE_S / 10)


@contextlib.contextmanager
def _hold_lease(path: Path, on_wait: Callable[[str], None]) -> Iterator[None]:
    """Hold the lease next to the lock file `path`; wait for its present owner."""
    from filelock import Timeout

    place = path.with_name(path.name + _LEASE_SUFFIX)
    _remove_stale_lease(place)  # a caller that refuses to wait would never detect an expired lease
    lease = _make_lease(place)
    told = False
    while not lease.is_locked:
        try:
            lease.acquire(blocking=False)
        except Timeout:
            if not told:
                on_wait(_describe_lease_owner(lease))
            told = True
            time.sleep(_LEASE_POLL_S)
            _break_ownerless_lease(lease, place)
    try:
        yield
    finally:
        lease.release()


def _describe_lease_owner(lease: Any) -> str:
    """Return the owner of a lease as text."""
    owner = lease.owner
    if owner is None:
        return "another process"
    # filelock appends the PID namespace to the name of the machine
    host, here = owner.hostname.partition("?")[0], current_owner()
    return f"process {owner.pid}" + ("" if host == here.host else f" on {host}")


def _break_ownerless_lease(lease: Any, path: Path) -> None:
    """Remove a lease without an owner, whose process died; filelock would wait for it forever."""
    with contextlib.suppress(OSError):
        if path.stat().st_size == 0 and seconds_since_written(path) > _OWNERLESS_S:
            lease.force_break()


def _remove_stale_lease(path: Path) -> None:
    """Remove the lease of a dead process of this machine, or an expired one."""
    from filelock import Timeout

    lease = _make_lease(path)
    with contextlib.suppress(OSError, Timeout):
        if not path.exists():
            return
        if seconds_since_written(path) > 2 * LEASE_S:
            lease.force_break()
        _break_ownerless_lease(lease, path)
        lease.acquire(blocking=False)
        lease.release()
