"""What is known of the calls of a model that was loaded: who is in one, and which texts were cut."""

from __future__ import annotations

import threading
from types import TracebackType

from smelt.core.errors import InputError, panics_explained


class Cuts:
    """Hears of texts that were cut: `count` of them, at `limit` tokens."""

    def __init__(self) -> None:
        self.count = self.limit = 0

    def __call__(self, count: int, limit: int) -> None:
        """Take note of `count` more."""
        self.count, self.limit = self.count + count, limit


class Calls:
    """The calls that threads are in. A context manager around each call.

    closed: what to say to who comes too late. most: calls at a time, the others wait; None: any number.
    """

    def __init__(self, closed: str, most: int | None = None) -> None:
        self.lock = threading.Condition()
        self._message, self._most = closed, most
        self._closed = False
        self._inside = 0

    def __enter__(self) -> None:
        with self.lock:
            self.lock.wait_for(lambda: self._closed or self._most is None or self._inside < self._most)
            if self._closed:
                raise InputError(self._message, code="model-closed")
            self._inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self.lock:
            self._inside -= 1
            self.lock.notify_all()
        if error is not None and not isinstance(error, Exception):
            with panics_explained():
                raise error

    def close(self) -> bool:
        """Let nobody in any more and wait until all are out; return whether this call did it."""
        with self.lock:
            first, self._closed = not self._closed, True
            self.lock.notify_all()  # who waits for a turn goes away
            self.lock.wait_for(lambda: self._inside == 0)
        return first
