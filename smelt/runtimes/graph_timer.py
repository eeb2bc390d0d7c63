"""Measure the time that graphs take, without tokenizing, choosing tokens and detokenizing.

On a CUDA stream it is the time between two events there, on the device. Elsewhere it is the wall clock around
a call that returns when the graph's work is done, as ONNX Runtime's does on CUDA too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any


class GraphTimer:
    """The times of the graphs that one thread ran inside of `time_graphs`."""

    def __init__(self) -> None:
        self._nanoseconds: list[int] = []
        self._events: list[tuple[Any, Any]] = []

    def total_ms(self) -> float | None:
        """Return the time of all graphs together, ms, after the device's work; None where none was run."""
        for _, end in self._events:
            end.synchronize()
        if not self._nanoseconds and not self._events:
            return None
        on_device = sum(begin.elapsed_time(end) for begin, end in self._events)
        return float(sum(self._nanoseconds) / 1e6 + on_device)

    @contextmanager
    def span(self, stream: Any) -> Iterator[None]:
        """Measure the work inside of the context; see `timed_graph`."""
        if stream is None:
            begin = time.perf_counter_ns()
            yield
            self._nanoseconds.append(time.perf_counter_ns() - begin)
            return
        import torch

        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record(stream)
        yield
        last.record(stream)
        self._events.append((first, last))


_active: ContextVar[GraphTimer | None] = ContextVar("graph_timer", default=None)


@contextmanager
def time_graphs() -> Iterator[GraphTimer]:
    """Measure the graphs that backends run inside of the context."""
    timer = GraphTimer()
    token = _active.set(timer)
    try:
        yield timer
    finally:
        _active.reset(token)


def timed_graph(find_stream: Callable[[], Any] | None = None) -> AbstractContextManager[None]:
    """Return a context for one run of a graph; it costs nothing outside of `time_graphs`.

    Args:
        find_stream: returns the `torch.cuda.Stream` of the work; None if the work is done when the context
            ends.
    """
    timer = _active.get()
    return nullcontext() if timer is None else timer.span(find_stream and find_stream())
