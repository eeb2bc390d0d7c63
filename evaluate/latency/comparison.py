"""Artifacts against a baseline: who is timed when, and for how long.

Every artifact runs in a process of its own (`smelt.evaluate.latency.worker`): in one process the
runtimes' spinning threads disturb each other. Short rounds of artifact and baseline alternate
(A B B A ...), and only one process works at a time, so that a machine that gets slower or busier
touches both sides of every ratio. Rounds that were disturbed all the same are repeated, and what does
not become calm is told (`smelt.evaluate.latency.rounds`). Two workers live at once, whatever the number
of artifacts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from smelt.core.data import Task
from smelt.core.errors import InputError, RunError
from smelt.core.messages import Message
from smelt.core.stage import Progress, silent
from smelt.evaluate.latency.job import Job, Timed
from smelt.evaluate.latency.rounds import FEWEST, MOST, Pair, Round, judge
from smelt.evaluate.latency.settings import LatencySettings
from smelt.evaluate.latency.summary import Lengths, Row
from smelt.runtime.generate.settings import Generation

# Raised whenever the same artifact on the same machine would be timed in another way.
# 2: from text to text, one thread, rounds that were disturbed do not count.
# 3: the tokenizer is opened once, with the artifact.
# 4: the speed-up by processor time.
VERSION = 4


@dataclass
class Latency:
    """What was measured, by artifact name.

    rows: one per batch size, as report.json's `latency`. errors: why an artifact has no or too few rows.
    peak_memory_bytes: of the artifact's process. runners: for example "onnxruntime 1.31.1". cut: whether
    fewer texts were used than there would be with more time.
    """

    rows: dict[str, list[Row]] = field(default_factory=dict)
    errors: dict[str, Message] = field(default_factory=dict)
    peak_memory_bytes: dict[str, int] = field(default_factory=dict)
    runners: dict[str, str] = field(default_factory=dict)
    cut: bool = False


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
    counts: Mapping[int, int] | None = None,
    told: Callable[[Latency, str], None] | None = None,
    arrays: Path | None = None,
    seconds: float | None = None,
) -> Latency:
    """Time every artifact against `artifacts[baseline]` on the same texts, from text to text.

    The baseline's rounds beside each artifact are part of every ratio and so are always taken anew;
    its own rows pool all of them. Where its rows are kept from before, pass the baseline and the new
    artifacts and leave the returned rows of the baseline aside. An artifact that fails is an entry in
    `errors`; where the baseline fails, the others are timed without a speed-up (None).

    Args:
        artifacts: folders, by name.
        baseline: the name of the one that the others are compared with.
        texts: of the test data.
        settings: how.
        task: what the artifacts do.
        generation: how texts are generated; of language models the lengths are those of `settings`.
        progress: told of every pair of rounds.
        pairs: each text's second text, or None where it has none.
        device: auto, cpu or cuda.
        counts: how many texts to use, by batch size, where that was decided before.
        told: called with what is known so far and the name of each artifact that has been timed.
        arrays: of the task `custom`, the file with the rows; `texts` are their places in it.
        seconds: what all of it may take, None: as long as it needs. Each artifact and batch size has an
            even share of what is left; where that is over no more than the fewest rounds are taken.

    Raises:
        InputError: no texts, or `baseline` is not among `artifacts`.
    """
    if not texts:
        raise InputError("Latency: there are no texts to measure on.", code="empty-data")
    if baseline not in artifacts:
        names = ", ".join(artifacts) or "no artifacts"
        raise InputError(f"Latency: the baseline '{baseline}' is not among {names}.", code="unknown-step")
    others = [name for name in artifacts if name != baseline]
    parts = max(1, len(others)) * len(settings.batch_sizes)
    asked = settings.seconds
    if seconds is not None:  # so few texts that the rounds asked for, and the baseline's, fit into a share
        settings = settings.model_copy(update={"seconds": min(settings.seconds, seconds / parts / 2)})
    generation = generation or Generation()
    job = Job(settings, task, generation, texts, pairs, device, dict(counts or {}), arrays, asked)
    with ExitStack() as stack:
        measurement = _Measurement(job, baseline, progress, parts, _Budget(seconds))
        measurement.start_baseline(stack, artifacts[baseline])
        for place, name in enumerate(others):
            measurement.time_artifact(name, artifacts[name], len(others) - place)
            if told is not None:
                told(measurement.result, name)
        return measurement.finish()


class _Budget:
    """The time that is left, shared out evenly among the parts that are left."""

    def __init__(self, seconds: float | None) -> None:
        self._end = math.inf if seconds is None else time.monotonic() + seconds
        self._until = math.inf

    def begin(self, left: int) -> None:
        """Begin the next of `left` parts."""
        now = time.monotonic()
        self._until = now + (self._end - now) / max(1, left)

    @property
    def is_over(self) -> bool:
        """Whether the share of the part that was begun is over."""
        return time.monotonic() >= self._until


class _Measurement:
    """The baseline's process, and what has been measured so far."""

    def __init__(self, job: Job, baseline: str, progress: Progress, parts: int, budget: _Budget) -> None:
        self._job, self._name, self._progress, self._budget = job, baseline, progress, budget
        self._total = parts * job.settings.rounds
        self._done = 0
        self._base: Timed | None = None
        self._pooled: dict[int, list[Pair]] = {}
        self._lengths: dict[int, Lengths] = {}
        self.result = Latency()

    def start_baseline(self, stack: ExitStack, path: Path) -> None:
        try:
            self._base = self._job.start(stack, path)
            self.result.runners[self._name] = self._base.runner
        except RunError as error:
            self.result.errors[self._name] = error.as_message()

    def time_artifact(self, name: str, path: Path, left: int) -> None:
        """Time one of `left` artifacts at every batch size; its process ends before the next one's begins."""
        rows: list[Row] = []
        parts = left * len(self._job.settings.batch_sizes)
        self._budget.begin(parts)  # starting the process is part of it
        with ExitStack() as stack:
            try:
                timed = self._job.start(stack, path)
                self.result.runners[name] = timed.runner
                for at, size in enumerate(self._job.settings.batch_sizes):
                    if at:
                        self._budget.begin(parts - at)
                    rows.append(self._time_batches(timed, name, size))
            except RunError as error:
                self.result.errors[name] = error.as_message()
            else:
                self._ask_memory(timed, name)
        if rows:
            self.result.rows[name] = rows
        self.result.cut = self._job.cut
        self._sum_baseline_up()

    def _time_batches(self, timed: Timed, name: str, size: int) -> Row:
        prepared = self._prepare_baseline(size)
        lengths = self._job.prepare(timed, size)
        pairs = self._pairs(timed, prepared, f"{name}, batch {size}")
        base = self._base.place if self._base else timed.place
        beside = [Pair(pair.baseline, None) for pair in pairs if pair.baseline]
        if beside:
            self._pooled.setdefault(size, []).extend(beside)
        return self._job.row(size, pairs, timed.place, base, lengths)

    def _pairs(self, timed: Timed, against_baseline: bool, note: str) -> list[Pair]:
        """Take pairs of rounds until enough of them were undisturbed and agree, or it is no use."""
        wanted = self._job.settings.rounds
        pairs: list[Pair] = []
        while True:
            first = self._round_baseline() if against_baseline and len(pairs) % 2 else None
            own = self._job.round(timed)
            other = first or (self._round_baseline() if against_baseline else None)
            if against_baseline and other is None:  # it failed: what follows is timed alone
                against_baseline, pairs = False, [Pair(pair.own, None) for pair in pairs]
            pairs.append(Pair(own, other))
            self._step(note, len(pairs) > wanted)
            if len(pairs) >= FEWEST and self._budget.is_over:
                self._total -= max(0, wanted - len(pairs))
                return pairs
            if len(pairs) >= wanted:
                base = self._base.place if self._base else timed.place
                if len(pairs) >= MOST * wanted or judge(pairs, timed.place, base, wanted).settled:
                    return pairs

    def finish(self) -> Latency:
        """Sum the baseline up; where there was nothing to compare it with, time it alone."""
        if not self._pooled and self._base is not None:
            base = self._base
            try:
                for at, size in enumerate(self._job.settings.batch_sizes):
                    self._budget.begin(len(self._job.settings.batch_sizes) - at)
                    self._lengths[size] = self._job.prepare(base, size)
                    self._pooled[size] = self._pairs(base, False, f"{self._name}, batch {size}")
            except RunError as error:
                self._baseline_failed(error)
        self._sum_baseline_up()
        return self.result

    def _sum_baseline_up(self) -> None:
        place = self._base.place if self._base else None
        rows = [
            self._job.row(size, pairs, place, place, self._lengths[size])
            for size, pairs in self._pooled.items()
            if place is not None
        ]
        if rows:
            one = {"speedup": 1.0, "speedup_ci95": [1.0, 1.0]}
            one |= {f"cpu_{key}": value for key, value in one.items() if place and place.device == "cpu"}
            self.result.rows[self._name] = [row | one for row in rows]
        if self._base is not None and self._base.worker.alive:
            self._ask_memory(self._base, self._name)

    def _prepare_baseline(self, size: int) -> bool:
        """Make the baseline ready for batches of `size`; say whether it is."""
        if self._base is None or not self._base.worker.alive:
            return False
        try:
            self._lengths[size] = self._job.prepare(self._base, size)
        except RunError as error:
            self._baseline_failed(error)
            return False
        return True

    def _round_baseline(self) -> Round | None:
        assert self._base is not None
        try:
            return self._job.round(self._base)
        except RunError as error:
            self._baseline_failed(error)
            return None

    def _baseline_failed(self, error: RunError) -> None:
        self.result.errors.setdefault(self._name, error.as_message())

    def _ask_memory(self, timed: Timed, name: str) -> None:
        try:
            self.result.peak_memory_bytes[name] = timed.worker.ask(op="memory")["peak_bytes"]
        except RunError as error:
            self.result.errors.setdefault(name, error.as_message())

    def _step(self, note: str, repeated: bool) -> None:
        self._done += 1
        self._total += repeated
        again = ", again" if repeated else ""
        self._progress(min(self._done, self._total), self._total, note + again)
