"""Speeds are interpolated, kept for a day, and measured in this process on request."""

from __future__ import annotations

import math
import os
import time
from dataclasses import replace

import pytest

from smelt.core.errors import RunError
from smelt.evaluate.latency import summary
from smelt.evaluate.latency.summary import CounterSnapshot
from smelt.models.costs import Work
from smelt.pipeline.inspect import machine as module
from smelt.pipeline.inspect.machine import MachineSpeed, machine_speed, measure_speed
from tests.support.expected_errors import raises_code

SPEED = MachineSpeed(
    forward={"128": 1e9, "512": 4e9}, training={"128": 1e9}, decode={"128": 1e9}, matrix=1e10, solver=1e9,
    moved=1e10, read=1e8, written=1e8, calls=1e5, base_bytes=500_000_000,
)  # fmt: skip


def test_work_seconds_add_up_and_speeds_are_interpolated():
    work = Work.of("forward", 4e9, 256) + Work.of("read", 5e8) + Work.of("seconds", 1.5)
    assert SPEED.seconds(work) == pytest.approx(4e9 / 2e9 + 5 + 1.5)
    assert [SPEED.seconds(Work.of("forward", 4e9, w)) for w in (64, 4096)] == [4.0, 1.0]


def test_speeds_are_cached_for_a_day(tmp_path, monkeypatch):
    measured = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(
        module, "_measure_in_process", lambda threads, folder: measured.append(threads) or SPEED
    )
    assert [machine_speed(2, tmp_path), machine_speed(2, tmp_path)] == [SPEED, SPEED]
    assert measured == [2]
    machine_speed(2, tmp_path, again=True)
    machine_speed(1, tmp_path)
    assert measured == [2, 2, 1]
    for file in (tmp_path / "cache").rglob("*.json"):
        os.utime(file, (time.time() - 90_000,) * 2)
    machine_speed(2, tmp_path)
    assert measured[3:] == [2]
    monkeypatch.setenv("OMP_NUM_THREADS", "3,1")
    machine_speed(None, tmp_path)
    assert measured[4:] == [3]


def test_disturbed_speeds_are_not_cached(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = iter([replace(SPEED, is_disturbed=True), SPEED])
    monkeypatch.setattr(module, "_measure_in_process", lambda threads, folder: next(found))
    assert [machine_speed(2, tmp_path).is_disturbed for _ in range(3)] == [True, False, False]


class BusyMachine:
    """A machine on which the clock advances faster than the process computes, in its first measurements."""

    def __init__(self, busy_measurements):
        self.measurements, self.busy_measurements = 0, busy_measurements
        self.wall = self.computed = 0.0

    def clock(self):
        self.wall += 60.0 if self.measurements <= self.busy_measurements else 1.0
        return self.wall

    def processor_clock(self):
        self.computed += 1.0
        return self.computed

    def read_counters(self):
        self.measurements += 0.5  # before and after each
        return CounterSnapshot(self.clock(), self.processor_clock(), None, self.computed, 0.0, None)


@pytest.mark.parametrize(("busy", "measurements"), [(0, 1), (1, 2), (9, 3)])
def test_disturbed_measurement_is_repeated_with_cpu_time(tmp_path, monkeypatch, busy, measurements):
    machine = BusyMachine(busy)
    monkeypatch.setattr(module, "WIDTHS", (64,))
    monkeypatch.setattr(summary, "read_counters", machine.read_counters)
    monkeypatch.setattr(module.time, "perf_counter", machine.clock)
    monkeypatch.setattr(module.time, "process_time", machine.processor_clock)
    found = measure_speed(1, tmp_path)
    assert (machine.measurements, found.is_disturbed) == (measurements, busy > 2)
    assert found.matrix == 2 * 768**3


def test_measured_speeds_are_finite_and_failure_is_error(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "WIDTHS", (64,))
    found = measure_speed(1, tmp_path)
    values = [found.matrix, found.solver, found.moved, found.read, found.written, found.calls]
    assert all(math.isfinite(v) and v > 1000 for v in [*values, *found.training.values()])
    assert list(tmp_path.iterdir()) == []
    assert min(module._disk_speeds(tmp_path / "no-folder")) > 1000  # those of temporary files
    monkeypatch.setattr(module, "python_command", lambda *words: ["false"])
    with raises_code("speed-not-measured", RunError):
        machine_speed(1, tmp_path, again=True)
