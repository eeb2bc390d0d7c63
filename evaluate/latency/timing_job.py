"""The job of all workers of one comparison."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smelt.core.artifact import default_threads, read_manifest
from smelt.core.data import CUSTOM_TASK, IMAGE_CLASSIFICATION, Task
from smelt.core.errors import InputError
from smelt.evaluate.latency.machine_load import MachineLoad
from smelt.evaluate.latency.rounds import ComputeResources, RoundPair, TimingRound
from smelt.evaluate.latency.settings import LatencySettings
from smelt.evaluate.latency.summary import LatencyRow, MeanTokenCounts, spread_over_lengths, summarize_rounds
from smelt.evaluate.latency.timing_prompts import prompt_texts
from smelt.evaluate.latency.worker_process import WorkerProcess
from smelt.runtime.generate.settings import GenerationSettings

# Threads of the process that has just worked may spin for some milliseconds.
_SETTLE_SECONDS = 0.02


@dataclass
class LoadedWorker:
    """A worker that has loaded an artifact, and its resources."""

    worker: WorkerProcess
    runner: str
    resources: ComputeResources


@dataclass
class TimingJob:
    """The settings and samples shared by all workers.

    text_counts: samples used, by batch size, once decided. arrays: of `measure_latency`. requested_seconds:
    what the settings' `seconds` would be without a time limit; cut: whether it reduces the samples.
    """

    settings: LatencySettings
    task: Task
    generation: GenerationSettings
    texts: Sequence[str]
    pairs: Sequence[str | None] | None
    device: str
    text_counts: dict[int, int] = field(default_factory=dict)
    arrays: Path | None = None
    requested_seconds: float | None = None
    reduced: bool = False
    _prompts_cut: bool = False

    def start_worker(self, stack: ExitStack, path: Path) -> LoadedWorker:
        """Start a process and load an artifact in it.

        Raises:
            RunError: it cannot be loaded.
        """
        threads = self.settings.threads or _stored_threads(path) or 1
        worker = stack.enter_context(WorkerProcess(threads, self.settings.time_limit_seconds))
        answer = worker.ask(
            op="load", artifact=str(path.resolve()), threads=threads, task=self.task, device=self.device,
            arrays=None if self.arrays is None else str(self.arrays),
        )  # fmt: skip
        if self.task == "language-modeling" and not self._prompts_cut:
            self._cut_prompts(worker)
        place = ComputeResources(threads, os.cpu_count() or 1, answer["device"])
        return LoadedWorker(worker, answer["runner"], place)

    def _cut_prompts(self, worker: WorkerProcess) -> None:
        """Cut the prompts for all workers with the token counts of the first model that can be loaded."""
        tokens = self.settings.prompt_tokens
        texts = prompt_texts(self.texts, tokens)
        chosen = texts[:: max(1, len(texts) // 1000)]  # more than are timed
        answer = worker.ask(op="cut", texts=chosen, prompt_tokens=tokens, new_tokens=self.settings.new_tokens)
        self.texts, self.pairs, self._prompts_cut = answer["texts"], None, True
        new = answer["new_tokens"]
        # overrides other length settings: each text is continued by exactly this many tokens
        fixed = {"min_new_tokens": new, "max_new_tokens": new, "min_length": None}
        self.generation = GenerationSettings(**(self.generation.model_dump() | fixed))

    def prepare(self, timed: LoadedWorker, size: int) -> MeanTokenCounts:
        """Send the texts for batches of `size` to a worker and let it warm up.

        Raises:
            RunError: it failed.
        """
        limit_ms = 1000 * self.settings.seconds
        if size not in self.text_counts:
            # the first, the baseline, decides for all how many texts the time allows
            wanted = size * max(2, -(-self.settings.texts // size))
            answer = self._ask_prepare(timed, size, wanted, limit_ms / 4)
            calls = limit_ms / (self.settings.rounds * answer["call_ms"])
            self.text_counts[size] = min(wanted, max(1, int(calls)) * size)
            longer = calls * (self.requested_seconds or self.settings.seconds) / self.settings.seconds
            self.reduced |= self.text_counts[size] < min(wanted, max(1, int(longer)) * size)
            if self.text_counts[size] == wanted and answer["whole"]:
                return MeanTokenCounts(answer["input_tokens"], answer["output_tokens"])
        answer = self._ask_prepare(timed, size, self.text_counts[size], limit_ms)
        return MeanTokenCounts(answer["input_tokens"], answer["output_tokens"])

    def _ask_prepare(self, timed: LoadedWorker, size: int, wanted: int, limit_ms: float) -> dict[str, Any]:
        chosen = spread_over_lengths(self.texts, wanted)
        return timed.worker.ask(
            op="prepare",
            batch_size=size,
            texts=[self.texts[i] for i in chosen],
            pairs=None if self.pairs is None else [self.pairs[i] for i in chosen],
            generation=self.generation.model_dump(),
            limit_ms=limit_ms,
        )

    def run_round(self, timed: LoadedWorker) -> TimingRound:
        """Run one round of a worker while all others wait.

        Raises:
            RunError: it failed.
        """
        time.sleep(_SETTLE_SECONDS)
        answer = timed.worker.ask(op="round", min_ms=self.settings.min_round_ms)
        return TimingRound(
            answer["times_ms"], answer["parts"], answer["texts"], MachineLoad(**answer["load"])
        )

    def summary_row(
        self,
        size: int,
        pairs: Sequence[RoundPair],
        own: ComputeResources,
        baseline: ComputeResources,
        lengths: MeanTokenCounts,
    ) -> LatencyRow:
        """Summarize one batch size."""
        unit = {"translation": "sentences/s", CUSTOM_TASK: "rows/s", IMAGE_CLASSIFICATION: "images/s"}.get(
            self.task, "texts/s"
        )
        found = summarize_rounds(pairs, own, baseline, lengths)
        if self.task == "language-modeling":
            unit, found["throughput"] = "tokens/s", found["throughput"] * lengths.output_tokens
        fixed = {"batch_size": size, "threads": own.threads, "texts": self.text_counts[size]}
        return fixed | found | {"unit": unit}


def _stored_threads(path: Path) -> int | None:
    """Return the number of threads stored in an artifact; errors in it are reported by its worker."""
    try:
        return default_threads(read_manifest(path))
    except InputError:
        return None
