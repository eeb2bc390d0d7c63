"""The parent's side of a latency worker: starts it, sends requests, ends it.

The job of all workers of one comparison.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from smelt.core.artifact import default_threads, read_manifest
from smelt.core.errors import InputError, RunError
from smelt.core.system import child_environment, python_command
from smelt.data.splits import CUSTOM_TASK, IMAGE_CLASSIFICATION, Task
from smelt.evaluate.latency.settings import LatencySettings, prompt_texts
from smelt.evaluate.latency.summary import (
    ComputeResources,
    LatencyRow,
    MachineLoad,
    MeanTokenCounts,
    RoundPair,
    TimingRound,
    spread_over_lengths,
    summarize_rounds,
)
from smelt.generation.config import GenerationSettings

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
                f"no answer to '{request['op']}' within {self._time_limit:g} s; increase time_limit_seconds",
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
