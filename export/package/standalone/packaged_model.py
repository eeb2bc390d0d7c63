"""The model of infer.py for the service: inputs and answers are JSON values.

Inputs of requests that arrive at the same time are one batch, unless requests are separate.
"""

from __future__ import annotations

import base64
import binascii
import importlib.util
import json
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class QueueFullError(Exception):
    """The queue of waiting inputs is full."""


TASK_CLASSES = {
    "language-modeling": "Writer",
    "text-generation": "Answerer",
    "text-classification": "Classifier",
    "sentence-similarity": "Embedder",
    "masked-language-modeling": "MaskFiller",
    "token-classification": "Tagger",
    "image-classification": "ImageClassifier",
}
IMAGES, PAIRS, VECTORS = "image-classification", "text-classification", "sentence-similarity"
MASKS, WORDS = "masked-language-modeling", "token-classification"
# a white image of one pixel, for the first call of an image model
WHITE_PIXEL_PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR42mP4DwABAQEAHLCMmQAAAABJRU5ErkJggg=="
)


class PackagedModel:
    """Opens the class of infer.py for the task and calls it once, because the first call is the slowest.

    A service for another runtime has its own infer.py, which needs only this class and `__call__`.
    """

    def __init__(self, folder: Path, task: str, threads: int) -> None:
        self.task = task
        spec = importlib.util.spec_from_file_location("infer", folder / "infer.py")
        if spec is None or spec.loader is None:
            raise FileNotFoundError(f"{folder}: no infer.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules["infer"] = module
        spec.loader.exec_module(module)
        self.model = getattr(module, TASK_CLASSES.get(self.task, "Translator"))(folder, threads=threads)
        first_inputs = {IMAGES: WHITE_PIXEL_PNG, MASKS: getattr(self.model, "mask_token", "")}
        self.answer([self.read(first_inputs.get(self.task, "Warm up."))])

    def read(self, value: Any) -> Any:
        """Return the model's input for one of the `inputs` of a request.

        Raises:
            ValueError: it is not valid; the message contains what is expected.
        """
        if self.task == IMAGES:
            if not isinstance(value, str):
                raise ValueError(f"expected an image file in base64, got {describe_value(value)}")
            try:
                return self.image(base64.b64decode(value, validate=True))
            except binascii.Error as error:
                raise ValueError(f"expected an image file in base64: {error}") from None
        pair = isinstance(value, list) and len(value) == 2 and self.task == PAIRS
        words = isinstance(value, list) and self.task == WORDS
        texts = value if pair or words else [value]
        if not all(isinstance(text, str) for text in texts):
            lists = {PAIRS: " or a list of two", WORDS: " or a list of its words"}.get(self.task, "")
            raise ValueError(f"expected a text{lists}, got {describe_value(value)}")
        if words and not all(text.strip() for text in texts):
            raise ValueError("a word is empty. Remove it")
        try:
            "".join(texts).encode()
        except UnicodeEncodeError:
            raise ValueError("a text contains a lone surrogate (\\ud800 to \\udfff). Remove it") from None
        if self.task == MASKS:
            self.model.require_mask(value)
        return tuple(texts) if pair else value

    def image(self, data: bytes) -> Any:
        """Return the model's input for the bytes of an image file; raise ValueError as `read`."""
        return self.model.pixels(data)

    def answer(self, inputs: list[Any]) -> list[Any]:
        """Return a JSON answer for each result of `read`."""
        results = self.model(inputs, batch_size=len(inputs))
        if self.task == VECTORS:
            return [[round(x, 7) for x in vector.tolist()] for vector in results]
        if self.task in (IMAGES, PAIRS):
            return [{"label": label, "probabilities": probabilities} for label, probabilities in results]
        return list(results)

    @property
    def cut(self) -> int:
        """The number of texts that were truncated."""
        return int(getattr(self.model, "cut", getattr(getattr(self.model, "tokenizer", None), "cut", 0)))


def describe_value(value: Any) -> str:
    """Return a short form of `value`; for lists and objects, which may be large, only type and size."""
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    is_truncated = isinstance(value, str) and len(value) > 60
    return f"{json.dumps(value[:60])}..." if is_truncated else json.dumps(value)


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
