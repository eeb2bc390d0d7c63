"""Inputs of requests that arrive at the same time share a call of the model."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any


class FullError(Exception):
    """As many inputs are waiting as may wait."""


@dataclass
class Job:
    """An input that waits for its answer; since: when it came, of `time.monotonic`."""

    value: Any
    since: float = field(default_factory=time.monotonic)
    answer: Future[Any] = field(default_factory=Future)


class Batcher:
    """Threads that take what is waiting, up to a batch, and call the model with it.

    A batch begins when a thread is free and `size` inputs are waiting, or the first of them has waited for
    `wait_s`. While the model computes inputs gather, so that batches are large under load without a wait.
    """

    def __init__(
        self, call: Callable[[list[Any]], list[Any]], size: int, wait_s: float, most: int, workers: int
    ) -> None:
        """Start the threads.

        Args:
            call: the model: inputs -> an answer for each, in their order.
            size: inputs in a call, at most.
            wait_s: seconds that an input waits for others.
            most: inputs that may wait.
            workers: calls at the same time.
        """
        self.call, self.size, self.wait_s, self.most = call, size, wait_s, most
        self.jobs: deque[Job] = deque()
        self.changed = threading.Condition()
        for _ in range(workers):
            threading.Thread(target=self.work, daemon=True).start()

    def submit(self, values: list[Any]) -> list[Job]:
        """Let `values` wait, all of them or none.

        Raises:
            FullError: too many are waiting.
        """
        with self.changed:
            if len(self.jobs) + len(values) > self.most:
                raise FullError
            new = [Job(value) for value in values]
            self.jobs.extend(new)
            self.changed.notify_all()
            return new

    def work(self) -> None:
        """Call the model again and again."""
        while True:
            self.run(self.take())

    def take(self) -> list[Job]:
        """Return the next batch; a job that was cancelled meanwhile is in none."""
        with self.changed:
            while True:
                while not self.jobs:
                    self.changed.wait()
                end = self.jobs[0].since + self.wait_s
                while 0 < len(self.jobs) < self.size and (left := end - time.monotonic()) > 0:
                    self.changed.wait(left)
                found = [self.jobs.popleft() for _ in range(min(self.size, len(self.jobs)))]
                if batch := [job for job in found if job.answer.set_running_or_notify_cancel()]:
                    return batch

    def run(self, batch: list[Job]) -> None:
        """Answer a batch; where the call fails each input is asked alone, so that one fails no other."""
        try:
            answers = self.call([job.value for job in batch])
            pairs = list(zip(batch, answers, strict=True))
        except Exception as error:
            if len(batch) > 1:
                for job in batch:
                    self.run([job])
            else:
                batch[0].answer.set_exception(error)
            return
        for job, answer in pairs:
            job.answer.set_result(answer)
