"""The model of infer.py for the service: inputs and answers are JSON values.

Inputs of requests that arrive at the same time are one batch, unless requests are separate.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smelt.export.package.standalone.json_values import read_text


class QueueFullError(Exception):
    """The queue of waiting inputs is full."""


class PackagedModel:
    """Opens the class of infer.py that infer.json names, and calls it once: the first call is the slowest.

    A service for another runtime has its own infer.py, which needs only a class with `__call__`. It may also
    have `from_json`, which returns its input for one of the `inputs` of a request or raises ValueError (by
    default an input is a text), `to_json`, which returns JSON answers for its outputs, `pixels` or `samples`,
    which returns its input for the bytes of a file of an image or of audio, and `first_input`, the JSON value
    of the first call.
    """

    def __init__(self, folder: Path, class_name: str, threads: int) -> None:
        spec = importlib.util.spec_from_file_location("infer", folder / "infer.py")
        if spec is None or spec.loader is None:
            raise FileNotFoundError(f"{folder}: no infer.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules["infer"] = module
        spec.loader.exec_module(module)
        self.model = getattr(module, class_name)(folder, threads=threads)
        self.read: Callable[[Any], Any] = getattr(self.model, "from_json", read_text)
        self.to_json: Callable[[Any], list[Any]] = getattr(self.model, "to_json", list)
        self.media = "audio" if hasattr(self.model, "samples") else "image"
        self.read_file: Callable[[bytes], Any] | None = getattr(
            self.model, {"audio": "samples", "image": "pixels"}[self.media], None
        )
        self.answer([self.read(getattr(self.model, "first_input", "Warm up."))])

    def answer(self, inputs: list[Any]) -> list[Any]:
        """Return a JSON answer for each result of `read`."""
        return self.to_json(self.model(inputs, batch_size=len(inputs)))

    @property
    def cut(self) -> int:
        """The number of texts that were truncated."""
        return int(getattr(self.model, "cut", getattr(getattr(self.model, "tokenizer", None), "cut", 0)))


@dataclass
class PendingInput:
    """An input that waits for its answer.

    request: the same object for all inputs of a request. since: time of arrival, of `time.monotonic`.
    """

    value: Any
    request: object = None
    since: float = field(default_factory=time.monotonic)
    answer: Future[Any] = field(default_factory=Future)


class Batcher:
    """Threads that take waiting inputs, up to a batch, and call the model.

    A batch starts when a thread is free and `size` inputs are waiting, or the first of them has waited for
    `wait_s`. While the model computes, inputs queue up, so batches are large under load without a delay.
    """

    def __init__(
        self,
        call: Callable[[list[Any]], list[Any]],
        size: int,
        wait_s: float,
        most: int,
        workers: int,
        separate: bool = False,
    ) -> None:
        """Start the threads.

        Args:
            call: the model: inputs -> one answer each, in their order.
            size: maximum number of inputs in a call.
            wait_s: seconds that an input waits for others.
            most: maximum number of waiting inputs.
            workers: number of concurrent calls.
            separate: a call has the inputs of one request only.
        """
        self.call, self.size, self.most, self.separate = call, size, most, separate
        self.wait_s = 0.0 if separate else wait_s  # all inputs of a request arrive at once
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
            request = object() if self.separate else None
            new = [PendingInput(value, request) for value in values]
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
                while 0 < len(self.jobs) < self.size and (remaining := end - time.monotonic()) > 0:
                    self.changed.wait(remaining)
                candidates = self.take_batch()
                if batch := [job for job in candidates if job.answer.set_running_or_notify_cancel()]:
                    return batch

    def take_batch(self) -> list[PendingInput]:
        """Remove the next inputs from the queue and return them, while holding the lock."""
        batch: list[PendingInput] = []
        while self.jobs and len(batch) < self.size:
            if batch and self.jobs[0].request is not batch[0].request:
                break
            batch.append(self.jobs.popleft())
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
