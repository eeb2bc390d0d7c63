"""A runner that measures the parts of a call, from input texts to output texts."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from smelt.runtime.batch import Batch, Logits, Tokens
from smelt.runtime.images.image_batch import ImageBatch

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
        self._last = _clock_ns()
        if not self._steps:
            self._first = self._last
        self._steps += 1
        return logits

    def generate_sequences(self, graph: str, batch: Batch, feeds: dict[str, Any]) -> Tokens:
        """Call the runner's `generate_sequences`."""
        self.batch, self._graph_call = batch, (graph, feeds)
        self._timestamps.append(_clock_ns())
        found: Tokens = self._runner.generate_sequences(graph, batch, feeds)
        self._timestamps.append(_clock_ns())
        prompt = batch.input_ids.shape[1] if self._runner.chunked_prefill else 1
        self._steps = found.shape[1] - prompt
        return found

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
        one = {**feeds, "max_new_tokens": np.array(1)}
        begin = _clock_ns()
        self._runner.generate_sequences(graph, batch, one)
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
        asked, answered = self._timestamps
        if self._graph_call is not None:
            steps = float(self._steps - 1)
            return [_ms(asked - begin), _ms(answered - asked), steps, _ms(end - answered)]
        if not self._steps:
            return [_ms(asked - begin), _ms(answered - asked), _ms(end - answered)]
        return [
            _ms(asked - begin),
            _ms(answered - asked),
            _ms(self._first - answered),
            _ms(self._last - self._first),
            float(self._steps - 1),
            _ms(end - self._last),
        ]


def _ms(nanoseconds: int) -> float:
    return nanoseconds / 1e6
