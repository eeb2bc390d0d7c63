"""Sees where the time of a call goes, between the texts that go in and those that come out."""

from __future__ import annotations

import time
from typing import Any

from smelt.runtime.batch import Batch, Logits, Tokens

_clock = time.perf_counter_ns


class Watch:
    """A runner that notes when it is asked and when it has answered; the rest is the runner's own.

    What comes before the first question is tokenizing, what comes after the last answer is
    detokenizing, or a classifier's softmax and labels; so nothing is left over. It costs two readings of
    a clock per question, below a microsecond.

    batch: what the model was asked last.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.batch: Batch | None = None
        self._marks: list[int] = []
        self._steps = 0
        self._first = self._last = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, batch: Batch) -> Logits:
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

    def begin(self) -> int:
        """Forget the call before; return the time, ns."""
        self._marks.clear()
        self._steps = 0
        return _clock()

    def parts(self, begin: int, end: int) -> list[float] | None:
        """Return what a call from `begin` to `end` (ns) went into, in ms.

        Of a generating model: before the encoder, or a language model's prompt; the encoder or prompt;
        until the first token; all further tokens; how many those are (steps, so the longest text's);
        after the last one. Of a classifier: before the model; the model; after it. None where the model
        was not asked exactly once.
        """
        if len(self._marks) != 2:
            return None
        asked, answered = self._marks
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
