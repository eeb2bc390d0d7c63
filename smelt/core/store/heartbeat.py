"""Marker files of active processes, and whether the process is still active.

A marker is a file with its owner's record, locked by the kernel if the file system supports locks, and
touched every `BEAT_S` seconds. Other processes judge it by the lock and, on the same machine, by the
process. A process of another machine, or of a container without working locks, counts as dead only after
`SILENT_S` without a touch.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from smelt.core.files import seconds_since_written
from smelt.core.store.lock_owner import current_owner, read_owner, write_owner
from smelt.core.store.locks import is_locked, try_lock

# Seconds between two touches.
HEARTBEAT_S = 60.0
# Seconds without a touch after which a process that cannot be checked otherwise counts as dead.
STALE_AFTER_S = 3600.0


@contextlib.contextmanager
def heartbeat(marker: Path) -> Iterator[None]:
    """Hold the file `marker` for this process until the context ends."""
    holder = current_owner()
    with contextlib.suppress(OSError):
        marker.unlink()  # of a dead process
    descriptor = os.open(marker, os.O_RDWR | os.O_CREAT, 0o666)
    ended = threading.Event()
    beat = threading.Thread(target=_touch_repeatedly, args=(marker, ended), name="smelt-present", daemon=True)
    try:
        # locked before it has a record: without one it is not judged
        write_owner(descriptor, replace(holder, locked=_try_marker_lock(descriptor)))
        beat.start()
        yield
    finally:
        ended.set()
        if sys.platform == "win32":  # where an open file cannot be removed
            os.close(descriptor)
        with contextlib.suppress(OSError):
            marker.unlink()
        if sys.platform != "win32":
            os.close(descriptor)


def is_active(marker: Path) -> bool:
    """Return whether the process of this marker may still be active; False: it certainly is not.

    If that is unknown, it counts as active until `SILENT_S` without a touch.
    """
    holder = read_owner(marker)
    if holder is None:  # being written, or incomplete
        return seconds_since_written(marker) < STALE_AFTER_S
    locked = is_locked(marker)
    if locked:
        return True
    if holder.kernel == current_owner().kernel:
        if holder.locked and locked is not None:
            return False  # all processes of one kernel see each other's locks; this one has ended
        alive = holder.is_alive()
        if alive is not None:
            return alive
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
