"""Beam search as a loop of a graph, step for step as `smelt.runtime.generate.beam` does it.

Shapes: B = sentences, N = beams, R = rows of a step, K = candidates kept in a step, P = prompt, T = tokens
so far, V = vocabulary, C = words that are scored, which are V unless there is a shortlist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from smelt.export.loop.builder import Builder, Carried
from smelt.export.loop.logits import in_vocabulary
from smelt.export.loop.place import Level
from smelt.export.loop.rules import Rules, by_texts, ends, prepare_rules, rule_of
from smelt.export.loop.source import Source

# inputs of a graph that searches with beams, besides those of the rules
BEAM_INPUTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "num_beams": (np.int64, ()),
    "length_penalty": (np.float64, ()),
    "early_stopping": (np.bool_, ()),  # as soon as there are as many texts as beams
    "never_stop_early": (np.bool_, ()),  # ask with the longest text that there may be
    "renormalize_logits": (np.bool_, ()),
}
_OUT = -1e9  # the score of what is out of the race


@dataclass
class _Beams:
    """The names of a beam search's values; texts and finished are int64 [B, N, T], scores float32 [B, N].

    ended: bool [B, N], which finished places are taken by a text that has ended. improvable: bool [B, 1].
    """

    texts: str
    scores: str
    finished: str
    finished_scores: str
    ended: str
    improvable: str


def beam(root: Level, source: Source, vocabulary: int) -> str:
    """Append beam search; return int64 [B, T], each row's prompt and the new tokens of its best text.

    Args:
        root: the outermost graph.
        source: the model.
        vocabulary: V.
    """
    b = root.builder
    first = _begin(b, source.prompt)
    parts = [
        Carried("running", first.texts, np.int64, (None, None, None)),
        Carried("scores", first.scores, np.float32, (None, None)),
        Carried("finished", first.finished, np.int64, (None, None, None)),
        Carried("finished_scores", first.finished_scores, np.float32, (None, None)),
        Carried("ended", first.ended, np.bool_, (None, None)),
        Carried("improvable", first.improvable, np.bool_, (None, 1)),
    ]
    carried = [*parts, Carried("ids", source.ids, np.int64, (None, None)), *source.caches, *source.extra]
    shared = [one.first for one in source.shared]
    known = _know(b, source, vocabulary)

    def body(b: Builder, count: str, names: list[str]) -> tuple[str, list[str]]:
        now, (ids, *rest) = _Beams(*names[: len(parts)]), names[len(parts) :]
        caches, extra = rest[: len(source.caches)], rest[len(source.caches) :]
        found = source.step([root, Level(b)], ids, caches, extra, (0, shared), beams=True)
        mask = extra[0] if source.mask else None
        search = _Step(b, count, known)
        totals = search.totals(found.logits, now, mask)
        again, after, ids, old = search.choose(totals, now, found.logits)
        moved = [b.op("Gather", name, old, axis=0) for name in (*found.caches, *found.extra)]
        return again, [*after, ids, *moved]

    texts = b.loop("beams", "max_new_tokens", carried, body)[2]
    return b.op("Gather", texts, b.const(0), axis=1)


@dataclass(frozen=True)
class _Known:
    """The names of what is the same in all steps.

    words: int64 [C], of which word each score speaks; None where C is V. rows: of the rules, float32
    [rules, C].
    n, kept, batch: int64 [1], N, K and B. sentences: int64 [B, 1], their numbers. by_beam, flat: int64, the
    shapes [B, -1, V] and [B, -1]. reserve: bool [K], candidates that only go on. tail: int64 [B, N, 1],
    padding.
    """

    vocabulary: int
    words: str | None
    rules: Rules
    rows: str
    n: str
    kept: str
    batch: str
    sentences: str
    by_beam: str
    flat: str
    reserve: str
    tail: str


def _know(b: Builder, source: Source, vocabulary: int) -> _Known:
    zero, one = b.const(0), b.const(1)
    prompt, words = source.prompt, source.words
    n, batch = b.op("Unsqueeze", "num_beams", b.const([0])), b.rows(prompt)
    # so many that N are left even if all others end
    each = b.op("Max", b.op("Add", b.rows("eos_token_ids"), b.const([1])), b.const([2]))
    kept = b.op("Mul", n, b.op("Min", each, b.rows(words) if words else b.const([vocabulary])))
    place = b.op("Range", zero, b.op("Squeeze", kept, b.const([0])), one)
    count = b.op("Range", zero, b.op("Squeeze", batch, b.const([0])), one)
    return _Known(
        vocabulary, words, prepare_rules(b, vocabulary),
        b.op("Gather", "rule_biases", words, axis=1) if words else "rule_biases", n, kept, batch,
        sentences=b.op("Unsqueeze", count, b.const([1])),
        by_beam=b.op("Concat", batch, *_by_beam(b, words, vocabulary), axis=0),
        flat=b.op("Concat", batch, b.const([-1]), axis=0),
        reserve=b.op("GreaterOrEqual", place, n),
        tail=b.op("Expand", "pad_token_id", b.op("Concat", batch, n, b.const([1]), axis=0)),
    )  # fmt: skip


def _by_beam(b: Builder, words: str | None, vocabulary: int) -> list[str]:
    """Return the parts of the shape [-1, C]."""
    return [b.const([-1]), b.rows(words)] if words else [b.const([-1, vocabulary])]


def _begin(b: Builder, prompt: str) -> _Beams:
    batch, n = b.rows(prompt), b.op("Unsqueeze", "num_beams", b.const([0]))
    table = b.op("Concat", batch, n, axis=0)
    length = b.op("Shape", prompt, start=1, end=2)
    texts = b.op("Expand", b.op("Unsqueeze", prompt, b.const([1])), b.op("Concat", batch, n, length, axis=0))
    # or all beams would say the same
    others = b.op("Greater", b.op("Range", b.const(0), "num_beams", b.const(1)), b.const(0))
    out, zero = b.const(_OUT, np.float32), b.const(0, np.float32)
    scores = b.op("Expand", b.op("Where", others, out, zero), table)
    return _Beams(
        texts, scores, texts, b.op("Expand", out, table),
        b.op("Expand", b.const(False, np.bool_), table),
        b.op("Expand", b.const([[True]], np.bool_), b.op("Concat", batch, b.const([1]), axis=0)),
    )  # fmt: skip


class _Step:
    """One step of beam search, in the graph `b`; `count` is its number, int64 scalar."""

    def __init__(self, b: Builder, count: str, known: _Known) -> None:
        self.b, self.count, self.known = b, count, known
        self.new = b.op("Add", count, b.const(1))  # tokens behind the prompt, this one counted
        self.out = b.const(_OUT, np.float32)

    def totals(self, logits: str, now: _Beams, mask: str | None) -> str:
        """Return float32 [B, N * C]: what each text would have with each next token."""
        b, known = self.b, self.known
        scores = b.op("LogSoftmax", logits, axis=-1)
        rule = rule_of(b, known.rules, self.count, known.rows)

        def by_words(inside: Builder) -> str:
            # in the first step R = B: all beams are the same, and the first stands for all
            rows = inside.rows(logits)
            each = inside.op("Div", rows, known.batch)
            texts = inside.op("Slice", now.texts, inside.const([0]), each, inside.const([1]))
            table = inside.op("Concat", rows, inside.op("Shape", texts, start=2), axis=0)
            flat = inside.op("Reshape", texts, table)
            if known.words is None:
                return inside.op("Add", by_texts(inside, scores, flat, mask), rule.row)
            every = in_vocabulary(inside, scores, known.words, known.vocabulary)
            found = inside.op("Gather", by_texts(inside, every, flat, mask), known.words, axis=1)
            return inside.op("Add", found, rule.row)

        ruled = b.choose(
            "text_rules", by_words, lambda i: i.op("Add", scores, rule.row), np.float32, (None, None)
        )
        # each way ends in the sum itself: what a branch hands on as it is would be copied
        before = b.op("Unsqueeze", now.scores, b.const([2]))

        def added(inside: Builder, scores: str) -> str:
            return inside.op("Add", inside.op("Reshape", scores, known.by_beam), before)

        def as_ruled(inside: Builder) -> str:
            return inside.choose(
                "renormalize_logits", lambda i: added(i, i.op("LogSoftmax", ruled, axis=-1)),
                lambda i: added(i, ruled), np.float32, (None, None, None),
            )  # fmt: skip

        forced = b.op("GreaterOrEqual", rule.forced(b), b.const(0))
        sums = b.choose(
            forced, lambda i: i.op("Add", rule.row, before), as_ruled, np.float32, (None, None, None)
        )
        return b.op("Reshape", sums, known.flat)

    def choose(self, totals: str, now: _Beams, logits: str) -> tuple[str, list[str], str, str]:
        """Return whether to go on, the parts of the next `_Beams`, ids [R, 1], and whence each row comes."""
        b, known = self.b, self.known
        scores, places = b.ops("TopK", totals, known.kept, outputs=2, axis=1)
        v = b.size(known.words, 0) if known.words else b.const(known.vocabulary)
        came, tokens = b.op("Div", places, v), b.op("Mod", places, v)
        tokens = b.op("Gather", known.words, tokens, axis=0) if known.words else tokens
        candidates = b.op(
            "Concat", self._taken(now.texts, came), b.op("Unsqueeze", tokens, b.const([2])), axis=2
        )
        last = b.op("Equal", self.new, "max_new_tokens")
        stop = b.op("Or", ends(b, known.rules, tokens), last)
        # the best that did not end go on
        going, order = b.ops("TopK", self._less(scores, stop), known.n, outputs=2, axis=1)
        texts = self._taken(candidates, order)
        chosen = b.op("GatherElements", came, order, axis=1)
        finished = self._finished(now, candidates, scores, stop)
        improvable = b.op("And", now.improvable, self._could_improve(going, finished))
        full = b.op("And", "early_stopping", b.all_of(finished[2]))
        over = b.op("Or", b.op("Or", full, b.all_of(stop)), b.op("Not", b.any_of(improvable)))
        ids = b.op("Reshape", b.op("GatherElements", tokens, order, axis=1), b.const([-1, 1]))
        each = b.op("Div", b.rows(logits), known.batch)
        own = b.op("Min", chosen, b.op("Sub", each, b.const([1])))
        old = b.op("Reshape", b.op("Add", b.op("Mul", known.sentences, each), own), b.const([-1]))
        return b.op("Not", over), [texts, going, *finished, improvable], ids, old

    def _taken(self, texts: str, places: str) -> str:
        """Return [B, K, T]: of [B, N, T] those at [B, K]."""
        return self.b.op("GatherND", texts, self.b.op("Unsqueeze", places, self.b.const([2])), batch_dims=1)

    def _less(self, scores: str, where: str) -> str:
        """Put `scores` out of the race where a bool says so."""
        return self.b.op("Where", where, self.b.op("Add", scores, self.out), scores)

    def _finished(self, now: _Beams, candidates: str, scores: str, stop: str) -> list[str]:
        """Put candidates that have just ended among the finished texts where they are better."""
        b, known = self.b, self.known
        not_ended = b.op("Or", b.op("Not", stop), known.reserve)
        worth = b.op("Div", scores, self._penalty(self.new))
        full = b.op("And", "early_stopping", b.all_of(now.ended, [1], keep=True))
        for lost in (full, b.op("Not", now.improvable), not_ended):
            worth = self._less(worth, lost)
        merged = b.op("Concat", now.finished_scores, worth, axis=1)
        best, order = b.ops("TopK", merged, known.n, outputs=2, axis=1)
        texts = b.op("Concat", b.op("Concat", now.finished, known.tail, axis=2), candidates, axis=1)
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
