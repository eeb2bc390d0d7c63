"""The process in which one artifact is timed: `python -m smelt.evaluate.latency.worker`.

It exchanges JSON lines: a request per line on standard input, an answer per line on standard output. It
works only between a request and its answer and is blocked on the pipe otherwise, so that it does not
disturb other measurements; when the pipe closes (the parent ended, for any reason) it ends too.

    load: artifact, threads, task, device, arrays, compiled
                                                      -> runner, device
    cut: texts, prompt_tokens, new_tokens             -> texts, new_tokens
    prepare: batch_size, texts, pairs, generation, limit_ms
                                                      -> call_ms, input_tokens, output_tokens, whole
    round: min_ms                                     -> times_ms, graph_ms, parts, texts, load
    memory                                            -> peak_bytes, gpu_bytes

An answer `{"error": "...", "code": "..."}` reports that a request failed. `TimedRunner` measures the parts of
a call, from input texts to output texts.
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

import numpy as np
import psutil

from smelt.core.errors import InputError
from smelt.core.system import peak_memory_bytes
from smelt.data.splits import Example
from smelt.data.tasks import task_traits
from smelt.evaluate.latency.gpu_monitor import GpuMonitor, open_gpu_monitor
from smelt.evaluate.latency.summary import load_between, read_counters
from smelt.generation.backend import Batch, Logits, Tokens, TopLogits
from smelt.generation.config import GenerationSettings, resolve_generation
from smelt.runtimes.graph_timer import time_graphs
from smelt.runtimes.images import ImageBatch
from smelt.tasks.registry import task_spec

if TYPE_CHECKING:
    from smelt.generation.config import GenerationSettings


WorkerAnswer = dict[str, Any]

# number of calls that measure the first token of a graph with the generation loop
_FIRST_TOKEN_REPEATS = 3


class TimingWorker:
    """Loads one artifact and times what `smelt.load` does with texts: the same functions, one batch per call.

    Tokenizing, detokenizing and a classifier's labels are part of the time. For images it is reading and
    decoding of their files, resizing and normalizing.
    """

    def __init__(self) -> None:
        self._timed_runner: TimedRunner | None = None
        self._task = ""
        self._compiled = False
        self._generation: GenerationSettings | None = None
        self._groups: list[list[Example]] = []
        self._arrays: Any = None  # of samples that are not texts
        self._array_inputs: dict[int, Any] = {}  # the graph's inputs for a group of them
        self._gpu: GpuMonitor | None = None
        self._graph_calls: list[Any] = []  # by group, the inputs of a graph with the generation loop

    def handle_request(self, request: dict[str, Any]) -> WorkerAnswer:
        """Execute the request; any failure becomes an answer with `error`."""
        operations = {
            "load": self._load_artifact,
            "cut": self._truncate_prompts,
            "prepare": self._prepare_texts,
            "round": self._time_round,
            "memory": self._peak_memory,
        }
        try:
            return operations[request["op"]](request)
        except Exception as error:  # the parent handles failures, so all are passed on
            from smelt.core.errors import DEFAULT_CODE, SmeltError

            if isinstance(error, SmeltError):
                return {"error": str(error), "code": error.code or DEFAULT_CODE}
            return {"error": f"{type(error).__name__}: {error}", "code": "unforeseen"}

    def _load_artifact(self, request: dict[str, Any]) -> WorkerAnswer:
        from smelt.core.artifact import read_artifact

        artifact = read_artifact(Path(request["artifact"]))  # first: reports a wrong folder
        from smelt.runtimes.registry import open_runner

        runner = open_runner(artifact, request["threads"], request.get("device", "auto"))
        self._timed_runner, self._task = TimedRunner(runner), request["task"]
        self._compiled = bool(request.get("compiled"))
        if self._compiled:
            from smelt.runtimes.torch_backend import TorchBackend

            if not isinstance(runner.backend, TorchBackend):
                raise InputError(
                    f"{artifact.path}: only a torch model is compiled. Remove score.latency.baseline.",
                    code="does-not-fit-model",
                    setting="score.latency.baseline",
                )
            runner.backend.compile()
        if task_traits(self._task).modality == "arrays":
            from smelt.data.npz_arrays import read_samples

            # stored with the batch axis first; an array that is the same in every call has none
            axes = {name: axis and 0 for name, axis in self._timed_runner.signature.input_batch_axes.items()}
            self._arrays = read_samples(Path(request["arrays"]), axes=axes)
        self._gpu = open_gpu_monitor(runner.device)
        form = " (torch.compile)" if self._compiled else ""
        return {"runner": f"{runner.name} {runner.version}{form}", "device": runner.device}

    def _truncate_prompts(self, request: dict[str, Any]) -> WorkerAnswer:
        """Cut prompts for a language model."""
        from smelt.evaluate.latency.settings import truncate_prompts

        assert self._timed_runner is not None
        lengths = request["prompt_tokens"], request["new_tokens"]
        texts, new = truncate_prompts(request["texts"], self._timed_runner, lengths)
        return {"texts": texts, "new_tokens": new}

    def _prepare_texts(self, request: dict[str, Any]) -> WorkerAnswer:
        """Store the texts and warm up: one pass, stopped after `limit_ms`.

        call_ms is the median call; whole is whether the pass was completed.
        """
        assert self._timed_runner is not None
        self._generation = GenerationSettings.model_validate(request["generation"])
        self._groups = batch_by_length(request["texts"], request["pairs"], request["batch_size"])
        self._graph_calls = []
        if task_traits(self._task).modality == "arrays":
            self._prepare_arrays()
        for group in (
            self._groups if self._compiled else ()
        ):  # compile for all shapes before anything is timed
            self._run_batch(group)
        input_tokens = output_tokens = texts = 0
        timed: list[float] = []
        begin = time.perf_counter()
        for group in self._groups:
            call_start = time.perf_counter()
            self._run_batch(group)
            timed.append(1000 * (time.perf_counter() - call_start))
            if isinstance(self._timed_runner.batch, Batch):  # images and arrays have no tokens
                input_tokens += int(self._timed_runner.batch.attention_mask.sum())
            output_tokens += self._output_token_count(len(group))
            texts += len(group)
            if 1000 * (time.perf_counter() - begin) > request["limit_ms"]:
                break
        return {
            # the first call also builds kernels and buffers
            "call_ms": statistics.median(timed[1:] or timed),
            "input_tokens": input_tokens / texts,
            "output_tokens": output_tokens / texts,
            "whole": len(timed) == len(self._groups),
        }

    def _prepare_arrays(self) -> None:
        """Build the arrays of each group, whose texts are indices of samples."""
        assert self._timed_runner is not None
        signature = self._timed_runner.signature
        for group in self._groups:
            group_arrays = self._arrays.select([int(example.text) for example in group])
            self._array_inputs[id(group)] = signature.make_feeds(group_arrays, 0, group_arrays.num_samples)

    def _run_batch(self, group: Sequence[Example]) -> None:
        """Run one batch as `generate`, `predict`, `embed` and `run` of `smelt.load` do."""
        if task_traits(self._task).modality == "arrays":
            assert self._timed_runner is not None
            self._timed_runner.run(self._array_inputs[id(group)])
            return
        assert self._generation is not None
        task_spec(self._task).run(self._timed_runner, group, self._generation, len(group))

    def _output_token_count(self, texts: int) -> int:
        """Return the number of output tokens of the last batch, which its texts do not contain."""
        assert self._generation is not None
        if not task_traits(self._task).generates:
            return 0
        if task_traits(self._task).samples == "running-text":
            return texts * int(self._generation.max_new_tokens or 0)
        runner: Any = self._timed_runner
        decoding = resolve_generation(self._generation, runner)
        return sum(map(len, runner.generator(runner, runner.batch, decoding)))

    def _time_round(self, request: dict[str, Any]) -> WorkerAnswer:
        """Time whole passes over the batches until `min_ms` have passed."""
        assert self._timed_runner is not None
        timed_runner, run, clock = self._timed_runner, self._run_batch, time.perf_counter_ns
        gc.collect()
        collects = gc.isenabled()
        gc.disable()  # a collection inside a call would count as its time
        timed_runner.start_call()
        try:
            run(
                self._groups[-1]
            )  # after the wait caches are cold and cores slow; the shortest is the cheapest
            times: list[float] = []
            graph_times: list[float | None] = []
            parts: list[list[float]] = []
            passes = 0
            first_token_times = self._first_token_times()
            counters_before, started = read_counters(), time.time()
            begin = clock()
            while clock() - begin < request["min_ms"] * 1e6:
                for group, first in zip(self._groups, first_token_times, strict=True):
                    with time_graphs() as graph_timer:
                        call_start = timed_runner.start_call()
                        run(group)
                        end = clock()
                    graph_times.append(graph_timer.total_ms())
                    times.append((end - call_start) / 1e6)
                    if (call_parts := timed_runner.call_parts(call_start, end)) is not None:
                        parts.append(call_parts if first is None else add_first_token_time(call_parts, first))
                passes += 1
            counters_after = read_counters()
        finally:
            if collects:
                gc.enable()
        return {
            "times_ms": times,
            "graph_ms": [] if None in graph_times else graph_times,
            "parts": parts,
            "texts": passes * sum(map(len, self._groups)),
            "load": load_between(counters_before, counters_after, self._others_on_gpu(started)).dump(),
        }

    def _others_on_gpu(self, since: float) -> float | None:
        """Return the share of the GPU that processes outside of the measurement used since then."""
        if self._gpu is None:
            return None
        parent = psutil.Process().parent()
        measuring = [] if parent is None else [parent.pid, *(each.pid for each in parent.children())]
        return self._gpu.other_share(since, {os.getpid(), *measuring})

    def _first_token_times(self) -> list[float | None]:
        """Return for each group the time of its first token, ms; None where the loop is not in the graph.

        A graph does not report it; so it is called for one token, outside of the timed part, in every round.
        Long prompts do without the graph's loop: None for their groups. It is called a few times, since a
        single time is affected by any disturbance.
        """
        timed_runner = self._timed_runner
        assert timed_runner is not None
        if timed_runner.last_graph_call is None:  # by the warm-up call
            return [None] * len(self._groups)
        while len(self._graph_calls) < len(self._groups):
            timed_runner.start_call()
            self._run_batch(self._groups[len(self._graph_calls)])
            self._graph_calls.append(timed_runner.last_graph_call)
        first_token = timed_runner.first_token_ms
        return [
            call and statistics.median(first_token(call) for _ in range(_FIRST_TOKEN_REPEATS))
            for call in self._graph_calls
        ]

    def _peak_memory(self, request: dict[str, Any]) -> WorkerAnswer:
        gpu_bytes = None if self._gpu is None else self._gpu.memory_bytes()
        return {"peak_bytes": peak_memory_bytes(), "gpu_bytes": gpu_bytes}


def add_first_token_time(parts: list[float], first: float) -> list[float]:
    """Return the `parts` of a call of a graph with the generation loop, with its first token's time, ms.

    It was timed separately, so it may exceed the graph's part of the call; it equals that part where no
    other token was generated.
    """
    _, total, later_tokens, _ = parts
    return [*parts, min(first, total) if later_tokens else total]


def batch_by_length(
    texts: Sequence[str], pairs: Sequence[str | None] | None, size: int
) -> list[list[Example]]:
    """Return the texts in groups of `size`, of similar length, the longest first.

    Length is in bytes, so that the groups are the same for every tokenizer.
    """
    order = sorted(range(len(texts)), key=lambda i: (-len(texts[i].encode()), i))
    examples = [Example(texts[i], text_pair=pairs[i] if pairs else None) for i in order]
    return [examples[start : start + size] for start in range(0, len(examples), size)]


def main() -> None:
    """Answer requests until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it closes the pipe
    # Libraries print to standard output; the answers use a descriptor that no library writes to.
    answers: TextIO = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    worker = TimingWorker()
    for line in sys.stdin:
        print(json.dumps(worker.handle_request(json.loads(line))), file=answers, flush=True)


_clock_ns = time.perf_counter_ns


class TimedRunner:
    """Wraps a runner and records when its graph is called and when it has returned.

    The time before the first graph call is tokenizing (of images: reading, decoding, resizing), the time
    after the last one is detokenizing, or a classifier's softmax and labels; so nothing is left over. The
    overhead is two clock readings per graph call, below a microsecond.

    batch: the last input of the model.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.batch: Batch | ImageBatch | None = None
        self._timestamps: list[int] = []
        self._steps = 0
        self._first = self._last = 0
        self._graph_call: tuple[str, dict[str, Any]] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, batch: Batch | ImageBatch) -> Logits:
        """Call the runner's `forward`."""
        self.batch = batch
        self._timestamps.append(_clock_ns())
        logits: Logits = self._runner.forward(batch)
        self._timestamps.append(_clock_ns())
        return logits

    def encode(self, batch: Batch) -> Any:
        """Call the runner's `encode`."""
        self.batch = batch
        self._timestamps.append(_clock_ns())
        state = self._runner.encode(batch)
        self._timestamps.append(_clock_ns())
        return state

    def decode_step(self, state: Any, tokens: Tokens) -> Logits:
        """Call the runner's `decode_step`."""
        logits: Logits = self._runner.decode_step(state, tokens)
        self._record_step()
        return logits

    def decode_top(self, state: Any, tokens: Tokens, count: int) -> TopLogits:
        """Call the runner's `decode_top`."""
        top: TopLogits = self._runner.decode_top(state, tokens, count)
        self._record_step()
        return top

    def _record_step(self) -> None:
        self._last = _clock_ns()
        if not self._steps:
            self._first = self._last
        self._steps += 1

    def generate_sequences(self, graph: str, batch: Batch, feeds: dict[str, Any]) -> Tokens:
        """Call the runner's `generate_sequences`."""
        self.batch, self._graph_call = batch, (graph, feeds)
        self._timestamps.append(_clock_ns())
        sequences: Tokens = self._runner.generate_sequences(graph, batch, feeds)
        self._timestamps.append(_clock_ns())
        prompt = batch.input_ids.shape[1] if self._runner.chunked_prefill else 1
        self._steps = sequences.shape[1] - prompt
        return sequences

    def start_call(self) -> int:
        """Reset the times of the previous call; return the time, ns."""
        self._timestamps.clear()
        self._steps = 0
        self._graph_call = None
        return _clock_ns()

    @property
    def last_graph_call(self) -> tuple[str, Batch, dict[str, Any]] | None:
        """Return the last inputs of a graph with the generation loop; None for other models."""
        if self._graph_call is None or not isinstance(self.batch, Batch):
            return None
        graph, feeds = self._graph_call
        return graph, self.batch, feeds

    def first_token_ms(self, asked: tuple[str, Batch, dict[str, Any]]) -> float:
        """Repeat `last_graph_call` for one token only; return ms."""
        graph, batch, feeds = asked
        inputs = {**feeds, "max_new_tokens": np.array(1)}
        begin = _clock_ns()
        self._runner.generate_sequences(graph, batch, inputs)
        return _ms(_clock_ns() - begin)

    def call_parts(self, begin: int, end: int) -> list[float] | None:
        """Return the parts of a call from `start_call` to `end` (ns), in ms.

        Of a graph with the generation loop: before it; its part; number of further tokens of the longest
        text; after it. Of other generating models: before the encoder, or a language model's prompt; the
        encoder or prompt; until the first token; all further tokens; their number (steps, so the longest
        text's); after the last one. Of a classifier: before the model; the model; after it. None where the
        model was not called exactly once.
        """
        if len(self._timestamps) != 2:
            return None
        call_start, call_end = self._timestamps
        if self._graph_call is not None:
            steps = float(self._steps - 1)
            return [_ms(call_start - begin), _ms(call_end - call_start), steps, _ms(end - call_end)]
        if not self._steps:
            return [_ms(call_start - begin), _ms(call_end - call_start), _ms(end - call_end)]
        return [
            _ms(call_start - begin),
            _ms(call_end - call_start),
            _ms(self._first - call_end),
            _ms(self._last - self._first),
            float(self._steps - 1),
            _ms(end - self._last),
        ]


def _ms(nanoseconds: int) -> float:
    return nanoseconds / 1e6


if __name__ == "__main__":
    main()
