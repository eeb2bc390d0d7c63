"""Markers that say "somebody is at work here", and whether that is still so.

A marker is a file with its holder's record, locked by the kernel where the file system knows locks, and
touched every `BEAT_S` seconds. Others judge it by what they can be sure of: the lock and, on the same
machine, the process. A process of another machine, or of a container where locks do not work, is taken for
dead only when nothing was heard of it for `SILENT_S`.
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
from smelt.core.store.holder import read_holder, this_process, write_holder
from smelt.core.store.locks import is_locked, try_lock

# Seconds between two signs of life.
BEAT_S = 60.0
# Seconds of silence after which a process is taken for dead of which nothing else can be known.
SILENT_S = 3600.0


@contextlib.contextmanager
def present(marker: Path) -> Iterator[None]:
    """Keep the file `marker` there, as this process's, until the context ends."""
    holder = this_process()
    with contextlib.suppress(OSError):
        marker.unlink()  # of one that died
    descriptor = os.open(marker, os.O_RDWR | os.O_CREAT, 0o666)
    ended = threading.Event()
    beat = threading.Thread(target=_beat, args=(marker, ended), name="smelt-present", daemon=True)
    try:
        # locked before it has a record: nobody judges it without one
        write_holder(descriptor, replace(holder, locked=_locks(descriptor)))
        beat.start()
        yield
    finally:
        ended.set()
        if sys.platform == "win32":  # where no open file can be removed
            os.close(descriptor)
        with contextlib.suppress(OSError):
            marker.unlink()
        if sys.platform != "win32":
            os.close(descriptor)


def is_present(marker: Path) -> bool:
    """Say whether the process whose marker this is may still be at work; False: it surely is not.

    Where that cannot be known, it is taken to be until nothing was heard of it for `SILENT_S`.
    """
    holder = read_holder(marker)
    if holder is None:  # being made, or cut short
        return seconds_since_written(marker) < SILENT_S
    locked = is_locked(marker)
    if locked:
        return True
    if holder.kernel == this_process().kernel:
        if holder.locked and locked is not None:
            return False  # all processes of one kernel see each other's locks, and this one is gone
        alive = holder.is_alive()
        if alive is not None:
            return alive
    return seconds_since_written(marker) < SILENT_S


def _locks(descriptor: int) -> bool:
    try:
        return try_lock(descriptor) is True
    except OSError:
        return False


def _beat(marker: Path, ended: threading.Event) -> None:
    """Touch the marker now and then; a file server that does not answer for a while does no harm."""
    while not ended.wait(BEAT_S):
        with contextlib.suppress(OSError):
            os.utime(marker)
