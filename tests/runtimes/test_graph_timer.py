"""The time of graphs alone: the wall clock on the CPU, events on a CUDA stream."""

import time
from typing import ClassVar

import pytest
import torch

from smelt.runtimes import graph_timer
from smelt.runtimes.graph_timer import time_graphs, timed_graph

pytestmark = pytest.mark.quick


def test_only_the_time_inside_of_graphs_is_counted(monkeypatch):
    clock = iter([0, 3_000_000, 10_000_000, 14_000_000])
    monkeypatch.setattr(graph_timer.time, "perf_counter_ns", lambda: next(clock))
    with time_graphs() as timer:
        for _ in range(2):
            with timed_graph():
                time.sleep(0)
    assert timer.total_ms() == 7.0


def test_no_graph_has_no_time():
    with time_graphs() as timer:
        pass
    assert timer.total_ms() is None


class FakeEvent:
    """`torch.cuda.Event` whose time is the number of events recorded before it, times 5 ms."""

    recorded: ClassVar[list] = []

    def __init__(self, enable_timing):
        assert enable_timing
        self.is_done = False

    def record(self, stream):
        self.time = 5.0 * len(self.recorded)
        self.recorded.append((self, stream))

    def synchronize(self):
        self.is_done = True

    def elapsed_time(self, end):
        assert end.is_done
        return end.time - self.time


def test_events_are_recorded_on_the_stream_and_waited_for(monkeypatch):
    """An event that is not done has no time: torch raises an error."""
    monkeypatch.setattr(FakeEvent, "recorded", [])
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    with time_graphs() as timer:
        for _ in range(3):
            with timed_graph(lambda: "stream"):
                pass
    assert timer.total_ms() == 15.0
    assert {stream for _, stream in FakeEvent.recorded} == {"stream"}


def test_outside_of_a_measurement_no_event_is_recorded(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", None)
    with timed_graph(lambda: "stream"):
        pass
