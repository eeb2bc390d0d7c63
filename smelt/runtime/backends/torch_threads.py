"""Sets torch's number of threads while runners are open, and restores the caller's number afterwards.

torch has one number for the whole process (and one per thread that set it). The number of the last opened
runner applies; when it is closed, that of the one before it, and after the last one the caller's own number.
A runner that was not closed releases it when it is garbage-collected.
"""

from __future__ import annotations

import threading
import weakref

# Reentrant: a runner may be garbage-collected, and release, while the same thread is in here.
_lock = threading.RLock()
_wanted: dict[object, int] = {}  # in the order of opening
_callers: list[int] = []  # the number before the first runner; empty while there is none


class TorchThreads:
    """Sets torch to `count` threads until `release` or the end of the object; None changes nothing."""

    def __init__(self, count: int | None) -> None:
        self.count = count
        if count is None:
            return
        import torch

        token = object()
        with _lock:
            if not _wanted:
                _callers[:] = [torch.get_num_threads()]
            _wanted[token] = count
            torch.set_num_threads(count)
        self._end = weakref.finalize(self, _release_threads, token)
        self._end.atexit = False  # nothing to restore, and torch may be unloaded

    def release(self) -> None:
        """Release the number of threads; a second call does nothing."""
        if self.count is not None:
            self._end()


def _release_threads(token: object) -> None:
    import torch

    with _lock:
        last = next(reversed(_wanted)) is token
        del _wanted[token]
        if last:
            torch.set_num_threads(next(reversed(_wanted.values()), _callers[0]))
