"""The process that one artifact is timed in: `python -m smelt.evaluate.latency_worker`.

Speaks JSON lines: a request per line on standard input, an answer per line on standard output. It
works only between a request and its answer and is blocked on the pipe otherwise, so that it disturbs
nobody's measurement; when the pipe closes (the parent ended, however) it ends too.

    load: artifact, threads, task, generation, device, lengths -> runner
    prepare: batch_size, texts, pairs, limit_ms       -> call_ms, input_tokens, output_tokens
    round: min_ms                                     -> times_ms, texts, output_tokens
    memory                                            -> peak_bytes

An answer `{"error": "..."}` says that a request failed.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from smelt.runtime.runner import Batch, Runner

Answer = dict[str, Any]


class Worker:
    """Loads one artifact and times whole batches on it; tokenization lies outside of the timed part."""

    def __init__(self) -> None:
        self._runner: Runner | None = None
        self._tokenizer: Any = None
        self._run: Callable[[Batch], int] | None = None
        self._batches: list[Batch] = []
        self._lengths: tuple[int, int] | None = None  # of prompt and continuation: a language model

    def answer(self, request: dict[str, Any]) -> Answer:
        """Do what the request asks for; whatever goes wrong becomes an answer with `error`."""
        operations = {
            "load": self._load,
            "prepare": self._prepare,
            "round": self._round,
            "memory": self._memory,
        }
        try:
            return operations[request["op"]](request)
        except Exception as error:  # the parent decides what a failure means, so none may be lost here
            from smelt.core.errors import SmeltError

            kind = "" if isinstance(error, SmeltError) else f"{type(error).__name__}: "
            return {"error": f"{kind}{error}"}

    def _load(self, request: dict[str, Any]) -> Answer:
        from smelt.core.artifact import read_artifact

        artifact = read_artifact(Path(request["artifact"]))  # first: a wrong folder is told at once
        from smelt.runtime.checkpoint import load_tokenizer
        from smelt.runtime.generation import Generation, generate
        from smelt.runtime.runner import open_runner

        runner = open_runner(artifact, request["threads"], request.get("device", "auto"))
        self._runner, self._tokenizer = runner, load_tokenizer(artifact.path)
        if request["task"] == "language-modeling":
            self._lengths = request["lengths"][0], request["lengths"][1]
        elif request["task"] == "text-classification":
            self._run = lambda batch: 0 * runner.forward(batch).size  # no tokens come out
        else:
            generation = Generation.model_validate(request["generation"])
            self._run = lambda batch: sum(map(len, generate(runner, batch, generation)))
        return {"runner": f"{runner.name} {runner.version}"}

    def _prepare(self, request: dict[str, Any]) -> Answer:
        """Tokenize the texts into batches and warm up: one pass, cut after `limit_ms`."""
        from smelt.runtime.predict import length_limit, make_batches

        assert self._runner is not None
        limit = length_limit(self._tokenizer, self._runner.config)
        if self._lengths is not None:
            self._prepare_prompts(request, limit)
        else:
            batches = make_batches(
                request["texts"], self._tokenizer, request["batch_size"], limit, request["pairs"]
            )
            self._batches = [batch for _, batch in batches]
        assert self._run is not None
        produced, timed, texts = 0, [], 0
        begin = time.perf_counter()
        for batch in self._batches:
            at = time.perf_counter()
            produced += self._run(batch)
            timed.append(1000 * (time.perf_counter() - at))
            texts += batch.input_ids.shape[0]
            if 1000 * (time.perf_counter() - begin) > request["limit_ms"]:
                break
        lengths = [int(n) for batch in self._batches for n in batch.attention_mask.sum(axis=1)]
        return {
            # the first call also builds kernels and buffers
            "call_ms": statistics.median(timed[1:] or timed),
            "input_tokens": statistics.fmean(lengths),
            "output_tokens": produced / texts,
        }

    def _prepare_prompts(self, request: dict[str, Any], limit: int) -> None:
        """Make batches of prompts, which are all continued by the same number of tokens."""
        from smelt.evaluate.prompts import prompt_batches
        from smelt.runtime.causal import generate_fixed

        assert self._lengths is not None
        runner = self._runner
        self._batches, new = prompt_batches(
            request["texts"], self._tokenizer, request["batch_size"], self._lengths, limit
        )
        self._run = lambda batch: generate_fixed(runner, batch, new)

    def _round(self, request: dict[str, Any]) -> Answer:
        """Time whole passes over the batches until `min_ms` have gone by."""
        assert self._run is not None
        run, clock = self._run, time.perf_counter_ns
        gc.collect()
        gc.disable()  # a collection inside a call would be charged to it
        run(
            self._batches[-1]
        )  # after the wait caches are cold and cores slow; the shortest batch is the cheapest
        times: list[int] = []
        produced = texts = 0
        begin = clock()
        while clock() - begin < request["min_ms"] * 1e6:
            for batch in self._batches:
                at = clock()
                produced += run(batch)
                times.append(clock() - at)
                texts += batch.input_ids.shape[0]
        gc.enable()
        return {"times_ms": [t / 1e6 for t in times], "texts": texts, "output_tokens": produced / texts}

    def _memory(self, request: dict[str, Any]) -> Answer:
        return {"peak_bytes": peak_memory_bytes()}


def peak_memory_bytes() -> int:
    """Return the most memory (resident set, bytes) that this process has held so far."""
    status = Path("/proc/self/status")
    if status.is_file():
        # not ru_maxrss: Linux hands the forking parent's peak on through exec
        for line in status.read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import psutil

    peak = getattr(psutil.Process().memory_info(), "peak_wset", None)  # Windows
    if peak is not None:
        return int(peak)
    import resource

    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)  # macOS counts in bytes


def main() -> None:
    """Answer requests until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it closes the pipe
    # Libraries print to standard output; the answers get a descriptor that nobody else knows.
    answers: TextIO = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    worker = Worker()
    for line in sys.stdin:
        print(json.dumps(worker.answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
