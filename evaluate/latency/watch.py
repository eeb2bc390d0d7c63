"""Sees where the time of a call goes, between the texts that go in and those that come out."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from smelt.runtime.batch import Batch, Logits, Tokens
from smelt.runtime.images.batch import ImageBatch

_clock = time.perf_counter_ns


class Watch:
    """A runner that notes when it is asked and when it has answered; the rest is the runner's own.

    What comes before the first question is tokenizing (of images: reading, decoding, resizing), what comes
    after the last answer is detokenizing, or a classifier's softmax and labels; so nothing is left over. It
    costs two readings of a clock per question, below a microsecond.

    batch: what the model was asked last.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.batch: Batch | ImageBatch | None = None
        self._marks: list[int] = []
        self._steps = 0
        self._first = self._last = 0
        self._whole: tuple[str, dict[str, Any]] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, batch: Batch | ImageBatch) -> Logits:
        """As the runner's."""
        self.batch = batch
        self._marks.append(_clock())
        logits: Logits = self._runner.forward(batch)
        self._marks.append(_clock())
        return logits

    def encode(self, batch: Batch) -> Any:
        """As the runner's."""
        self.batch = batch
        self._marks.append(_clock())
        state = self._runner.encode(batch)
        self._marks.append(_clock())
        return state

    def decode_step(self, state: Any, tokens: Tokens) -> Logits:
        """As the runner's."""
        logits: Logits = self._runner.decode_step(state, tokens)
        self._last = _clock()
        if not self._steps:
            self._first = self._last
        self._steps += 1
        return logits

    def sequences(self, graph: str, batch: Batch, feeds: dict[str, Any]) -> Tokens:
        """As the runner's."""
        self.batch, self._whole = batch, (graph, feeds)
        self._marks.append(_clock())
        found: Tokens = self._runner.sequences(graph, batch, feeds)
        self._marks.append(_clock())
        prompt = batch.input_ids.shape[1] if self._runner.in_pieces else 1
        self._steps = found.shape[1] - prompt
        return found

    def begin(self) -> int:
        """Forget the call before; return the time, ns."""
        self._marks.clear()
        self._steps = 0
        self._whole = None
        return _clock()

    @property
    def asked(self) -> tuple[str, Batch, dict[str, Any]] | None:
        """What a graph that holds the loop was asked last; None for other models."""
        if self._whole is None or not isinstance(self.batch, Batch):
            return None
        graph, feeds = self._whole
        return graph, self.batch, feeds

    def first_token_ms(self, asked: tuple[str, Batch, dict[str, Any]]) -> float:
        """Ask again what was `asked`, for one token only; return ms."""
        graph, batch, feeds = asked
        one = {**feeds, "max_new_tokens": np.array(1)}
        begin = _clock()
        self._runner.sequences(graph, batch, one)
        return _ms(_clock() - begin)

    def parts(self, begin: int, end: int) -> list[float] | None:
        """Return what a call from `begin` to `end` (ns) went into, in ms.

        Of a graph that holds the loop: before it; its part; how many further tokens the longest text has;
        after it. Of other generating models: before the encoder, or a language model's prompt; the encoder
        or prompt; until the first token; all further tokens; how many those are (steps, so the longest
        text's); after the last one. Of a classifier: before the model; the model; after it. None where the
        model was not asked exactly once.
        """
        if len(self._marks) != 2:
            return None
        asked, answered = self._marks
        if self._whole is not None:
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
