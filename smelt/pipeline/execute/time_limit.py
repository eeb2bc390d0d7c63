"""A time limit that ends a run between its steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class TimeLimit:
    """The moment after which a run starts no further step.

    deadline: in seconds of `clock`. ended_run: whether a run was told that the time is over, to distinguish
    it from one that the user interrupted.
    """

    deadline: float
    clock: Callable[[], float] = time.monotonic
    ended_run: bool = False

    def is_over(self) -> bool:
        """Return whether the deadline has passed, and remember it in `ended_run`."""
        self.ended_run = self.clock() >= self.deadline
        return self.ended_run
