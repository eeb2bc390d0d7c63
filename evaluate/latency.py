"""How long an artifact takes, compared fairly with the baseline.

Every artifact runs in a process of its own (`smelt.evaluate.latency_worker`): in one process the
runtimes' spinning threads disturb each other. Short rounds of artifact and baseline alternate
(A B A B ...), and only one process works at a time, so that a machine that gets slower or busier
touches both sides of every ratio. Two workers live at once, whatever the number of artifacts.

After A. Georges, D. Buytaert, L. Eeckhout, "Statistically rigorous Java performance evaluation"
(OOPSLA 2007, doi:10.1145/1297027.1297033): repeated rounds, intervals instead of single numbers.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from smelt.core.data import Task
from smelt.core.errors import InputError, RunError
from smelt.core.stage import Progress, Settings, silent
from smelt.evaluate.latency_process import WorkerProcess
from smelt.evaluate.latency_summary import Row, Timing, physical_cores, spread, summarize
from smelt.evaluate.prompts import prompt_texts
from smelt.runtime.generation import Generation

# Raised whenever the same artifact on the same machine would be timed in another way.
VERSION = 1
# Threads of the process that has just worked may spin on for some milliseconds.
_SETTLE_SECONDS = 0.02


class LatencySettings(Settings):
    """How latency is measured.

    batch_sizes: texts per call. threads: per process (default: the physical cores). rounds: pairs of
    rounds. texts: how many test texts are used, the same for all artifacts. min_round_ms: a round
    repeats the texts until this much time has gone by. seconds: what one artifact's rounds at one
    batch size may take; where the baseline needs more, fewer texts are used. time_limit_seconds: a
    process that is silent for longer is given up. prompt_tokens, new_tokens: of language models, which
    continue stretches of the text by exactly so many tokens.
    """

    batch_sizes: tuple[int, ...] = (1, 8)
    threads: int | None = Field(default=None, ge=1, le=1024)
    rounds: int = Field(default=5, ge=3, le=1000)
    texts: int = Field(default=16, ge=1, le=10_000)
    min_round_ms: float = Field(default=200.0, gt=0, le=60_000)
    seconds: float = Field(default=20.0, gt=0)
    time_limit_seconds: float = Field(default=600.0, gt=0)
    prompt_tokens: int = Field(default=32, ge=1, le=1 << 20)
    new_tokens: int = Field(default=32, ge=1, le=1 << 20)

    @field_validator("batch_sizes")
    @classmethod
    def _positive(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        if not sizes or len(set(sizes)) != len(sizes) or any(not 1 <= s <= 4096 for s in sizes):
            raise ValueError(f"expected different whole numbers from 1 to 4096, read {list(sizes)}")
        return sizes


@dataclass
class Latency:
    """What was measured, by artifact name.

    rows: one per batch size, as report.json's `latency`, and `rounds_ms`, each round's median.
    errors: why an artifact has no or too few rows. peak_memory_bytes: of the artifact's process.
    runners: for example "onnxruntime 1.31.1".
    """

    rows: dict[str, list[Row]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    peak_memory_bytes: dict[str, int] = field(default_factory=dict)
    runners: dict[str, str] = field(default_factory=dict)


def measure(
    artifacts: Mapping[str, Path],
    baseline: str,
    texts: Sequence[str],
    settings: LatencySettings,
    task: Task,
    *,
    generation: Generation | None = None,
    progress: Progress = silent,
    pairs: Sequence[str | None] | None = None,
    device: str = "auto",
) -> Latency:
    """Time every artifact against `artifacts[baseline]` on the same texts.

    The baseline's rounds beside each artifact are part of every ratio and so are always taken anew;
    its own rows pool all of them. Where its rows are kept from before, pass the baseline and the new
    artifacts and leave the returned rows of the baseline aside. An artifact that fails is an entry in
    `errors`; where the baseline fails, the others are timed without a speed-up (None).

    Raises:
        InputError: no texts, or `baseline` is not among `artifacts`.
    """
    if not texts:
        raise InputError("Latency: there are no texts to measure on.")
    if baseline not in artifacts:
        names = ", ".join(artifacts) or "no artifacts"
        raise InputError(f"Latency: the baseline '{baseline}' is not among {names}.")
    if task == "language-modeling":
        texts, pairs = prompt_texts(texts, settings.prompt_tokens), None
    threads = settings.threads or physical_cores()
    job = _Job(settings, task, generation or Generation(), texts, pairs, threads, device)
    others = [name for name in artifacts if name != baseline]
    with ExitStack() as stack:
        measurement = _Measurement(job, baseline, progress, max(1, len(others)))
        measurement.start_baseline(stack, artifacts[baseline])
        for name in others:
            measurement.time_artifact(name, artifacts[name])
        return measurement.finish()


@dataclass
class _Job:
    """What is asked of every worker. counts: texts used, by batch size, once decided."""

    settings: LatencySettings
    task: Task
    generation: Generation
    texts: Sequence[str]
    pairs: Sequence[str | None] | None
    threads: int
    device: str
    counts: dict[int, int] = field(default_factory=dict)

    def start(self, stack: ExitStack, path: Path) -> tuple[WorkerProcess, str]:
        """Start a process and load an artifact there; return it and the runner's name."""
        worker = stack.enter_context(WorkerProcess(self.threads, self.settings.time_limit_seconds))
        answer = worker.ask(
            op="load",
            artifact=str(path.resolve()),
            threads=self.threads,
            task=self.task,
            generation=self.generation.model_dump(),
            device=self.device,
            lengths=(self.settings.prompt_tokens, self.settings.new_tokens),
        )
        return worker, answer["runner"]

    def prepare(self, worker: WorkerProcess, size: int) -> Timing:
        """Hand the texts for batches of `size` to a worker and let it warm up."""
        limit_ms = 1000 * self.settings.seconds
        if size in self.counts:
            answer = self._prepare(worker, size, self.counts[size], limit_ms)
            return Timing(answer["input_tokens"], answer["output_tokens"])
        # The first, the baseline, decides for all how many texts the time allows.
        wanted = max(self.settings.texts, 2 * size)
        answer = self._prepare(worker, size, wanted, limit_ms / 4)
        calls = int(limit_ms / (self.settings.rounds * answer["call_ms"]))
        self.counts[size] = min(wanted, max(1, calls) * size)
        if self.counts[size] != wanted:
            answer = self._prepare(worker, size, self.counts[size], limit_ms)
        return Timing(answer["input_tokens"], answer["output_tokens"])

    def _prepare(self, worker: WorkerProcess, size: int, wanted: int, limit_ms: float) -> dict[str, Any]:
        chosen = spread(self.texts, wanted)
        return worker.ask(
            op="prepare",
            batch_size=size,
            texts=[self.texts[i] for i in chosen],
            pairs=None if self.pairs is None else [self.pairs[i] for i in chosen],
            limit_ms=limit_ms,
        )

    def round(self, worker: WorkerProcess, timing: Timing) -> None:
        """Let one worker work while all others wait."""
        time.sleep(_SETTLE_SECONDS)
        answer = worker.ask(op="round", min_ms=self.settings.min_round_ms)
        timing.rounds.append(answer["times_ms"])
        timing.texts += answer["texts"]
        timing.output_tokens = answer["output_tokens"]  # of whole passes; the warm-up may have been cut

    def row(self, size: int, timing: Timing, before: Timing | None) -> Row:
        """Sum one batch size up."""
        unit = "sentences/s" if self.task == "translation" else "texts/s"
        found = summarize(timing, before)
        if self.task == "language-modeling":
            unit, found["throughput"] = "tokens/s", found["throughput"] * timing.output_tokens
        return found | {"batch_size": size, "threads": self.threads, "unit": unit}


class _Measurement:
    """The baseline's process, and what has been measured so far."""

    def __init__(self, job: _Job, baseline: str, progress: Progress, artifacts: int) -> None:
        self._job, self._name, self._progress = job, baseline, progress
        self._total = artifacts * len(job.settings.batch_sizes) * job.settings.rounds
        self._done = 0
        self._base: WorkerProcess | None = None
        self._pooled: dict[int, Timing] = {}
        self._result = Latency()

    def start_baseline(self, stack: ExitStack, path: Path) -> None:
        try:
            self._base, self._result.runners[self._name] = self._job.start(stack, path)
        except RunError as error:
            self._result.errors[self._name] = str(error)

    def time_artifact(self, name: str, path: Path) -> None:
        """Time one artifact at every batch size; its process ends before the next one's begins."""
        rows: list[Row] = []
        with ExitStack() as stack:
            try:
                worker, self._result.runners[name] = self._job.start(stack, path)
                for size in self._job.settings.batch_sizes:
                    rows.append(self._time_batches(worker, name, size))
            except RunError as error:
                self._result.errors[name] = str(error)
            else:
                self._ask_memory(worker, name)
        if rows:
            self._result.rows[name] = rows

    def _time_batches(self, worker: WorkerProcess, name: str, size: int) -> Row:
        before = self._prepare_baseline(size)
        own = self._job.prepare(worker, size)
        for _ in range(self._job.settings.rounds):
            self._job.round(worker, own)
            if before is not None and not self._round_baseline(before):
                before = None
            self._step(f"{name}, batch {size}")
        if before is not None:
            if size in self._pooled:
                self._pooled[size].extend(before)
            else:
                self._pooled[size] = before
        return self._job.row(size, own, before)

    def finish(self) -> Latency:
        """Sum the baseline up; where there was nothing to compare it with, time it alone."""
        if not self._pooled:
            for size in self._job.settings.batch_sizes:
                self._time_baseline(size)
        rows = [self._job.row(size, timing, None) for size, timing in self._pooled.items()]
        if rows:
            self._result.rows[self._name] = [r | {"speedup": 1.0, "speedup_ci95": [1.0, 1.0]} for r in rows]
        if self._base is not None and self._base.alive:
            self._ask_memory(self._base, self._name)
        return self._result

    def _time_baseline(self, size: int) -> None:
        timing = self._prepare_baseline(size)
        if timing is None:
            return
        for _ in range(self._job.settings.rounds):
            if not self._round_baseline(timing):
                return
            self._step(f"{self._name}, batch {size}")
        self._pooled[size] = timing

    def _prepare_baseline(self, size: int) -> Timing | None:
        if self._base is None:
            return None
        try:
            return self._job.prepare(self._base, size)
        except RunError as error:
            self._baseline_failed(error)
            return None

    def _round_baseline(self, timing: Timing) -> bool:
        assert self._base is not None
        try:
            self._job.round(self._base, timing)
        except RunError as error:
            self._baseline_failed(error)
            return False
        return True

    def _baseline_failed(self, error: RunError) -> None:
        self._result.errors.setdefault(self._name, str(error))
        if self._base is not None and not self._base.alive:
            self._base = None

    def _ask_memory(self, worker: WorkerProcess, name: str) -> None:
        try:
            self._result.peak_memory_bytes[name] = worker.ask(op="memory")["peak_bytes"]
        except RunError as error:
            self._result.errors.setdefault(name, str(error))

    def _step(self, note: str) -> None:
        self._done += 1
        self._progress(min(self._done, self._total), self._total, note)
