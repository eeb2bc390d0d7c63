"""Track concurrent calls of a loaded model, and count truncated texts."""

from __future__ import annotations

import threading
from types import TracebackType

from smelt.core.errors import InputError, rust_panics_as_errors


class TruncationCounter:
    """Counts truncated texts: `count` texts, truncated at `limit` tokens."""

    def __init__(self) -> None:
        self.count = self.limit = 0

    def __call__(self, count: int, limit: int) -> None:
        """Add `count` truncated texts."""
        self.count, self.limit = self.count + count, limit


class ActiveCalls:
    """Counts active calls of all threads. A context manager around each call.

    closed: message for calls after `close`. most: maximum number of concurrent calls, others wait; None: no
    limit.
    """

    def __init__(self, closed: str, most: int | None = None) -> None:
        self.lock = threading.Condition()
        self._message, self._max_calls = closed, most
        self._closed = False
        self._active = 0

    def __enter__(self) -> None:
        with self.lock:
            self.lock.wait_for(
                lambda: self._closed or self._max_calls is None or self._active < self._max_calls
            )
            if self._closed:
                raise InputError(self._message, code="model-closed")
            self._active += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self.lock:
            self._active -= 1
            self.lock.notify_all()
        if error is not None and not isinstance(error, Exception):
            with rust_panics_as_errors():
                raise error

    def close(self) -> bool:
        """Reject new calls and wait for the active ones; return False if it was closed before."""
        with self.lock:
            first, self._closed = not self._closed, True
            self.lock.notify_all()  # waiting calls raise the error
            self.lock.wait_for(lambda: self._active == 0)
        return first
