"""The process that one artifact is timed in: `python -m smelt.evaluate.latency.worker`.

Speaks JSON lines: a request per line on standard input, an answer per line on standard output. It
works only between a request and its answer and is blocked on the pipe otherwise, so that it disturbs
nobody's measurement; when the pipe closes (the parent ended, however) it ends too.

    load: artifact, threads, task, device, arrays     -> runner, device
    cut: texts, prompt_tokens, new_tokens             -> texts, new_tokens
    prepare: batch_size, texts, pairs, generation, limit_ms
                                                      -> call_ms, input_tokens, output_tokens, whole
    round: min_ms                                     -> times_ms, parts, texts, load
    memory                                            -> peak_bytes

An answer `{"error": "...", "code": "..."}` says that a request failed.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from smelt.core.data import CLASSIFICATION, CUSTOM, SIMILARITY, Example
from smelt.evaluate.latency.machine_load import between, look

if TYPE_CHECKING:
    from smelt.evaluate.latency.watch import Watch
    from smelt.runtime.generate.settings import Generation

Answer = dict[str, Any]

# so often a graph that holds the loop is asked for its first token
_FIRSTS = 3


class Worker:
    """Loads one artifact and times what `smelt.load` does with texts: the very functions, one batch a call.

    Tokenizing, detokenizing and a classifier's labels are inside of the timed part. Of images it is the
    reading and decoding of their files, resizing and normalizing.
    """

    def __init__(self) -> None:
        self._watch: Watch | None = None
        self._task = ""
        self._generation: Generation | None = None
        self._groups: list[list[Example]] = []
        self._arrays: Any = None  # of rows that are no texts
        self._fed: dict[int, Any] = {}  # what the graph is fed for a group of them
        self._asked: list[Any] = []  # by group, what a graph that holds the loop is asked

    def answer(self, request: dict[str, Any]) -> Answer:
        """Do what the request asks for; whatever goes wrong becomes an answer with `error`."""
        operations = {
            "load": self._load,
            "cut": self._cut,
            "prepare": self._prepare,
            "round": self._round,
            "memory": self._memory,
        }
        try:
            return operations[request["op"]](request)
        except Exception as error:  # the parent decides what a failure means, so none may be lost here
            from smelt.core.errors import UNNAMED, SmeltError

            if isinstance(error, SmeltError):
                return {"error": str(error), "code": error.code or UNNAMED}
            return {"error": f"{type(error).__name__}: {error}", "code": "unforeseen"}

    def _load(self, request: dict[str, Any]) -> Answer:
        from smelt.core.artifact import read_artifact

        artifact = read_artifact(Path(request["artifact"]))  # first: a wrong folder is told at once
        from smelt.evaluate.latency.watch import Watch
        from smelt.runtime.backends.open_runner import open_runner

        runner = open_runner(artifact, request["threads"], request.get("device", "auto"))
        self._watch, self._task = Watch(runner), request["task"]
        if self._task == CUSTOM:
            from smelt.core.rows.arrays import read_arrays

            # written with the axis of the rows first; what is the same in every call has none
            axes = {name: axis and 0 for name, axis in self._watch.signature.axes.items()}
            self._arrays = read_arrays(Path(request["arrays"]), axes=axes)
        return {"runner": f"{runner.name} {runner.version}", "device": runner.device}

    def _cut(self, request: dict[str, Any]) -> Answer:
        """Cut prompts for a language model."""
        from smelt.evaluate.latency.prompts import cut_prompts

        assert self._watch is not None
        lengths = request["prompt_tokens"], request["new_tokens"]
        texts, new = cut_prompts(request["texts"], self._watch, lengths)
        return {"texts": texts, "new_tokens": new}

    def _prepare(self, request: dict[str, Any]) -> Answer:
        """Take the texts and warm up: one pass, cut after `limit_ms`.

        call_ms is the median call; whole says whether the pass came to its end.
        """
        from smelt.runtime.batch import Batch
        from smelt.runtime.generate.settings import Generation

        assert self._watch is not None
        self._generation = Generation.model_validate(request["generation"])
        self._groups = groups_of(request["texts"], request["pairs"], request["batch_size"])
        self._asked = []
        if self._task == CUSTOM:
            self._feed()
        read = written = texts = 0
        timed: list[float] = []
        begin = time.perf_counter()
        for group in self._groups:
            at = time.perf_counter()
            self._run(group)
            timed.append(1000 * (time.perf_counter() - at))
            if isinstance(self._watch.batch, Batch):  # images and arrays have no tokens
                read += int(self._watch.batch.attention_mask.sum())
            written += self._written(len(group))
            texts += len(group)
            if 1000 * (time.perf_counter() - begin) > request["limit_ms"]:
                break
        return {
            # the first call also builds kernels and buffers
            "call_ms": statistics.median(timed[1:] or timed),
            "input_tokens": read / texts,
            "output_tokens": written / texts,
            "whole": len(timed) == len(self._groups),
        }

    def _feed(self) -> None:
        """Make the arrays of each group, whose texts are places of rows."""
        assert self._watch is not None
        signature = self._watch.signature
        for group in self._groups:
            rows = self._arrays.some([int(example.text) for example in group])
            self._fed[id(group)] = signature.feeds(rows, 0, rows.rows)

    def _run(self, group: Sequence[Example]) -> None:
        """Do for one batch what `generate`, `predict`, `embed` and `run` of `smelt.load` do."""
        if self._task == CUSTOM:
            assert self._watch is not None
            self._watch.run(self._fed[id(group)])
            return
        from smelt.runtime.class_predictions import predictions
        from smelt.runtime.predict import class_logits, generate_texts, sentence_vectors

        runner: Any = self._watch
        if self._task == SIMILARITY:
            sentence_vectors(runner, [example.text for example in group], len(group))
        elif self._task in CLASSIFICATION:
            predictions(class_logits(runner, group, len(group)), runner.config)
        else:
            assert self._generation is not None
            generate_texts(runner, [example.text for example in group], self._generation, len(group))

    def _written(self, texts: int) -> int:
        """Return how many tokens the model makes of the last batch; the texts no longer show it."""
        from smelt.runtime.generate.decoding import settle

        assert self._generation is not None
        if self._task in (*CLASSIFICATION, SIMILARITY, CUSTOM):
            return 0
        if self._task == "language-modeling":
            return texts * int(self._generation.max_new_tokens or 0)
        runner: Any = self._watch
        decoding = settle(self._generation, runner)
        return sum(map(len, runner.generator(runner, runner.batch, decoding)))

    def _round(self, request: dict[str, Any]) -> Answer:
        """Time whole passes over the batches until `min_ms` have gone by."""
        assert self._watch is not None
        watch, run, clock = self._watch, self._run, time.perf_counter_ns
        gc.collect()
        collects = gc.isenabled()
        gc.disable()  # a collection inside a call would be charged to it
        watch.begin()
        try:
            run(
                self._groups[-1]
            )  # after the wait caches are cold and cores slow; the shortest is the cheapest
            times: list[float] = []
            parts: list[list[float]] = []
            passes = 0
            firsts = self._firsts()
            before = look()
            begin = clock()
            while clock() - begin < request["min_ms"] * 1e6:
                for group, first in zip(self._groups, firsts, strict=True):
                    at = watch.begin()
                    run(group)
                    end = clock()
                    times.append((end - at) / 1e6)
                    if (found := watch.parts(at, end)) is not None:
                        parts.append(found if first is None else with_first(found, first))
                passes += 1
            after = look()
        finally:
            if collects:
                gc.enable()
        return {
            "times_ms": times,
            "parts": parts,
            "texts": passes * sum(map(len, self._groups)),
            "load": between(before, after).dump(),
        }

    def _firsts(self) -> list[float | None]:
        """Return for each group, ms, what its first token takes where the loop is in the graph, else None.

        A graph does not show it; so it is asked for one token, outside of what is timed, in every round. It
        is asked a few times, since one answer alone is as slow as whatever disturbs it.
        """
        watch = self._watch
        assert watch is not None
        if watch.asked is None:  # by the call that warms up
            return [None] * len(self._groups)
        while len(self._asked) < len(self._groups):
            watch.begin()
            self._run(self._groups[len(self._asked)])
            self._asked.append(watch.asked)
        return [statistics.median(watch.first_token_ms(one) for _ in range(_FIRSTS)) for one in self._asked]

    def _memory(self, request: dict[str, Any]) -> Answer:
        return {"peak_bytes": peak_memory_bytes()}


def with_first(parts: list[float], first: float) -> list[float]:
    """Return the `parts` of a call of a graph that holds the loop, with what its first token took, ms.

    That was timed by itself, so it may come out longer than the graph's part of the call; it is that part
    where no other token came.
    """
    _, whole, further, _ = parts
    return [*parts, min(first, whole) if further else whole]


def groups_of(texts: Sequence[str], pairs: Sequence[str | None] | None, size: int) -> list[list[Example]]:
    """Return the texts in groups of `size`, those of similar length together, the longest first.

    Length is in bytes, so that the groups are the same for every tokenizer.
    """
    order = sorted(range(len(texts)), key=lambda i: (-len(texts[i].encode()), i))
    examples = [Example(texts[i], text_pair=pairs[i] if pairs else None) for i in order]
    return [examples[at : at + size] for at in range(0, len(examples), size)]


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
