"""Turns of the workers of a search on one machine: latency is measured while no other worker runs a step.

A worker holds a lock of its own during each step. A measurement holds the lock that a step needs to start,
and waits until the running steps have ended. A dead worker's locks are free. A step may train for hours, so
the wait is limited. The measurement then runs next to the step: the rounds that the step disturbs are
repeated, and if they stay disturbed, the search compares CPU times.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from smelt.core.files import json_hash
from smelt.core.locks import current_owner, file_lock, is_file_lock_held, read_owner

MAX_WAIT_S = 600.0
"""Seconds that a measurement waits for the running steps of other workers."""
_POLL_S = 0.5


class MachineTurns:
    """Keeps steps and latency measurements of the workers of one machine apart.

    Args:
        folder: shared by the workers, which may be on several machines.
        max_wait_s: seconds that a measurement waits for running steps.
    """

    def __init__(self, folder: Path, max_wait_s: float = MAX_WAIT_S) -> None:
        self._machine = folder / f"machine-{json_hash(current_owner().kernel)[:12]}"
        self._own = f"{os.getpid()}-{uuid.uuid4().hex[:8]}.step.lock"
        self._max_wait_s = max_wait_s

    @contextmanager
    def step(self, on_wait: Callable[[str], None]) -> Iterator[None]:
        """Run a step: wait for a measurement, then keep others from beginning. on_wait: as of `file_lock`."""
        self._machine.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            with file_lock(self._gate, on_wait):
                stack.enter_context(file_lock(self._machine / self._own))
            yield

    @contextmanager
    def measurement(self, report: Callable[[str], None]) -> Iterator[None]:
        """Measure: keep steps from starting, and wait for those that run. report: called with a line."""
        self._machine.mkdir(parents=True, exist_ok=True)
        with file_lock(self._gate, lambda holder: report(f"latency: waits for {holder}, which is measuring")):
            self._wait_for_steps(report)
            yield

    @property
    def _gate(self) -> Path:
        return self._machine / "measurement.lock"

    def _wait_for_steps(self, report: Callable[[str], None]) -> None:
        started, reported = time.monotonic(), False
        while running := [lock for lock in self._machine.glob("*.step.lock") if is_file_lock_held(lock)]:
            holder = read_owner(running[0]) or "another worker"
            if time.monotonic() - started >= self._max_wait_s:
                report(f"latency: {holder} still runs a step; the measurement may be disturbed")
                return
            if not reported:
                report(f"latency: waits for the step of {holder}")
            reported = True
            time.sleep(_POLL_S)
