"""The owner of a lock: a record that other processes, containers and machines can check.

A process is identified by its kernel, its PID namespace, its PID, and its start time: a PID alone means
nothing on another machine or in another container, and is reused after the process has ended.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

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
        here = current_owner()
        same = (self.kernel, self.namespace) == (here.kernel, here.namespace)
        return f"process {self.process}" + ("" if same else f" on {self.host}")

    def is_alive(self) -> bool | None:
        """Return whether the process runs; None if that is not visible from here."""
        here = current_owner()
        if (self.kernel, self.namespace) != (here.kernel, here.namespace):
            return None
        import psutil

        try:
            found = psutil.Process(self.process)
            if found.status() == psutil.STATUS_ZOMBIE:
                return False  # it has ended, and its parent has not collected it yet
        except psutil.NoSuchProcess:
            return False
        except psutil.AccessDenied:
            return True
        now = _process_start_time(self.process)
        return self.started is None or now is None or abs(now - self.started) < _START_TOLERANCE_S


def current_owner() -> LockOwner:
    """Return the current process."""
    return LockOwner(
        platform.node() or "an unnamed machine", _boot_id(), _pid_namespace(), os.getpid(), _own_start_time()
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
        import uuid

        return f"{platform.node()} {uuid.getnode():012x}"


@cache
def _pid_namespace() -> int:
    """Return the PID namespace of this process (proc(5)); 0 if there is only one."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _own_start_time() -> float | None:
    return _own_start_time_of(os.getpid())


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
