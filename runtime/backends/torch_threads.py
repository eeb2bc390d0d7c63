"""How many threads torch works with while runners want so many, and the caller's number again afterwards.

torch has one number for the whole process (and one per thread that set it). The last runner that was opened
decides; when it is closed, the one before it does, and after the last one the caller's own number is back.
A runner that nobody closed lets go when it is collected.
"""

from __future__ import annotations

import threading
import weakref

# Reentrant: a runner may be collected, and let go, while the same thread is in here.
_lock = threading.RLock()
_wanted: dict[object, int] = {}  # in the order of their coming
_callers: list[int] = []  # what was there before the first runner; empty while there is none


class TorchThreads:
    """Holds torch at `count` threads until `give_back` or its own end; None leaves it as it is."""

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
        self._end = weakref.finalize(self, _let_go, token)
        self._end.atexit = False  # nothing is left to restore, and torch may be gone

    def give_back(self) -> None:
        """Let go; a second time does nothing."""
        if self.count is not None:
            self._end()


def _let_go(token: object) -> None:
    import torch

    with _lock:
        last = next(reversed(_wanted)) is token
        del _wanted[token]
        if last:
            torch.set_num_threads(next(reversed(_wanted.values()), _callers[0]))
