"""Locks and heartbeats between processes: both end with their owner, in whatever way it dies.

A lock is the kernel's lock on an open file (flock, on Windows LockFileEx; both through `filelock`), which is
released when the process ends. The content of the file names the owner for messages only. On file systems
without such locks (some network ones), the lock is a lease: a file next to it that its owner touches
repeatedly. A dead owner on this machine is detected at once; one on another machine loses the lease after
`LEASE_S` without a touch. It may still be alive, so the same work may then be done twice, and the first to
finish wins (see `Store.commit`).

Workers of a search on one machine take turns: latency is measured while no other worker runs a step.

A heartbeat shows that a process is active. It is a marker file with its owner's record, locked by the kernel
if the file system supports locks, and touched every `HEARTBEAT_S` seconds. Other processes judge it by the
lock and, on the same machine, by the process. A process of another machine, or of a container without working
locks, counts as dead only after `STALE_AFTER_S` without a touch.

An owner's record can be checked from other processes, containers and machines. It identifies the process by
its kernel, its PID namespace, its PID, and its start time: a PID alone means nothing on another machine or in
another container, and is reused after the process has ended.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from smelt.core.files import json_hash, seconds_since_written

# A record begins at the second byte: Windows prevents reading the first byte of a locked file.
_RECORD_OFFSET = 1
_MAX_RECORD_BYTES = 4000
# Two readings of a process's start time may differ by this (boot time is in whole seconds).
_START_TOLERANCE_S = 2.0


@dataclass(frozen=True)
class LockOwner:
    """A process.

    host: name of the machine. kernel: unique id of the running system. namespace: of the PID `process`.
    started: seconds, independent of changes of the clock; None if the system does not provide it.
    locked: it holds the kernel's lock on the file with this record.
    """

    host: str
    kernel: str
    namespace: int
    process: int
    started: float | None
    locked: bool = False

    def __str__(self) -> str:
        """Return "process 1234", with the machine if it is another one."""
        current = current_owner()
        is_same_machine = (self.kernel, self.namespace) == (current.kernel, current.namespace)
        return f"process {self.process}" + ("" if is_same_machine else f" on {self.host}")

    def is_alive(self) -> bool | None:
        """Return whether the process runs; None if that is not visible from here."""
        current = current_owner()
        if (self.kernel, self.namespace) != (current.kernel, current.namespace):
            return None
        import psutil

        try:
            running = psutil.Process(self.process)
            if running.status() == psutil.STATUS_ZOMBIE:
                return False  # it has ended, and its parent has not collected it yet
        except psutil.NoSuchProcess:
            return False
        except psutil.AccessDenied:
            return True
        start_time = _process_start_time(self.process)
        return (
            self.started is None or start_time is None or abs(start_time - self.started) < _START_TOLERANCE_S
        )


def current_owner() -> LockOwner:
    """Return the current process."""
    return LockOwner(
        platform.node() or "an unnamed machine",
        _boot_id(),
        _pid_namespace(),
        os.getpid(),
        _own_start_time_of(os.getpid()),
    )


def write_owner(descriptor: int, owner: LockOwner) -> None:
    """Replace the content of the open file by `owner`."""
    os.ftruncate(descriptor, 0)
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.write(descriptor, b" " * _RECORD_OFFSET + json.dumps(asdict(owner)).encode())


def read_owner(path: Path) -> LockOwner | None:
    """Return the owner in the file `path`; None if there is none, or the record is incomplete."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        os.lseek(descriptor, _RECORD_OFFSET, os.SEEK_SET)
        return LockOwner(**json.loads(os.read(descriptor, _MAX_RECORD_BYTES)))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    finally:
        os.close(descriptor)


@cache
def _boot_id() -> str:
    """Return the unique id of this running system."""
    try:
        # new at every boot of a Linux system, and the same in all of its containers
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return f"{platform.node()} {uuid.getnode():012x}"


@cache
def _pid_namespace() -> int:
    """Return the PID namespace of this process (proc(5)); 0 if there is only one."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


@cache
def _own_start_time_of(process: int) -> float | None:
    """Return the start time of this process; by its PID, so that a fork computes it again."""
    return _process_start_time(process)


def _process_start_time(process: int) -> float | None:
    """Return the start time of a process: on Linux in seconds since boot, elsewhere since 1970."""
    import psutil

    try:
        # Linux counts from boot; psutil adds the boot time, which changes when the clock is set
        offset = psutil.boot_time() if sys.platform == "linux" else 0.0
        return float(psutil.Process(process).create_time() - offset)
    except (psutil.Error, OSError, RuntimeError):
        return None


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


# not filelock's FileLock (4.2): it keeps its file, one for each key of the store, fails on file systems that
# answer ENOLCK, ENOTSUP or EINVAL, and falls back to a lock that does not expire on another machine. Not its
# SoftFileLock with a lifetime: it is not renewed, so a training of hours would lose its lock to a second run
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
        acquired = try_lock(descriptor)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return None if acquired is None else not acquired


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
            is_unlocked = try_lock(descriptor) is True and _is_same_file(path, descriptor)
            if is_unlocked and sys.platform != "win32":
                path.unlink()
        finally:
            os.close(descriptor)
        if is_unlocked and sys.platform == "win32":
            path.unlink()  # fails, which is harmless, if another process has opened it meanwhile


def _acquire(path: Path, on_wait: Callable[[str], None]) -> int | None:
    """Return the descriptor of the locked file, or None without lock support."""
    from filelock import lock_descriptor

    reported = False
    while True:
        descriptor = _open_lock_file(path, os.O_CREAT)
        try:
            acquired = try_lock(descriptor)
            if acquired is None:
                if os.fstat(descriptor).st_size == 0:  # created here, and not lockable
                    path.unlink(missing_ok=True)
                os.close(descriptor)
                return None
            if not acquired:
                if not reported:
                    on_wait(str(read_owner(path) or "another process"))
                reported = True
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

    lease_path = path.with_name(path.name + _LEASE_SUFFIX)
    _remove_stale_lease(lease_path)  # a caller that refuses to wait would never detect an expired lease
    lease = _make_lease(lease_path)
    reported = False
    while not lease.is_locked:
        try:
            lease.acquire(blocking=False)
        except Timeout:
            if not reported:
                on_wait(_describe_lease_owner(lease))
            reported = True
            time.sleep(_LEASE_POLL_S)
            _break_ownerless_lease(lease, lease_path)
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
    host, current = owner.hostname.partition("?")[0], current_owner()
    return f"process {owner.pid}" + ("" if host == current.host else f" on {host}")


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


# Seconds between two touches.
HEARTBEAT_S = 60.0
# Seconds without a touch after which a process that cannot be checked otherwise counts as dead.
STALE_AFTER_S = 3600.0


# not filelock's SoftFileLease (4.2): only a process that waits as long as a lease detects that it expired, so
# to a single check, as `is_active`, a process of another machine that died counts as alive forever
@contextlib.contextmanager
def heartbeat(marker: Path) -> Iterator[None]:
    """Hold the file `marker` for this process until the context ends."""
    holder = current_owner()
    with contextlib.suppress(OSError):
        marker.unlink()  # of a dead process
    descriptor = os.open(marker, os.O_RDWR | os.O_CREAT, 0o666)
    stopped = threading.Event()
    touch_thread = threading.Thread(
        target=_touch_repeatedly, args=(marker, stopped), name="smelt-present", daemon=True
    )
    try:
        # locked before it has a record: without one it is not judged
        write_owner(descriptor, replace(holder, locked=_try_marker_lock(descriptor)))
        touch_thread.start()
        yield
    finally:
        stopped.set()
        if sys.platform == "win32":  # where an open file cannot be removed
            os.close(descriptor)
        with contextlib.suppress(OSError):
            marker.unlink()
        if sys.platform != "win32":
            os.close(descriptor)


def is_active(marker: Path) -> bool:
    """Return whether the process of this marker may still be active; False: it certainly is not.

    If that is unknown, it counts as active until `STALE_AFTER_S` without a touch.
    """
    holder, locked = read_owner(marker), is_locked(marker)
    if holder is None:  # being written, or incomplete: it is locked before it is written
        return seconds_since_written(marker) < (STALE_AFTER_S if locked is not False else _OWNERLESS_S)
    if locked:
        return True
    if holder.kernel == current_owner().kernel:
        if holder.locked and locked is not None:
            return False  # all processes of one kernel see each other's locks; this one has ended
        is_alive = holder.is_alive()
        if is_alive is not None:
            return is_alive
    return seconds_since_written(marker) < STALE_AFTER_S


def _try_marker_lock(descriptor: int) -> bool:
    try:
        return try_lock(descriptor) is True
    except OSError:
        return False


def _touch_repeatedly(marker: Path, ended: threading.Event) -> None:
    """Touch the marker at intervals; a file server that does not answer for a while is tolerated."""
    while not ended.wait(HEARTBEAT_S):
        with contextlib.suppress(OSError):
            os.utime(marker)


def is_file_lock_held(path: Path) -> bool:
    """Return whether a process holds the `file_lock` of `path`."""

    class _HeldError(Exception):
        pass

    def refuse(holder: str) -> None:
        raise _HeldError

    try:
        with file_lock(path, refuse):
            return False
    except _HeldError:
        return True


MAX_WAIT_S = 600.0
"""Seconds that a measurement waits for the running steps of other workers."""
_STEP_POLL_S = 0.5


class MachineTurns:
    """Keeps steps and latency measurements of the workers of one machine apart.

    A worker holds a lock of its own during each step. A measurement holds the lock that a step needs to
    start, and waits until the running steps have ended. A dead worker's locks are free. A step may train for
    hours, so the wait is limited. The measurement then runs next to the step: the rounds that the step
    disturbs are repeated, and if they stay disturbed, the search compares CPU times.

    Args:
        folder: shared by the workers, which may be on several machines.
        max_wait_s: seconds that a measurement waits for running steps.
    """

    def __init__(self, folder: Path, max_wait_s: float = MAX_WAIT_S) -> None:
        self._machine = folder / f"machine-{json_hash(current_owner().kernel)[:12]}"
        self._own = f"{os.getpid()}-{uuid.uuid4().hex[:8]}.step.lock"
        self._max_wait_s = max_wait_s

    @contextmanager
    def step(self, on_wait: Callable[[str], None]) -> Iterator[None]:
        """Run a step: wait for a measurement, then keep others from beginning. on_wait: as of `file_lock`."""
        self._machine.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            with file_lock(self._gate, on_wait):
                stack.enter_context(file_lock(self._machine / self._own))
            yield

    @contextmanager
    def measurement(self, report: Callable[[str], None]) -> Iterator[None]:
        """Measure: keep steps from starting, and wait for those that run. report: called with a line."""
        self._machine.mkdir(parents=True, exist_ok=True)
        with file_lock(self._gate, lambda holder: report(f"latency: waits for {holder}, which is measuring")):
            self._wait_for_steps(report)
            yield

    @property
    def _gate(self) -> Path:
        return self._machine / "measurement.lock"

    def _wait_for_steps(self, report: Callable[[str], None]) -> None:
        started, reported = time.monotonic(), False
        while held_locks := [lock for lock in self._machine.glob("*.step.lock") if is_file_lock_held(lock)]:
            holder = read_owner(held_locks[0]) or "another worker"
            if time.monotonic() - started >= self._max_wait_s:
                report(f"latency: {holder} still runs a step; the measurement may be disturbed")
                return
            if not reported:
                report(f"latency: waits for the step of {holder}")
            reported = True
            time.sleep(_STEP_POLL_S)
