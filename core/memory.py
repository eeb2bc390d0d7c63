"""How much memory is left, work that is known not to fit, and work that no garbage is looked for in."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path

from smelt.core.errors import RunError

# (limit, used, file with the cache that can be given back) of a container: cgroup v2, then v1.
_CGROUPS = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


def available_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that a process can still take: memory, swap, and no more than its container may."""
    import psutil

    free = int(psutil.virtual_memory().available) + int(psutil.swap_memory().free)
    left = _left_in_container(cgroup)
    return free if left is None else min(free, left)


def require_memory(needed_bytes: int, what: str, remedy: str, free_bytes: int | None = None) -> None:
    """Refuse work whose least need is above what there is.

    Args:
        needed_bytes: what is certainly needed; the true need may be higher.
        what: the work, for the message.
        remedy: what the user can do, a sentence.
        free_bytes: of the device that does the work (default: `available_bytes`).

    Raises:
        RunError: it does not fit.
    """
    free = available_bytes() if free_bytes is None else free_bytes
    if needed_bytes > free:
        raise RunError(
            f"{what} needs at least {needed_bytes / 1e9:.1f} GB of memory more, and {free / 1e9:.1f} GB are"
            f" free. {remedy}",
            code="out-of-memory",
        )


def _left_in_container(cgroup: Path) -> int | None:
    for limit_name, used_name in _CGROUPS:
        try:
            limit = int((cgroup / limit_name).read_text(encoding="ascii"))
            used = int((cgroup / used_name).read_text(encoding="ascii"))
            return max(0, limit - used + _cached(cgroup / limit_name))
        except (OSError, ValueError):  # no such group, or "max": no limit
            continue
    return None


def _cached(limit: Path) -> int:
    """Return the bytes of the group's file cache, which the kernel gives back when they are needed."""
    for line in (limit.parent / "memory.stat").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Keep Python's garbage collector still meanwhile; a caller who had it off finds it off again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
