"""Beam search as a loop of a graph, with the same steps as `smelt.generation.search`.

`BeamStep` is one step: scores of the candidates, and which texts continue or end.

Shapes: B = sentences, N = beams, R = rows of a step, K = candidates kept in a step, P = prompt, T = tokens
so far, V = vocabulary, C = tokens that are scored, which are V unless there is a shortlist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from smelt.export.generation_graph.beam_attention import (
    SentenceState,
    keep_read_keys,
    next_table,
    own_keys,
)
from smelt.export.generation_graph.graph_builder import (
    GraphBuilder,
    GraphLevel,
    LoopCarried,
    RuleTables,
    StepRule,
    apply_history_rules,
    is_eos,
    prepare_rules,
    scatter_to_vocabulary,
    step_rule,
)
from smelt.export.generation_graph.step_model import StepModel, StepOutputs

EXCLUDED_SCORE = -1e9
"""The score of excluded candidates."""


@dataclass
class BeamValues:
    """The names of a beam search's values; texts and finished are int64 [B, N, T], scores float32 [B, N].

    finished_scores: best first; `EXCLUDED_SCORE` where a place holds no text. unsettled: bool [B, 1], whether
    a running beam may still beat a finished text.
    """

    texts: str
    scores: str
    finished: str
    finished_scores: str
    unsettled: str


@dataclass(frozen=True)
class BeamSearchValues:
    """The names of values that are constant over all steps.

    token_ids: int64 [C], the token of each score; None if C is V. num_scores: int64 scalar, C. rule_biases:
    of the rules, float32 [rules, C]. num_beams, num_candidates: int64 [1], N and K. beam_indices: int64 [N].
    may_end: bool [K]; the other candidates only continue. num_row_candidates: int64 [1], K and the largest
    number of excluded tokens. changes_order: bool [rules], whether scores change otherwise than by exclusion.
    last_step: int64 scalar. penalties, best_penalties: float32 [steps], the divisor of the sum after each
    step, and the best one that a running beam may still reach. stop_early_at: float32 scalar; a sentence is
    settled when its worst finished score is higher.
    """

    vocabulary: int
    token_ids: str | None
    num_scores: str
    rules: RuleTables
    rule_biases: str
    num_beams: str
    num_candidates: str
    beam_indices: str
    may_end: str
    num_row_candidates: str
    changes_order: str
    last_step: str
    penalties: str
    best_penalties: str
    stop_early_at: str


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
    """One step of beam search, in the graph `b`; `count` is its number, int64 scalar.

    For few sentences most of the time of a step is the number of its nodes, not their work.
    """

    def __init__(self, b: GraphBuilder, count: str, search: BeamSearchValues, batch: BeamBatchValues) -> None:
        self.b, self.count, self.search, self.batch = b, count, search, batch
        self.out = b.const(EXCLUDED_SCORE, np.float32)

    def top_candidates(self, logits: str, now: BeamValues, mask: str | None) -> tuple[str, str]:
        """Return the best candidates' scores, float32 [B, K], and their indices in [N * C], int64 [B, K].

        Unless rules depend on the text, each text's best tokens are selected first, so that rules and earlier
        scores are added to few numbers. This gains little with a shortlist, and is then not done.

        Args:
            logits: float32 [B, R / B, C].
            now: the beams.
            mask: int64 [R, T], 0 where a text's prompt is padded; None if it never is.
        """
        b, search = self.b, self.search
        scores = b.op("LogSoftmax", logits, axis=-1)
        rule = step_rule(b, search.rules, self.count, search.rule_biases)

        def of_all(inside: GraphBuilder) -> list[str]:
            return self._best_of_all(inside, self._ruled_totals(inside, scores, now, mask, rule))

        def of_excluding_rules(inside: GraphBuilder) -> list[str]:
            if search.token_ids is None:
                return self._best_of_each_text(inside, scores, now, rule)
            ruled = inside.op("Add", scores, rule.biases)
            return self._best_of_all(inside, self._totals(inside, ruled, now))

        types = [(np.float32, (None, None)), (np.int64, (None, None))]
        needs_all = b.op("Gather", search.changes_order, rule.number, axis=0)
        best, indices = b.if_else_values(needs_all, of_all, of_excluding_rules, types)
        return best, indices

    def _best_of_all(self, b: GraphBuilder, totals: str) -> list[str]:
        """Return `top_candidates` of float32 [B, N, C]."""
        flat = b.op("Reshape", totals, self.batch.flat_shape)
        return b.ops("TopK", flat, self.search.num_candidates, outputs=2, axis=1)

    def _totals(self, b: GraphBuilder, scores: str, now: BeamValues) -> str:
        """Return float32 [B, N, C]: the scores of texts with their next tokens."""
        return b.op("Add", scores, b.op("Unsqueeze", now.scores, b.const([2])))

    def _best_of_each_text(self, b: GraphBuilder, scores: str, now: BeamValues, rule: StepRule) -> list[str]:
        """Return `top_candidates` if rules only exclude tokens."""
        search, batch = self.search, self.batch
        text_scores, tokens = b.ops("TopK", scores, search.num_row_candidates, outputs=2, axis=2)
        totals = self._totals(b, b.op("Add", text_scores, b.op("Gather", rule.biases, tokens, axis=0)), now)
        best, order = self._best_of_all(b, totals)
        # in the first step all beams have the tokens of one row
        tokens = b.op("Expand", tokens, b.op("Shape", totals))
        tokens = b.op("GatherElements", b.op("Reshape", tokens, batch.flat_shape), order, axis=1)
        beams = b.op("Div", order, search.num_row_candidates)
        return [best, b.op("Add", b.op("Mul", beams, search.num_scores), tokens)]

    def _ruled_totals(
        self, b: GraphBuilder, scores: str, now: BeamValues, mask: str | None, rule: StepRule
    ) -> str:
        """Return float32 [B, N, C]: the score of each text with each next token, with any rule."""
        search, batch = self.search, self.batch

        def by_words(inside: GraphBuilder) -> str:
            # in the first step R = B: all beams are equal, so the first is used for all
            rows = inside.op("Reshape", scores, inside.op("Concat", inside.const([-1]), width, axis=0))
            rows_per_text = inside.op("Shape", scores, start=1, end=2)
            texts = inside.op("Slice", now.texts, inside.const([0]), rows_per_text, inside.const([1]))
            length = inside.op("Shape", texts, start=2)
            flat = inside.op("Reshape", texts, inside.op("Concat", inside.const([-1]), length, axis=0))
            if search.token_ids is None:
                ruled = apply_history_rules(inside, rows, flat, mask)
            else:
                every = scatter_to_vocabulary(inside, rows, search.token_ids, search.vocabulary)
                ruled = inside.op(
                    "Gather", apply_history_rules(inside, every, flat, mask), search.token_ids, axis=1
                )
            return inside.op("Reshape", ruled, batch.per_beam_shape)

        width = b.op("Shape", scores, start=2)
        shape = (None, None, None)
        # an If copies what a branch passes through
        ruled = b.if_else(
            "text_rules",
            lambda i: i.op("Add", by_words(i), rule.biases),
            lambda i: i.op("Add", scores, rule.biases),
            np.float32,
            shape,
        )
        processed = b.if_else(
            "renormalize_logits",
            lambda i: self._totals(i, i.op("LogSoftmax", ruled, axis=-1), now),
            lambda i: self._totals(i, ruled, now),
            np.float32,
            shape,
        )
        forced = b.op("GreaterOrEqual", rule.forced_token(b), b.const(0))
        return b.if_else(
            forced,
            lambda i: self._totals(i, rule.biases, now),
            lambda i: i.op("Identity", processed),
            np.float32,
            shape,
        )

    def select_candidates(self, scores: str, indices: str, now: BeamValues) -> tuple[list[str], str, str]:
        """Return the values of the next `BeamValues`, ids [B, N], and each beam's parent [B, N].

        In the first step R = B: the parent is then the only row of the sentence.
        """
        b, search = self.b, self.search
        source_beams = b.op("Div", indices, search.num_scores)
        tokens = b.op("Mod", indices, search.num_scores)
        tokens = b.op("Gather", search.token_ids, tokens, axis=0) if search.token_ids else tokens
        candidates = b.op(
            "Concat",
            self.gather_texts(now.texts, source_beams),
            b.op("Unsqueeze", tokens, b.const([2])),
            axis=2,
        )
        stop = b.op("Or", is_eos(b, search.rules, tokens), b.op("Equal", self.count, search.last_step))
        # the best candidates that did not end continue
        running = b.op("Where", stop, b.op("Add", scores, self.out), scores)
        running_scores, order = b.ops("TopK", running, search.num_beams, outputs=2, axis=1)
        texts = self.gather_texts(candidates, order)
        finished, finished_scores = self._finished(now, candidates, scores, stop)
        unsettled = b.op("And", now.unsettled, self._could_improve(running_scores, finished_scores))
        # in the first step there is one row per sentence
        most = b.op("Mul", self.count, search.num_beams)
        parents = b.op("Min", b.op("GatherElements", source_beams, order, axis=1), most)
        ids = b.op("GatherElements", tokens, order, axis=1)
        return [texts, running_scores, finished, finished_scores, unsettled], ids, parents

    def next_state(self, outputs: StepOutputs, ids: str, parents: str, own_table: str) -> list[str]:
        """Return the next state of sentences, ids and state of rows; beams continue `parents` [B, N]."""
        b, batch = self.b, self.batch
        rows: list[str] = [*outputs.caches, *outputs.extra_state]
        if rows:
            rows_per_text = b.op("Shape", outputs.logits, start=1, end=2)
            sources = b.op("Add", b.op("Mul", batch.places, rows_per_text), parents)
            sources = b.op("Reshape", sources, b.const([-1]))
            rows = [b.op("Gather", name, sources, axis=0) for name in rows]
        tables = [next_table(b, name, parents, own_table) for name in outputs.sentence_state[:1]]
        ids = b.op("Reshape", ids, b.const([-1, 1]))
        return [*tables, *outputs.sentence_state[1:], ids, *rows]

    def gather_texts(self, texts: str, places: str) -> str:
        """Return [B, K, T]: the texts of [B, N, T] at the indices [B, K]."""
        return self.b.op("GatherND", texts, self.b.op("Unsqueeze", places, self.b.const([2])), batch_dims=1)

    def _finished(self, now: BeamValues, candidates: str, scores: str, stop: str) -> tuple[str, str]:
        """Insert candidates that have just ended into the finished texts if they are better.

        No score is above 0, so no other candidate is better than a place without text.
        """
        b, search = self.b, self.search
        ends = b.op("And", b.op("And", stop, search.may_end), now.unsettled)
        penalized = b.op("Div", scores, b.op("Gather", search.penalties, self.count, axis=0))
        all_scores = b.op("Concat", now.finished_scores, b.op("Where", ends, penalized, self.out), axis=1)
        best, order = b.ops("TopK", all_scores, search.num_beams, outputs=2, axis=1)
        texts = b.op("Concat", b.op("Concat", now.finished, self.batch.padding, axis=2), candidates, axis=1)
        return self.gather_texts(texts, order), best

    def _could_improve(self, running_scores: str, finished_scores: str) -> str:
        """Return bool [B, 1]: whether the best running beam may still beat the worst finished text."""
        b, search = self.b, self.search
        best = b.op("Slice", running_scores, b.const([0]), b.const([1]), b.const([1]))
        possible = b.op("Div", best, b.op("Gather", search.best_penalties, self.count, axis=0))
        worst = b.op("Slice", finished_scores, b.const([-1]), b.const([2**31]), b.const([1]))
        return b.op("And", b.op("Greater", possible, worst), b.op("LessOrEqual", worst, search.stop_early_at))


# inputs of a graph with beam search, in addition to those of the rules
BEAM_SEARCH_INPUTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "num_beams": (np.int64, ()),
    "length_penalty": (np.float64, ()),
    "early_stopping": (np.bool_, ()),  # stop as soon as there are as many texts as beams
    "never_stop_early": (np.bool_, ()),  # compare with the longest possible text
    "renormalize_logits": (np.bool_, ()),
}


def add_beam_search(root: GraphLevel, source: StepModel, vocabulary: int) -> str:
    """Append beam search; return int64 [B, T], each row's prompt and the new tokens of its best text.

    A sentence is finished when no running beam can beat its finished texts; the beams of finished sentences
    are removed from the batch once they are an eighth of it. So there are two loops: the outer one runs once
    for each composition of the batch.

    Args:
        root: the outermost graph.
        source: the model.
        vocabulary: V.
    """
    b = root.builder
    search = _search_values(b, source, vocabulary)
    parts = _initial_beams(b, source.prompt)
    count = b.op("Squeeze", b.row_count(source.source), b.const([0]))
    loop_values = [
        LoopCarried("steps_done", b.const(0), np.int64, ()),
        LoopCarried("all_texts", source.prompt, np.int64, (None, None)),
        LoopCarried("places", b.op("Range", b.const(0), count, b.const(1)), np.int64, (None,)),
        *parts,
        *source.shared,
        *source.sentence_state,
        LoopCarried("ids", source.ids, np.int64, (None, None)),
        *source.caches,
        *source.extra_state,
    ]

    def phase(b: GraphBuilder, unused: str, names: list[str]) -> tuple[str, list[str]]:
        num_steps, all_texts, text_indices, *carried_values = names
        texts, carried_values = carried_values[: len(parts)], carried_values[len(parts) :]
        shared, state = carried_values[: len(source.shared)], carried_values[len(source.shared) :]
        inner = _BeamPhase([root, GraphLevel(b)], source, search, num_steps, shared)
        texts, state = inner.add_loop([*parts, *loop_values[-len(state) :]], texts, state)
        beam_values = BeamValues(*texts)
        steps_taken = b.op("Sub", b.dimension(beam_values.texts, 2), b.dimension(all_texts, 1))
        all_texts = _write_finished(b, all_texts, text_indices, beam_values.finished, steps_taken)
        unfinished = _unsettled_sentences(b, beam_values)
        next_values = [b.op("Gather", name, unfinished, axis=0) for name in (text_indices, *texts, *shared)]
        next_values += _keep_sentences(b, source, search, state, unfinished)
        num_steps = b.op("Add", num_steps, steps_taken)
        any_unfinished = b.op("Greater", b.dimension(unfinished, 0), b.const(0))
        should_continue = b.op("And", any_unfinished, b.op("Less", num_steps, "max_new_tokens"))
        return should_continue, [num_steps, all_texts, *next_values]

    # attention and reshapes fail on a batch without rows, so it runs no step
    max_trips = b.op("Mul", "max_new_tokens", b.op("Min", count, b.const(1)))
    return b.loop("phases", max_trips, loop_values, phase)[1]


def _unsettled_sentences(b: GraphBuilder, beams: BeamValues) -> str:
    """Return int64 [n]: the indices of the sentences that a running beam may still improve."""
    is_unsettled = b.op("Squeeze", beams.unsettled, b.const([1]))
    return b.op("Squeeze", b.op("NonZero", is_unsettled), b.const([0]))


def _keep_sentences(
    b: GraphBuilder, source: StepModel, search: BeamSearchValues, state: Sequence[str], sentences: str
) -> list[str]:
    """Return the state of the `sentences` int64 [n]; `state`: of all sentences, then of all rows."""
    first_rows = b.op("Mul", b.op("Unsqueeze", sentences, b.const([1])), search.num_beams)
    rows = b.op("Reshape", b.op("Add", first_rows, search.beam_indices), b.const([-1]))
    count = len(source.sentence_state)
    kept_state = [b.op("Gather", name, rows, axis=0) for name in state[count:]]
    if not count:
        return kept_state
    heads = [value.shape[1] or 0 for value in source.sentence_state[1:]]
    return keep_read_keys(b, state[0], state[1:count], heads, sentences) + kept_state


@dataclass(frozen=True)
class _BeamPhase:
    """Steps with the same sentences in the batch. levels: the graphs around a step; shared: at the last one.

    before: int64 scalar, steps of earlier phases.
    """

    levels: list[GraphLevel]
    source: StepModel
    search: BeamSearchValues
    before: str
    shared: Sequence[str]

    def add_loop(
        self, carried: Sequence[LoopCarried], texts: Sequence[str], state: Sequence[str]
    ) -> tuple[list[str], list[str]]:
        """Append the loop; return the new texts and state.

        Args:
            carried: the values passed from step to step.
            texts: of `BeamValues`.
            state: of sentences, ids, caches and extra of the source.
        """
        source, b = self.source, self.levels[-1].builder
        batch = _batch_values(b, self.search, texts[0])
        own_table = own_keys(b, batch.size, self.search.num_beams) if source.sentence_state else ""
        # when an eighth of the sentences is finished, they are removed
        finished_part = b.op("Max", b.op("Div", batch.size, b.const([8])), b.const([1]))
        most_unsettled = b.op("Squeeze", b.op("Sub", batch.size, finished_part), b.const([0]))
        initial_values = [
            replace(state_value, initial=name)
            for state_value, name in zip(carried, (*texts, *state), strict=True)
        ]

        def body(b: GraphBuilder, count: str, names: list[str]) -> tuple[str, list[str]]:
            beam_values, carried_values = BeamValues(*names[: len(texts)]), names[len(texts) :]
            step = BeamStep(b, b.op("Add", count, self.before), self.search, batch)
            sentences = SentenceState(
                step.count, batch.per_beam_shape, carried_values[: len(source.sentence_state)]
            )
            ids, *carried_values = carried_values[len(source.sentence_state) :]
            caches, extra_state = carried_values[: len(source.caches)], carried_values[len(source.caches) :]
            step_outputs = source.add_step(
                [*self.levels, GraphLevel(b)], ids, caches, extra_state, (1, self.shared), sentences
            )
            mask = extra_state[0] if source.mask else None
            scores, indices = step.top_candidates(step_outputs.logits, beam_values, mask)
            next_values, ids, parents = step.select_candidates(scores, indices, beam_values)
            next_state = step.next_state(step_outputs, ids, parents, own_table)
            num_unsettled = b.op("ReduceSum", b.cast(next_values[-1], np.int64), keepdims=0)
            return b.op("Greater", num_unsettled, most_unsettled), [*next_values, *next_state]

        max_trips = b.op("Sub", "max_new_tokens", self.before)
        loop_outputs = b.loop("beams", max_trips, initial_values, body)
        return loop_outputs[: len(texts)], loop_outputs[len(texts) :]


def _write_finished(b: GraphBuilder, all_texts: str, places: str, finished: str, taken: str) -> str:
    """Return int64 [all, T]: `all_texts`, `taken` tokens longer, with the best finished ones at `places`."""
    block = b.op("Concat", b.row_count(all_texts), b.op("Unsqueeze", taken, b.const([0])), axis=0)
    padded = b.op("Concat", all_texts, b.op("Expand", "pad_token_id", block), axis=1)
    best = b.op("Gather", finished, b.const(0), axis=1)
    return b.op("ScatterND", padded, b.op("Unsqueeze", places, b.const([1])), best)


def _search_values(b: GraphBuilder, source: StepModel, vocabulary: int) -> BeamSearchValues:
    token_ids, one_constant = source.shortlist_ids, b.const(1)
    n = b.op("Unsqueeze", "num_beams", b.const([0]))
    # enough that N remain even if all others end
    candidates_per_beam = b.op("Max", b.op("Add", b.row_count("eos_token_ids"), b.const([1])), b.const([2]))
    num_candidates = b.op(
        "Mul",
        n,
        b.op("Min", candidates_per_beam, b.row_count(token_ids) if token_ids else b.const([vocabulary])),
    )
    candidate_index = b.op("Range", b.const(0), b.op("Squeeze", num_candidates, b.const([0])), one_constant)
    is_forced = b.op("GreaterOrEqual", "forced_tokens", b.const(0))
    out, infinity = b.const(EXCLUDED_SCORE, np.float32), b.const(np.inf, np.float32)
    lengths = b.op("Range", one_constant, b.op("Add", "max_new_tokens", one_constant), one_constant)
    penalties = _penalty(b, lengths)
    return BeamSearchValues(
        vocabulary, token_ids, b.dimension(token_ids, 0) if token_ids else b.const(vocabulary),
        prepare_rules(b, vocabulary),
        b.op("Gather", "rule_biases", token_ids, axis=1) if token_ids else "rule_biases", n, num_candidates,
        beam_indices=b.op("Range", b.const(0), "num_beams", one_constant),
        may_end=b.op("Less", candidate_index, n),
        num_row_candidates=_num_row_candidates(b, num_candidates, vocabulary),
        changes_order=b.op("Or", b.op("Or", "text_rules", "renormalize_logits"), is_forced),
        last_step=b.op("Sub", "max_new_tokens", one_constant),
        penalties=penalties,
        best_penalties=b.op("Where", "never_stop_early", _penalty(b, "max_new_tokens"), penalties),
        stop_early_at=b.op("Where", "early_stopping", out, infinity),
    )  # fmt: skip


def _penalty(b: GraphBuilder, lengths: str) -> str:
    """Return float32: `lengths` to the power of the length penalty, the divisor of a sum of scores."""
    return b.cast(b.op("Pow", b.cast(lengths, np.float64), "length_penalty"), np.float32)


def _num_row_candidates(b: GraphBuilder, num_candidates: str, vocabulary: int) -> str:
    """Return int64 [1]: how many best tokens of a text include its K best ones that are not excluded."""
    is_excluded = b.cast(b.op("Not", b.op("Equal", "rule_biases", b.const(0, np.float32))), np.int64)
    by_rule = b.op("ReduceSum", is_excluded, b.const([1]), keepdims=0)
    # where a token is forced, all scores are computed
    by_rule = b.op("Where", b.op("Less", "forced_tokens", b.const(0)), by_rule, b.const(0))
    largest = b.op("ReduceMax", by_rule, b.const([0]), keepdims=1)
    return b.op("Min", b.op("Add", num_candidates, largest), b.const([vocabulary]))


def _batch_values(b: GraphBuilder, search: BeamSearchValues, texts: str) -> BeamBatchValues:
    size, token_ids = b.row_count(texts), search.token_ids
    count = b.op("Range", b.const(0), b.op("Squeeze", size, b.const([0])), b.const(1))
    # [-1, C]
    scores = [b.const([-1]), b.row_count(token_ids)] if token_ids else [b.const([-1, search.vocabulary])]
    return BeamBatchValues(
        size,
        places=b.op("Unsqueeze", count, b.const([1])),
        per_beam_shape=b.op("Concat", size, *scores, axis=0),
        flat_shape=b.op("Concat", size, b.const([-1]), axis=0),
        padding=b.op("Expand", "pad_token_id", b.op("Concat", size, search.num_beams, b.const([1]), axis=0)),
    )


def _initial_beams(b: GraphBuilder, prompt: str) -> list[LoopCarried]:
    """Return the parts of the `Beams` of the first step."""
    batch, n = b.row_count(prompt), b.op("Unsqueeze", "num_beams", b.const([0]))
    table = b.op("Concat", batch, n, axis=0)
    length = b.op("Shape", prompt, start=1, end=2)
    texts = b.op("Expand", b.op("Unsqueeze", prompt, b.const([1])), b.op("Concat", batch, n, length, axis=0))
    # otherwise all beams would be identical
    later_beams = b.op("Greater", b.op("Range", b.const(0), "num_beams", b.const(1)), b.const(0))
    out, zero = b.const(EXCLUDED_SCORE, np.float32), b.const(0, np.float32)
    scores = b.op("Expand", b.op("Where", later_beams, out, zero), table)
    all_unsettled = b.op("Expand", b.const([[True]], np.bool_), b.op("Concat", batch, b.const([1]), axis=0))
    return [
        LoopCarried("running", texts, np.int64, (None, None, None)),
        LoopCarried("scores", scores, np.float32, (None, None)),
        LoopCarried("finished", texts, np.int64, (None, None, None)),
        LoopCarried("finished_scores", b.op("Expand", out, table), np.float32, (None, None)),
        LoopCarried("unsettled", all_unsettled, np.bool_, (None, 1)),
    ]
