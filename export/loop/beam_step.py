"""One step of a beam search, as nodes: scores of what may come next, and which texts go on or have ended.

Shapes: B = sentences, N = beams, R = rows of a step, K = candidates kept in a step, T = tokens so far,
V = vocabulary, C = words that are scored, which are V unless there is a shortlist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from smelt.export.loop.builder import Builder
from smelt.export.loop.logits import in_vocabulary
from smelt.export.loop.rules import Rules, by_texts, ends, rule_of

OUT = -1e9
"""The score of what is out of the race."""


@dataclass
class Beams:
    """The names of a beam search's values; texts and finished are int64 [B, N, T], scores float32 [B, N].

    ended: bool [B, N], which finished places are taken by a text that has ended. improvable: bool [B, 1].
    """

    texts: str
    scores: str
    finished: str
    finished_scores: str
    ended: str
    improvable: str


@dataclass(frozen=True)
class Search:
    """The names of what is the same in all steps.

    words: int64 [C], of which word each score speaks; None where C is V. rows: of the rules, float32
    [rules, C]. n, kept: int64 [1], N and K. beams: int64 [N], their
    numbers. reserve: bool [K], candidates that only go on.
    """

    vocabulary: int
    words: str | None
    rules: Rules
    rows: str
    n: str
    kept: str
    beams: str
    reserve: str


@dataclass(frozen=True)
class Batch:
    """The names of what is the same as long as the same sentences are in the batch.

    size: int64 [1], B. places: int64 [B, 1], their numbers in it. by_beam, flat: int64, the shapes [B, -1, C]
    and [B, -1]. tail: int64 [B, N, 1], padding.
    """

    size: str
    places: str
    by_beam: str
    flat: str
    tail: str


class Step:
    """One step of beam search, in the graph `b`; `count` is its number, int64 scalar."""

    def __init__(self, b: Builder, count: str, search: Search, batch: Batch) -> None:
        self.b, self.count, self.search, self.batch = b, count, search, batch
        self.new = b.op("Add", count, b.const(1))  # tokens behind the prompt, this one counted
        self.out = b.const(OUT, np.float32)

    def totals(self, logits: str, now: Beams, mask: str | None) -> str:
        """Return float32 [B, N * C]: what each text would have with each next token."""
        b, search, batch = self.b, self.search, self.batch
        scores = b.op("LogSoftmax", logits, axis=-1)
        rule = rule_of(b, search.rules, self.count, search.rows)

        def by_words(inside: Builder) -> str:
            # in the first step R = B: all beams are the same, and the first stands for all
            rows = inside.rows(logits)
            each = inside.op("Div", rows, batch.size)
            texts = inside.op("Slice", now.texts, inside.const([0]), each, inside.const([1]))
            table = inside.op("Concat", rows, inside.op("Shape", texts, start=2), axis=0)
            flat = inside.op("Reshape", texts, table)
            if search.words is None:
                return inside.op("Add", by_texts(inside, scores, flat, mask), rule.row)
            every = in_vocabulary(inside, scores, search.words, search.vocabulary)
            found = inside.op("Gather", by_texts(inside, every, flat, mask), search.words, axis=1)
            return inside.op("Add", found, rule.row)

        ruled = b.choose(
            "text_rules", by_words, lambda i: i.op("Add", scores, rule.row), np.float32, (None, None)
        )
        # each way ends in the sum itself: what a branch hands on as it is would be copied
        before = b.op("Unsqueeze", now.scores, b.const([2]))

        def added(inside: Builder, scores: str) -> str:
            return inside.op("Add", inside.op("Reshape", scores, batch.by_beam), before)

        def as_ruled(inside: Builder) -> str:
            return inside.choose(
                "renormalize_logits", lambda i: added(i, i.op("LogSoftmax", ruled, axis=-1)),
                lambda i: added(i, ruled), np.float32, (None, None, None),
            )  # fmt: skip

        forced = b.op("GreaterOrEqual", rule.forced(b), b.const(0))
        sums = b.choose(
            forced, lambda i: i.op("Add", rule.row, before), as_ruled, np.float32, (None, None, None)
        )
        return b.op("Reshape", sums, batch.flat)

    def choose(self, totals: str, now: Beams, logits: str) -> tuple[str, list[str], str, str]:
        """Return whether all end, the parts of the next `Beams`, ids [R, 1], and whence each row comes."""
        b, search, batch = self.b, self.search, self.batch
        scores, places = b.ops("TopK", totals, search.kept, outputs=2, axis=1)
        v = b.size(search.words, 0) if search.words else b.const(search.vocabulary)
        came, tokens = b.op("Div", places, v), b.op("Mod", places, v)
        tokens = b.op("Gather", search.words, tokens, axis=0) if search.words else tokens
        candidates = b.op(
            "Concat", self._taken(now.texts, came), b.op("Unsqueeze", tokens, b.const([2])), axis=2
        )
        last = b.op("Equal", self.new, "max_new_tokens")
        stop = b.op("Or", ends(b, search.rules, tokens), last)
        # the best that did not end go on
        going, order = b.ops("TopK", self._less(scores, stop), search.n, outputs=2, axis=1)
        texts = self._taken(candidates, order)
        chosen = b.op("GatherElements", came, order, axis=1)
        finished = self._finished(now, candidates, scores, stop)
        improvable = b.op("And", now.improvable, self._could_improve(going, finished))
        ids = b.op("Reshape", b.op("GatherElements", tokens, order, axis=1), b.const([-1, 1]))
        each = b.op("Div", b.rows(logits), batch.size)
        own = b.op("Min", chosen, b.op("Sub", each, b.const([1])))
        old = b.op("Reshape", b.op("Add", b.op("Mul", batch.places, each), own), b.const([-1]))
        return b.all_of(stop), [texts, going, *finished, improvable], ids, old

    def _taken(self, texts: str, places: str) -> str:
        """Return [B, K, T]: of [B, N, T] those at [B, K]."""
        return self.b.op("GatherND", texts, self.b.op("Unsqueeze", places, self.b.const([2])), batch_dims=1)

    def _less(self, scores: str, where: str) -> str:
        """Put `scores` out of the race where a bool says so."""
        return self.b.op("Where", where, self.b.op("Add", scores, self.out), scores)

    def _finished(self, now: Beams, candidates: str, scores: str, stop: str) -> list[str]:
        """Put candidates that have just ended among the finished texts where they are better."""
        b, search, batch = self.b, self.search, self.batch
        not_ended = b.op("Or", b.op("Not", stop), search.reserve)
        worth = b.op("Div", scores, self._penalty(self.new))
        full = b.op("And", "early_stopping", b.all_of(now.ended, [1], keep=True))
        for lost in (full, b.op("Not", now.improvable), not_ended):
            worth = self._less(worth, lost)
        merged = b.op("Concat", now.finished_scores, worth, axis=1)
        best, order = b.ops("TopK", merged, search.n, outputs=2, axis=1)
        texts = b.op("Concat", b.op("Concat", now.finished, batch.tail, axis=2), candidates, axis=1)
        ended = b.op("Concat", now.ended, b.op("Not", not_ended), axis=1)
        return [self._taken(texts, order), best, b.op("GatherElements", ended, order, axis=1)]

    def _could_improve(self, going: str, finished: Sequence[str]) -> str:
        """Say (bool [B, 1]) whether the best running beam may still beat the worst finished text."""
        b = self.b
        _, scores, ended = finished
        length = b.op("Where", "never_stop_early", "max_new_tokens", self.new)
        best = b.op("Slice", going, b.const([0]), b.const([1]), b.const([1]))
        possible = b.op("Div", best, self._penalty(length))
        worst = b.op("Where", ended, b.op("ReduceMin", scores, b.const([1]), keepdims=1), self.out)
        return b.any_of(b.op("Greater", possible, worst), [1], keep=True)

    def _penalty(self, length: str) -> str:
        """Return float32: `length` to the power of the length penalty, of which the sum is a divisor."""
        b = self.b
        return b.cast(b.op("Pow", b.cast(length, np.float64), "length_penalty"), np.float32)


def settled(b: Builder, now: Beams) -> str:
    """Return bool [B]: which sentences have texts that nothing can beat any more."""
    full = b.op("And", "early_stopping", b.all_of(now.ended, [1]))
    return b.op("Or", full, b.op("Not", b.op("Squeeze", now.improvable, b.const([1]))))
