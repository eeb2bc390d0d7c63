"""What is asked of every worker of one comparison."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smelt.core.artifact import read_manifest, threads_of
from smelt.core.data import CUSTOM, IMAGES, Task
from smelt.core.errors import InputError
from smelt.evaluate.latency.machine_load import Load
from smelt.evaluate.latency.process import WorkerProcess
from smelt.evaluate.latency.prompts import prompt_texts
from smelt.evaluate.latency.rounds import Pair, Place, Round
from smelt.evaluate.latency.settings import LatencySettings
from smelt.evaluate.latency.summary import Lengths, Row, spread, summarize
from smelt.runtime.generate.settings import Generation

# Threads of the process that has just worked may spin on for some milliseconds.
_SETTLE_SECONDS = 0.02


@dataclass
class Timed:
    """A worker that has loaded an artifact, and where it runs."""

    worker: WorkerProcess
    runner: str
    place: Place


@dataclass
class Job:
    """What is asked of every worker.

    counts: texts used, by batch size, once decided. arrays: `measure`'s. asked: what the settings' `seconds`
    would be if all times might take as long as they need; cut: whether fewer texts are used for that.
    """

    settings: LatencySettings
    task: Task
    generation: Generation
    texts: Sequence[str]
    pairs: Sequence[str | None] | None
    device: str
    counts: dict[int, int] = field(default_factory=dict)
    arrays: Path | None = None
    asked: float | None = None
    cut: bool = False
    _prompts_cut: bool = False

    def start(self, stack: ExitStack, path: Path) -> Timed:
        """Start a process and load an artifact there.

        Raises:
            RunError: it cannot be loaded.
        """
        threads = self.settings.threads or _own_threads(path) or 1
        worker = stack.enter_context(WorkerProcess(threads, self.settings.time_limit_seconds))
        answer = worker.ask(
            op="load", artifact=str(path.resolve()), threads=threads, task=self.task, device=self.device,
            arrays=None if self.arrays is None else str(self.arrays),
        )  # fmt: skip
        if self.task == "language-modeling" and not self._prompts_cut:
            self._cut_prompts(worker)
        place = Place(threads, os.cpu_count() or 1, answer["device"])
        return Timed(worker, answer["runner"], place)

    def _cut_prompts(self, worker: WorkerProcess) -> None:
        """Let the first model that can be loaded count the tokens of the prompts, for all."""
        tokens = self.settings.prompt_tokens
        texts = prompt_texts(self.texts, tokens)
        chosen = texts[:: max(1, len(texts) // 1000)]  # more than are ever timed
        answer = worker.ask(op="cut", texts=chosen, prompt_tokens=tokens, new_tokens=self.settings.new_tokens)
        self.texts, self.pairs, self._prompts_cut = answer["texts"], None, True
        new = answer["new_tokens"]
        # what asks for another length gives way: each text is continued by exactly so many tokens
        fixed = {"min_new_tokens": new, "max_new_tokens": new, "min_length": None}
        self.generation = Generation(**(self.generation.model_dump() | fixed))

    def prepare(self, timed: Timed, size: int) -> Lengths:
        """Hand the texts for batches of `size` to a worker and let it warm up.

        Raises:
            RunError: it failed.
        """
        limit_ms = 1000 * self.settings.seconds
        if size not in self.counts:
            # the first, the baseline, decides for all how many texts the time allows
            wanted = size * max(2, -(-self.settings.texts // size))
            answer = self._prepare(timed, size, wanted, limit_ms / 4)
            calls = limit_ms / (self.settings.rounds * answer["call_ms"])
            self.counts[size] = min(wanted, max(1, int(calls)) * size)
            longer = calls * (self.asked or self.settings.seconds) / self.settings.seconds
            self.cut |= self.counts[size] < min(wanted, max(1, int(longer)) * size)
            if self.counts[size] == wanted and answer["whole"]:
                return Lengths(answer["input_tokens"], answer["output_tokens"])
        answer = self._prepare(timed, size, self.counts[size], limit_ms)
        return Lengths(answer["input_tokens"], answer["output_tokens"])

    def _prepare(self, timed: Timed, size: int, wanted: int, limit_ms: float) -> dict[str, Any]:
        chosen = spread(self.texts, wanted)
        return timed.worker.ask(
            op="prepare",
            batch_size=size,
            texts=[self.texts[i] for i in chosen],
            pairs=None if self.pairs is None else [self.pairs[i] for i in chosen],
            generation=self.generation.model_dump(),
            limit_ms=limit_ms,
        )

    def round(self, timed: Timed) -> Round:
        """Let one worker work while all others wait.

        Raises:
            RunError: it failed.
        """
        time.sleep(_SETTLE_SECONDS)
        answer = timed.worker.ask(op="round", min_ms=self.settings.min_round_ms)
        return Round(answer["times_ms"], answer["parts"], answer["texts"], Load(**answer["load"]))

    def row(self, size: int, pairs: Sequence[Pair], own: Place, baseline: Place, lengths: Lengths) -> Row:
        """Sum one batch size up."""
        unit = {"translation": "sentences/s", CUSTOM: "rows/s", IMAGES: "images/s"}.get(self.task, "texts/s")
        found = summarize(pairs, own, baseline, lengths)
        if self.task == "language-modeling":
            unit, found["throughput"] = "tokens/s", found["throughput"] * lengths.output_tokens
        fixed = {"batch_size": size, "threads": own.threads, "texts": self.counts[size]}
        return fixed | found | {"unit": unit}


def _own_threads(path: Path) -> int | None:
    """Return what is written into an artifact; what is wrong with it, its worker says."""
    try:
        return threads_of(read_manifest(path))
    except InputError:
        return None
