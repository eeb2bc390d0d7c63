"""Who holds a lock or is at work: a record that other processes, containers and machines can judge.

A process is known by the kernel that it runs on, the namespace in which its number counts, its number,
and when it began: a number alone means nothing on another machine or in another container, and is given
to another process when its first owner has ended.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

# A record begins at the second byte: Windows keeps others from reading the first one of a locked file.
_START = 1
_LONGEST = 4000
# Two readings of when a process began may differ by so many seconds (the boot time is told in whole ones).
_SAME_S = 2.0


@dataclass(frozen=True)
class Holder:
    """A process.

    host: name of the machine. kernel: what no other running system has. namespace: in which `process` is
    its number. started: seconds, counted so that setting the clock does not change it; None where the
    system does not say. locked: it holds the kernel's lock on the file with this record.
    """

    host: str
    kernel: str
    namespace: int
    process: int
    started: float | None
    locked: bool = False

    def __str__(self) -> str:
        """Return "process 1234", with the machine where that is not this one."""
        here = this_process()
        same = (self.kernel, self.namespace) == (here.kernel, here.namespace)
        return f"process {self.process}" + ("" if same else f" on {self.host}")

    def is_alive(self) -> bool | None:
        """Say whether the process runs; None where that cannot be seen from here."""
        here = this_process()
        if (self.kernel, self.namespace) != (here.kernel, here.namespace):
            return None
        import psutil

        try:
            found = psutil.Process(self.process)
            if found.status() == psutil.STATUS_ZOMBIE:
                return False  # it has ended, and its parent was not told yet
        except psutil.NoSuchProcess:
            return False
        except psutil.AccessDenied:
            return True
        now = _started(self.process)
        return self.started is None or now is None or abs(now - self.started) < _SAME_S


def this_process() -> Holder:
    """Return the process that asks."""
    return Holder(platform.node() or "an unnamed machine", _kernel(), _namespace(), os.getpid(), _own_start())


def write_holder(descriptor: int, holder: Holder) -> None:
    """Replace what the open file holds by `holder`."""
    os.ftruncate(descriptor, 0)
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.write(descriptor, b" " * _START + json.dumps(asdict(holder)).encode())


def read_holder(path: Path) -> Holder | None:
    """Return whose record is in the file `path`; None where there is none, or one that was cut short."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        os.lseek(descriptor, _START, os.SEEK_SET)
        return Holder(**json.loads(os.read(descriptor, _LONGEST)))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    finally:
        os.close(descriptor)


@cache
def _kernel() -> str:
    """Return what tells this running system from all others."""
    try:
        # made anew at every start of a Linux system, and the same in all of its containers
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        import uuid

        return f"{platform.node()} {uuid.getnode():012x}"


@cache
def _namespace() -> int:
    """Return in which namespace this process's number counts (proc(5)); 0 where there is only one."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _own_start() -> float | None:
    return _own_start_of(os.getpid())


@cache
def _own_start_of(process: int) -> float | None:
    """Return when this process began; asked by its number, so that a fork asks again."""
    return _started(process)


def _started(process: int) -> float | None:
    """Return when a process began: on Linux in seconds since the system's start, elsewhere since 1970."""
    import psutil

    try:
        # Linux counts from its own start, and psutil adds that, which moves when the clock is set
        offset = psutil.boot_time() if sys.platform == "linux" else 0.0
        return float(psutil.Process(process).create_time() - offset)
    except (psutil.Error, OSError, RuntimeError):
        return None
