"""Batch the inputs of requests that arrive at the same time."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any


class QueueFullError(Exception):
    """The queue of waiting inputs is full."""


@dataclass
class PendingInput:
    """An input that waits for its answer. since: its time of arrival, of `time.monotonic`."""

    value: Any
    since: float = field(default_factory=time.monotonic)
    answer: Future[Any] = field(default_factory=Future)


class Batcher:
    """Threads that take waiting inputs, up to a batch, and call the model.

    A batch starts when a thread is free and `size` inputs are waiting, or the first of them has waited for
    `wait_s`. While the model computes, inputs queue up, so batches are large under load without a delay.
    """

    def __init__(
        self, call: Callable[[list[Any]], list[Any]], size: int, wait_s: float, most: int, workers: int
    ) -> None:
        """Start the threads.

        Args:
            call: the model: inputs -> one answer each, in their order.
            size: maximum number of inputs in a call.
            wait_s: seconds that an input waits for others.
            most: maximum number of waiting inputs.
            workers: number of concurrent calls.
        """
        self.call, self.size, self.wait_s, self.most = call, size, wait_s, most
        self.jobs: deque[PendingInput] = deque()
        self.changed = threading.Condition()
        for _ in range(workers):
            threading.Thread(target=self.work, daemon=True).start()

    def submit(self, values: list[Any]) -> list[PendingInput]:
        """Queue `values`, all of them or none.

        Raises:
            QueueFullError: too many are waiting.
        """
        with self.changed:
            if len(self.jobs) + len(values) > self.most:
                raise QueueFullError
            new = [PendingInput(value) for value in values]
            self.jobs.extend(new)
            self.changed.notify_all()
            return new

    def work(self) -> None:
        """Call the model in a loop."""
        while True:
            self.run(self.next_batch())

    def next_batch(self) -> list[PendingInput]:
        """Return the next batch, without jobs that were cancelled."""
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

    def run(self, batch: list[PendingInput]) -> None:
        """Answer a batch; if the call fails, each input is run alone, so that one cannot fail the others."""
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
