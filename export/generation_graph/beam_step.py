"""One step of beam search as nodes: scores of the candidates, and which texts continue or end.

Shapes: B = sentences, N = beams, R = rows of a step, K = candidates kept in a step, T = tokens so far,
V = vocabulary, C = tokens that are scored, which are V unless there is a shortlist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from smelt.export.generation_graph.graph_builder import GraphBuilder
from smelt.export.generation_graph.logits_ops import scatter_to_vocabulary
from smelt.export.generation_graph.rule_nodes import RuleTables, apply_history_rules, is_eos, step_rule

EXCLUDED_SCORE = -1e9
"""The score of excluded candidates."""


@dataclass
class BeamValues:
    """The names of a beam search's values; texts and finished are int64 [B, N, T], scores float32 [B, N].

    ended: bool [B, N], which finished places hold an ended text. improvable: bool [B, 1].
    """

    texts: str
    scores: str
    finished: str
    finished_scores: str
    ended: str
    improvable: str


@dataclass(frozen=True)
class BeamSearchValues:
    """The names of values that are constant over all steps.

    token_ids: int64 [C], the token of each score; None if C is V. rule_biases: of the rules, float32
    [rules, C]. num_beams, num_candidates: int64 [1], N and K. beam_indices: int64 [N]. is_reserve: bool [K],
    candidates that only continue.
    """

    vocabulary: int
    token_ids: str | None
    rules: RuleTables
    rule_biases: str
    num_beams: str
    num_candidates: str
    beam_indices: str
    is_reserve: str


@dataclass(frozen=True)
class BeamBatchValues:
    """The names of values that are constant while the same sentences are in the batch.

    size: int64 [1], B. places: int64 [B, 1], the indices of the sentences. per_beam_shape, flat_shape: int64,
    the shapes [B, -1, C] and [B, -1]. padding: int64 [B, N, 1], padding.
    """

    size: str
    places: str
    per_beam_shape: str
    flat_shape: str
    padding: str


class BeamStep:
    """One step of beam search, in the graph `b`; `count` is its number, int64 scalar."""

    def __init__(self, b: GraphBuilder, count: str, search: BeamSearchValues, batch: BeamBatchValues) -> None:
        self.b, self.count, self.search, self.batch = b, count, search, batch
        self.new = b.op("Add", count, b.const(1))  # tokens after the prompt, including this one
        self.out = b.const(EXCLUDED_SCORE, np.float32)

    def candidate_scores(self, logits: str, now: BeamValues, mask: str | None) -> str:
        """Return float32 [B, N * C]: the score of each text with each next token."""
        b, search, batch = self.b, self.search, self.batch
        scores = b.op("LogSoftmax", logits, axis=-1)
        rule = step_rule(b, search.rules, self.count, search.rule_biases)

        def by_words(inside: GraphBuilder) -> str:
            # in the first step R = B: all beams are equal, so the first is used for all
            rows = inside.row_count(logits)
            each = inside.op("Div", rows, batch.size)
            texts = inside.op("Slice", now.texts, inside.const([0]), each, inside.const([1]))
            table = inside.op("Concat", rows, inside.op("Shape", texts, start=2), axis=0)
            flat = inside.op("Reshape", texts, table)
            if search.token_ids is None:
                return inside.op("Add", apply_history_rules(inside, scores, flat, mask), rule.biases)
            every = scatter_to_vocabulary(inside, scores, search.token_ids, search.vocabulary)
            found = inside.op(
                "Gather", apply_history_rules(inside, every, flat, mask), search.token_ids, axis=1
            )
            return inside.op("Add", found, rule.biases)

        ruled = b.if_else(
            "text_rules", by_words, lambda i: i.op("Add", scores, rule.biases), np.float32, (None, None)
        )
        # each branch computes the sum itself: a value passed through a branch would be copied
        before = b.op("Unsqueeze", now.scores, b.const([2]))

        def added(inside: GraphBuilder, scores: str) -> str:
            return inside.op("Add", inside.op("Reshape", scores, batch.per_beam_shape), before)

        def as_ruled(inside: GraphBuilder) -> str:
            return inside.if_else(
                "renormalize_logits", lambda i: added(i, i.op("LogSoftmax", ruled, axis=-1)),
                lambda i: added(i, ruled), np.float32, (None, None, None),
            )  # fmt: skip

        forced = b.op("GreaterOrEqual", rule.forced_token(b), b.const(0))
        sums = b.if_else(
            forced, lambda i: i.op("Add", rule.biases, before), as_ruled, np.float32, (None, None, None)
        )
        return b.op("Reshape", sums, batch.flat_shape)

    def select_candidates(self, totals: str, now: BeamValues, logits: str) -> tuple[str, list[str], str, str]:
        """Return whether all end, the parts of the next `Beams`, ids [R, 1], and each row's source row."""
        b, search, batch = self.b, self.search, self.batch
        scores, places = b.ops("TopK", totals, search.num_candidates, outputs=2, axis=1)
        v = b.dimension(search.token_ids, 0) if search.token_ids else b.const(search.vocabulary)
        came, tokens = b.op("Div", places, v), b.op("Mod", places, v)
        tokens = b.op("Gather", search.token_ids, tokens, axis=0) if search.token_ids else tokens
        candidates = b.op(
            "Concat", self._gather_texts(now.texts, came), b.op("Unsqueeze", tokens, b.const([2])), axis=2
        )
        last = b.op("Equal", self.new, "max_new_tokens")
        stop = b.op("Or", is_eos(b, search.rules, tokens), last)
        # the best candidates that did not end continue
        going, order = b.ops("TopK", self._exclude(scores, stop), search.num_beams, outputs=2, axis=1)
        texts = self._gather_texts(candidates, order)
        chosen = b.op("GatherElements", came, order, axis=1)
        finished = self._finished(now, candidates, scores, stop)
        improvable = b.op("And", now.improvable, self._could_improve(going, finished))
        ids = b.op("Reshape", b.op("GatherElements", tokens, order, axis=1), b.const([-1, 1]))
        each = b.op("Div", b.row_count(logits), batch.size)
        own = b.op("Min", chosen, b.op("Sub", each, b.const([1])))
        old = b.op("Reshape", b.op("Add", b.op("Mul", batch.places, each), own), b.const([-1]))
        return b.all_of(stop), [texts, going, *finished, improvable], ids, old

    def _gather_texts(self, texts: str, places: str) -> str:
        """Return [B, K, T]: the texts of [B, N, T] at the indices [B, K]."""
        return self.b.op("GatherND", texts, self.b.op("Unsqueeze", places, self.b.const([2])), batch_dims=1)

    def _exclude(self, scores: str, where: str) -> str:
        """Exclude `scores` where `where` is true."""
        return self.b.op("Where", where, self.b.op("Add", scores, self.out), scores)

    def _finished(self, now: BeamValues, candidates: str, scores: str, stop: str) -> list[str]:
        """Insert candidates that have just ended into the finished texts if they are better."""
        b, search, batch = self.b, self.search, self.batch
        not_ended = b.op("Or", b.op("Not", stop), search.is_reserve)
        worth = b.op("Div", scores, self._penalty(self.new))
        full = b.op("And", "early_stopping", b.all_of(now.ended, [1], keep=True))
        for lost in (full, b.op("Not", now.improvable), not_ended):
            worth = self._exclude(worth, lost)
        merged = b.op("Concat", now.finished_scores, worth, axis=1)
        best, order = b.ops("TopK", merged, search.num_beams, outputs=2, axis=1)
        texts = b.op("Concat", b.op("Concat", now.finished, batch.padding, axis=2), candidates, axis=1)
        ended = b.op("Concat", now.ended, b.op("Not", not_ended), axis=1)
        return [self._gather_texts(texts, order), best, b.op("GatherElements", ended, order, axis=1)]

    def _could_improve(self, going: str, finished: Sequence[str]) -> str:
        """Return bool [B, 1]: whether the best running beam may still beat the worst finished text."""
        b = self.b
        _, scores, ended = finished
        length = b.op("Where", "never_stop_early", "max_new_tokens", self.new)
        best = b.op("Slice", going, b.const([0]), b.const([1]), b.const([1]))
        possible = b.op("Div", best, self._penalty(length))
        worst = b.op("Where", ended, b.op("ReduceMin", scores, b.const([1]), keepdims=1), self.out)
        return b.any_of(b.op("Greater", possible, worst), [1], keep=True)

    def _penalty(self, length: str) -> str:
        """Return float32: `length` to the power of the length penalty, the divisor of the sum."""
        b = self.b
        return b.cast(b.op("Pow", b.cast(length, np.float64), "length_penalty"), np.float32)


def settled_sentences(b: GraphBuilder, beams: BeamValues) -> str:
    """Return bool [B]: which sentences are finished, because no running beam can beat their texts."""
    full = b.op("And", "early_stopping", b.all_of(beams.ended, [1]))
    return b.op("Or", full, b.op("Not", b.op("Squeeze", beams.improvable, b.const([1]))))
