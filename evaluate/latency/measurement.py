"""Timing of artifacts against a baseline, each in a worker process.

Every artifact runs in a process of its own (`smelt.evaluate.latency.worker`): in one process the
runtimes' spinning threads disturb each other. Short rounds of artifact and baseline alternate
(A B B A ...), and only one process works at a time, so that a machine that gets slower or busier
affects both sides of every ratio. Disturbed rounds are repeated; if they stay disturbed, this is reported
(`smelt.evaluate.latency.summary`). Two workers exist at a time, whatever the number of artifacts.
This file has the parent's side of a worker: start it, send requests, end it.
"""

from __future__ import annotations

import json
import math
import os
import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from smelt.core.artifact import default_threads, read_manifest
from smelt.core.errors import InputError, RunError
from smelt.core.messages import Message
from smelt.core.system import child_environment, python_command
from smelt.data.tasks import Task, task_traits
from smelt.evaluate.latency.settings import LatencySettings, prompt_texts
from smelt.evaluate.latency.summary import (
    MAX_ROUND_FACTOR,
    MIN_ROUNDS,
    ComputeResources,
    LatencyRow,
    MachineLoad,
    MeanTokenCounts,
    RoundPair,
    TimingRound,
    judge_rounds,
    spread_over_lengths,
    summarize_rounds,
)
from smelt.generation.config import GenerationSettings
from smelt.stage import Progress, no_progress
from smelt.tasks.registry import task_spec

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


class WorkerProcess:
    """One `smelt.evaluate.latency.worker`; leaving the context ends it.

    time_limit: seconds that an answer may take before the process is stopped.
    """

    def __init__(self, threads: int, time_limit: float) -> None:
        self._time_limit = time_limit
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        # read by the libraries at import, so they must be set before
        environment = child_environment(
            **dict.fromkeys(_THREAD_VARIABLES, str(threads)),
            TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", PYTHONUTF8="1",
        )  # fmt: skip
        self._process = subprocess.Popen(
            python_command("-m", "smelt.evaluate.latency.worker"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=environment,
        )
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._failure: RunError | None = None
        # a thread, because Windows cannot wait for a pipe with a time limit
        threading.Thread(target=self._read_answers, daemon=True).start()

    @property
    def alive(self) -> bool:
        """Whether the process can answer requests."""
        return self._failure is None and self._process.poll() is None

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Raises:
            RunError: the worker answered with an error, died, or exceeded the time limit.
        """
        if self._failure is not None:
            raise RunError(str(self._failure), code=self._failure.code)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            line = self._answers.get(timeout=self._time_limit)
        except queue.Empty:
            line = None
        except OSError:
            line = b""
        if line is None:
            self._process.kill()
            raise self._worker_error(
                f"no answer to '{request['op']}' within {self._time_limit:g} s; increase"
                " process_timeout_seconds",
                "timing-timed-out",
            )
        if not line:
            code = self._process.wait()
            raise self._worker_error(
                f"its process ended during '{request['op']}' with {_exit_reason(code)}.{self._stderr_tail()}",
                "timing-process-died",
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RunError(answer["error"], code=answer["code"])
        return answer

    def _worker_error(self, message: str, code: str) -> RunError:
        self._failure = RunError(message, code=code)
        return self._failure

    def _read_answers(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(b"")

    def _stderr_tail(self) -> str:
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return f" Last output: {lines[-1][:300]}" if lines else ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._stderr):
            if stream is not None:
                try:
                    stream.close()
                except OSError:
                    continue  # a request that a dead process did not receive


def _exit_reason(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    hint = " (often: out of memory)" if code == -9 else ""
    return f"signal {-code}{hint}"


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
    """What is timed: the settings and samples shared by all artifacts.

    texts: of the test data. task: of the artifacts. generation: the lengths of language models are those of
    `settings`. pairs: each text's second text, or None where it has none. device: auto, cpu or cuda.
    text_counts: samples used, by batch size, once decided. arrays: of the task `custom`, the file with the
    samples; `texts` are their indices in it. requested_seconds: what the settings' `seconds` would be without
    a time limit; reduced: whether it reduces the samples.
    """

    texts: Sequence[str]
    task: Task
    settings: LatencySettings
    generation: GenerationSettings = field(default_factory=GenerationSettings)
    pairs: Sequence[str | None] | None = None
    device: str = "auto"
    text_counts: Mapping[int, int] = field(default_factory=dict)
    arrays: Path | None = None
    requested_seconds: float | None = field(default=None, init=False)
    reduced: bool = field(default=False, init=False)
    _prompts_cut: bool = field(default=False, init=False)

    def start_worker(self, stack: ExitStack, path: Path, compiled: bool = False) -> LoadedWorker:
        """Start a process and load an artifact in it, `compiled` by torch.

        Raises:
            RunError: it cannot be loaded.
        """
        threads = self.settings.threads or _stored_threads(path) or 1
        worker = stack.enter_context(WorkerProcess(threads, self.settings.process_timeout_seconds))
        answer = worker.ask(
            op="load", artifact=str(path.resolve()), threads=threads, task=self.task, device=self.device,
            arrays=None if self.arrays is None else str(self.arrays), compiled=compiled,
        )  # fmt: skip
        if task_traits(self.task).samples == "running-text" and not self._prompts_cut:
            self._cut_prompts(worker)
        resources = ComputeResources(threads, os.cpu_count() or 1, answer["device"])
        return LoadedWorker(worker, answer["runner"], resources)

    def _cut_prompts(self, worker: WorkerProcess) -> None:
        """Cut the prompts for all workers with the token counts of the first model that can be loaded."""
        tokens = self.settings.prompt_tokens
        texts = prompt_texts(self.texts, tokens)
        if not task_traits(self.task).generates:
            self.texts, self.pairs, self._prompts_cut = texts, None, True
            return
        sampled_texts = texts[:: max(1, len(texts) // 1000)]  # more than are timed
        answer = worker.ask(
            op="cut", texts=sampled_texts, prompt_tokens=tokens, new_tokens=self.settings.new_tokens
        )
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
            num_texts = size * max(2, -(-self.settings.texts // size))
            answer = self._ask_prepare(timed, size, num_texts, limit_ms / 4)
            calls = limit_ms / (self.settings.rounds * answer["call_ms"])
            count = min(num_texts, max(1, int(calls)) * size)
            self.text_counts = {**self.text_counts, size: count}
            requested_calls = (
                calls * (self.requested_seconds or self.settings.seconds) / self.settings.seconds
            )
            self.reduced |= count < min(num_texts, max(1, int(requested_calls)) * size)
            if count == num_texts and answer["whole"]:
                return MeanTokenCounts(answer["input_tokens"], answer["output_tokens"])
        answer = self._ask_prepare(timed, size, self.text_counts[size], limit_ms)
        return MeanTokenCounts(answer["input_tokens"], answer["output_tokens"])

    def _ask_prepare(self, timed: LoadedWorker, size: int, wanted: int, limit_ms: float) -> dict[str, Any]:
        indices = spread_over_lengths(self.texts, wanted)
        return timed.worker.ask(
            op="prepare",
            batch_size=size,
            texts=[self.texts[i] for i in indices],
            pairs=None if self.pairs is None else [self.pairs[i] for i in indices],
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
        load = MachineLoad(**answer["load"])
        return TimingRound(
            answer["times_ms"], answer["parts"], answer["texts"], load, answer.get("graph_ms", [])
        )

    def summary_row(
        self,
        size: int,
        pairs: Sequence[RoundPair],
        resources: ComputeResources,
        baseline: ComputeResources,
        lengths: MeanTokenCounts,
    ) -> LatencyRow:
        """Summarize one batch size."""
        unit = task_spec(self.task).rate_unit
        timings = summarize_rounds(pairs, resources, baseline, lengths)
        generates = task_traits(self.task).generates
        tokens_per_second = timings["throughput"] * lengths.output_tokens if generates else None
        if task_traits(self.task).architecture == "decoder":
            unit, timings["throughput"] = "tokens/s", timings["throughput"] * lengths.output_tokens
        fixed = {"batch_size": size, "threads": resources.threads, "texts": self.text_counts[size]}
        return fixed | timings | {"unit": unit, "output_tokens_per_second": tokens_per_second}


def _stored_threads(path: Path) -> int | None:
    """Return the number of threads stored in an artifact; errors in it are reported by its worker."""
    try:
        return default_threads(read_manifest(path))
    except InputError:
        return None


# Incremented whenever the way of timing the same artifact on the same machine changes.
# 2: from text to text, one thread, disturbed rounds do not count.
# 3: the tokenizer is opened once, with the artifact.
# 4: the speed-up by processor time.
# 5: the time of graphs alone, other processes on the GPU, GPU memory.
LATENCY_VERSION = 5


@dataclass
class LatencyResults:
    """The measured latencies, by artifact name.

    rows: one per batch size, as report.json's `latency`. errors: why an artifact has no or too few rows.
    peak_memory_bytes: of the artifact's process. gpu_memory_bytes: held by it on the GPU after the last
    round, where it is known. runners: for example "onnxruntime 1.31.1". reduced: whether fewer samples were
    used because of the time limit.
    """

    rows: dict[str, list[LatencyRow]] = field(default_factory=dict)
    errors: dict[str, Message] = field(default_factory=dict)
    peak_memory_bytes: dict[str, int] = field(default_factory=dict)
    gpu_memory_bytes: dict[str, int] = field(default_factory=dict)
    runners: dict[str, str] = field(default_factory=dict)
    reduced: bool = False


def measure_latency(
    artifacts: Mapping[str, Path],
    baseline: str,
    job: TimingJob,
    *,
    progress: Progress = no_progress,
    on_measured: Callable[[LatencyResults, str], None] | None = None,
    seconds: float | None = None,
) -> LatencyResults:
    """Time every artifact against `artifacts[baseline]` on the same texts, from text to text.

    The baseline's rounds are part of every ratio and so are measured again for each artifact;
    its own rows pool all of them. Where its rows are already known, pass the baseline and the new
    artifacts and ignore the returned rows of the baseline. An artifact that fails is an entry in
    `errors`; where the baseline fails, the others are timed without a speed-up (None).

    Args:
        artifacts: folders, by name.
        baseline: the name of the artifact that the others are compared with.
        job: the samples and settings; not changed.
        progress: called for every pair of rounds.
        on_measured: called with the results so far and the name of each artifact that has been timed.
        seconds: time limit of the whole measurement, None: no limit. The remaining time is divided equally
            among artifacts and batch sizes; a part that exceeds its share takes only the minimum of rounds.

    Raises:
        InputError: no texts, or `baseline` is not among `artifacts`.
    """
    if not job.texts:
        raise InputError("Latency: no samples to measure on. Add test data.", code="empty-data")
    if baseline not in artifacts:
        names = ", ".join(artifacts) or "no artifacts"
        raise InputError(f"Latency: unknown baseline '{baseline}'; known: {names}.", code="unknown-step")
    other_names = [name for name in artifacts if name != baseline]
    settings = job.settings
    parts = max(1, len(other_names)) * len(settings.batch_sizes)
    if seconds is not None:  # so few samples that the requested rounds, and the baseline's, fit into a share
        settings = settings.model_copy(update={"seconds": min(settings.seconds, seconds / parts / 2)})
    requested_seconds, job = job.settings.seconds, replace(job, settings=settings)
    job.requested_seconds = requested_seconds
    with ExitStack() as stack:
        measurement = _Measurement(job, baseline, progress, parts, _TimeBudget(seconds))
        measurement.start_baseline(stack, artifacts[baseline])
        for artifact_index, name in enumerate(other_names):
            measurement.time_artifact(name, artifacts[name], len(other_names) - artifact_index)
            if on_measured is not None:
                on_measured(measurement.result, name)
        return measurement.finish()


class _TimeBudget:
    """The remaining time, divided equally among the remaining parts."""

    def __init__(self, seconds: float | None) -> None:
        self._end = math.inf if seconds is None else time.monotonic() + seconds
        self._until = math.inf

    def start_part(self, left: int) -> None:
        """Start the next of `left` parts."""
        current_time = time.monotonic()
        self._until = current_time + (self._end - current_time) / max(1, left)

    @property
    def is_over(self) -> bool:
        """Whether the share of the current part is used up."""
        return time.monotonic() >= self._until


class _Measurement:
    """The baseline's process, and the results so far."""

    def __init__(
        self, job: TimingJob, baseline: str, progress: Progress, parts: int, budget: _TimeBudget
    ) -> None:
        self._job, self._baseline_name, self._progress, self._budget = job, baseline, progress, budget
        self._total = parts * job.settings.rounds
        self._done = 0
        self._baseline_worker: LoadedWorker | None = None
        self._baseline_pairs: dict[int, list[RoundPair]] = {}
        self._lengths: dict[int, MeanTokenCounts] = {}
        self.result = LatencyResults()

    def start_baseline(self, stack: ExitStack, path: Path) -> None:
        try:
            compiled = self._job.settings.baseline == "compiled"
            self._baseline_worker = self._job.start_worker(stack, path, compiled)
            self.result.runners[self._baseline_name] = self._baseline_worker.runner
        except RunError as error:
            self.result.errors[self._baseline_name] = error.as_message()

    def time_artifact(self, name: str, path: Path, left: int) -> None:
        """Time one of `left` artifacts at every batch size; its process ends before the next one starts."""
        latency_rows: list[LatencyRow] = []
        parts = left * len(self._job.settings.batch_sizes)
        self._budget.start_part(parts)  # includes the start of the process
        with ExitStack() as stack:
            try:
                timed = self._job.start_worker(stack, path)
                self.result.runners[name] = timed.runner
                for size_index, size in enumerate(self._job.settings.batch_sizes):
                    if size_index:
                        self._budget.start_part(parts - size_index)
                    latency_rows.append(self._time_batches(timed, name, size))
            except RunError as error:
                self.result.errors[name] = error.as_message()
            else:
                self._record_memory(timed, name)
        if latency_rows:
            self.result.rows[name] = latency_rows
        self.result.reduced = self._job.reduced
        self._summarize_baseline()

    def _time_batches(self, timed: LoadedWorker, name: str, size: int) -> LatencyRow:
        prepared = self._prepare_baseline(size)
        lengths = self._job.prepare(timed, size)
        pairs = self._measure_pairs(timed, prepared, f"{name}, batch {size}")
        base = self._baseline_worker.resources if self._baseline_worker else timed.resources
        baseline_pairs = [RoundPair(pair.baseline, None) for pair in pairs if pair.baseline]
        if baseline_pairs:
            self._baseline_pairs.setdefault(size, []).extend(baseline_pairs)
        return self._job.summary_row(size, pairs, timed.resources, base, lengths)

    def _measure_pairs(self, timed: LoadedWorker, against_baseline: bool, note: str) -> list[RoundPair]:
        """Measure pairs of rounds until enough undisturbed ones agree, or the limit is reached."""
        num_rounds = self._job.settings.rounds
        pairs: list[RoundPair] = []
        while True:
            first = self._round_baseline() if against_baseline and len(pairs) % 2 else None
            timing_round = self._job.run_round(timed)
            other = first or (self._round_baseline() if against_baseline else None)
            if against_baseline and other is None:  # it failed: the artifact is timed alone
                against_baseline, pairs = False, [RoundPair(pair.own, None) for pair in pairs]
            pairs.append(RoundPair(timing_round, other))
            self._advance_progress(note, len(pairs) > num_rounds)
            if len(pairs) >= MIN_ROUNDS and self._budget.is_over:
                self._total -= max(0, num_rounds - len(pairs))
                return pairs
            if len(pairs) >= num_rounds:
                base = self._baseline_worker.resources if self._baseline_worker else timed.resources
                if (
                    len(pairs) >= MAX_ROUND_FACTOR * num_rounds
                    or judge_rounds(pairs, timed.resources, base, num_rounds).is_sufficient
                ):
                    return pairs

    def finish(self) -> LatencyResults:
        """Summarize the baseline; where there was nothing to compare it with, time it alone."""
        if not self._baseline_pairs and self._baseline_worker is not None:
            base = self._baseline_worker
            try:
                for size_index, size in enumerate(self._job.settings.batch_sizes):
                    self._budget.start_part(len(self._job.settings.batch_sizes) - size_index)
                    self._lengths[size] = self._job.prepare(base, size)
                    self._baseline_pairs[size] = self._measure_pairs(
                        base, False, f"{self._baseline_name}, batch {size}"
                    )
            except RunError as error:
                self._record_baseline_error(error)
        self._summarize_baseline()
        return self.result

    def _summarize_baseline(self) -> None:
        resources = self._baseline_worker.resources if self._baseline_worker else None
        baseline_rows = [
            self._job.summary_row(size, pairs, resources, resources, self._lengths[size])
            for size, pairs in self._baseline_pairs.items()
            if resources is not None
        ]
        if baseline_rows:
            unit_speedup = {"speedup": 1.0, "speedup_ci95": [1.0, 1.0]}
            unit_speedup |= {
                f"cpu_{key}": value
                for key, value in unit_speedup.items()
                if resources and resources.device == "cpu"
            }
            self.result.rows[self._baseline_name] = [row | unit_speedup for row in baseline_rows]
        if self._baseline_worker is not None and self._baseline_worker.worker.alive:
            self._record_memory(self._baseline_worker, self._baseline_name)

    def _prepare_baseline(self, size: int) -> bool:
        """Prepare the baseline for batches of `size`; return whether it is ready."""
        if self._baseline_worker is None or not self._baseline_worker.worker.alive:
            return False
        try:
            self._lengths[size] = self._job.prepare(self._baseline_worker, size)
        except RunError as error:
            self._record_baseline_error(error)
            return False
        return True

    def _round_baseline(self) -> TimingRound | None:
        assert self._baseline_worker is not None
        try:
            return self._job.run_round(self._baseline_worker)
        except RunError as error:
            self._record_baseline_error(error)
            return None

    def _record_baseline_error(self, error: RunError) -> None:
        self.result.errors.setdefault(self._baseline_name, error.as_message())

    def _record_memory(self, timed: LoadedWorker, name: str) -> None:
        try:
            answer = timed.worker.ask(op="memory")
            self.result.peak_memory_bytes[name] = answer["peak_bytes"]
            if answer.get("gpu_bytes") is not None:
                self.result.gpu_memory_bytes[name] = answer["gpu_bytes"]
        except RunError as error:
            self.result.errors.setdefault(name, error.as_message())

    def _advance_progress(self, note: str, repeated: bool) -> None:
        self._done += 1
        self._total += repeated
        repeat_note = ", again" if repeated else ""
        self._progress(min(self._done, self._total), self._total, note + repeat_note)
