"""How many threads torch works with while runners want so many, and the caller's number again afterwards.

torch has one number for the whole process (and one per thread that set it). The last runner that was opened
decides; when it is closed, the one before it does, and after the last one the caller's own number is back.
"""

from __future__ import annotations

import threading

_lock = threading.Lock()
_wanted: list[TorchThreads] = []
_callers: list[int] = []  # what was there before the first runner; empty while there is none


class TorchThreads:
    """Holds torch at `count` threads until `give_back`; None leaves it as it is."""

    def __init__(self, count: int | None) -> None:
        self.count = count
        if count is None:
            return
        import torch

        with _lock:
            if not _wanted:
                _callers[:] = [torch.get_num_threads()]
            _wanted.append(self)
            torch.set_num_threads(count)

    def give_back(self) -> None:
        """Let go; a second time does nothing."""
        import torch

        with _lock:
            if self not in _wanted:
                return
            last = _wanted[-1] is self
            _wanted.remove(self)
            if last:
                torch.set_num_threads(_wanted[-1].count or 1 if _wanted else _callers[0])
