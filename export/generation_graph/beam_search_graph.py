"""Beam search as a loop of a graph, with the same steps as `smelt.runtime.generate.beam_search`.

Shapes: B = sentences, N = beams, R = rows of a step, K = candidates kept in a step, P = prompt, T = tokens
so far, V = vocabulary, C = tokens that are scored, which are V unless there is a shortlist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from smelt.export.generation_graph.beam_step import (
    EXCLUDED_SCORE,
    BeamBatchValues,
    BeamSearchValues,
    BeamStep,
    BeamValues,
    settled_sentences,
)
from smelt.export.generation_graph.graph_builder import GraphBuilder, LoopCarried
from smelt.export.generation_graph.hoist_nodes import GraphLevel
from smelt.export.generation_graph.rule_nodes import prepare_rules
from smelt.export.generation_graph.step_model import StepModel

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
    count = b.op("Squeeze", b.row_count("input_ids"), b.const([0]))
    carried = [
        LoopCarried("steps_done", b.const(0), np.int64, ()),
        LoopCarried("all_texts", source.prompt, np.int64, (None, None)),
        LoopCarried("places", b.op("Range", b.const(0), count, b.const(1)), np.int64, (None,)),
        *parts,
        *source.shared,
        LoopCarried("ids", source.ids, np.int64, (None, None)),
        *source.caches,
        *source.extra_state,
    ]

    def phase(b: GraphBuilder, unused: str, names: list[str]) -> tuple[str, list[str]]:
        before, all_texts, places, *rest = names
        texts, rest = rest[: len(parts)], rest[len(parts) :]
        shared, state = rest[: len(source.shared)], rest[len(source.shared) :]
        inner = _BeamPhase([root, GraphLevel(b)], source, search, before, shared)
        over, texts, state = inner.add_loop([*parts, *carried[-len(state) :]], texts, state)
        now = BeamValues(*texts)
        taken = b.op("Sub", b.dimension(now.texts, 2), b.dimension(all_texts, 1))
        all_texts = _write_finished(b, all_texts, places, now.finished, taken)
        kept = b.op("Squeeze", b.op("NonZero", b.op("Not", settled_sentences(b, now))), b.const([0]))
        left = [b.op("Gather", name, kept, axis=0) for name in (places, *texts, *shared)]
        rows = b.op(
            "Add", b.op("Mul", b.op("Unsqueeze", kept, b.const([1])), search.num_beams), search.beam_indices
        )
        rows = b.op("Reshape", rows, b.const([-1]))
        left += [b.op("Gather", name, rows, axis=0) for name in state]
        again = b.op("And", b.op("Greater", b.dimension(kept, 0), b.const(0)), b.op("Not", over))
        return again, [b.op("Add", before, taken), all_texts, *left]

    # attention and reshapes fail on a batch without rows, so it runs no step
    trips = b.op("Mul", "max_new_tokens", b.op("Min", count, b.const(1)))
    return b.loop("phases", trips, carried, phase)[1]


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
    ) -> tuple[str, list[str], list[str]]:
        """Append the loop; return whether the search is over (bool scalar), and the new texts and state.

        Args:
            carried: the values passed from step to step.
            texts: of `Beams`.
            state: ids, caches and extra of the source.
        """
        source, b = self.source, self.levels[-1].builder
        batch = _batch_values(b, self.search, texts[0])
        # when this many sentences are finished, they are removed
        enough = b.op("Max", b.op("Div", batch.size, b.const([8])), b.const([1]))
        enough = b.op("Squeeze", enough, b.const([0]))
        firsts = [replace(one, initial=name) for one, name in zip(carried, (*texts, *state), strict=True)]

        def body(b: GraphBuilder, count: str, names: list[str]) -> tuple[str, list[str]]:
            now, (_, ids, *rest) = BeamValues(*names[: len(texts)]), names[len(texts) :]
            caches, extra = rest[: len(source.caches)], rest[len(source.caches) :]
            found = source.add_step(
                [*self.levels, GraphLevel(b)], ids, caches, extra, (1, self.shared), beams=True
            )
            mask = extra[0] if source.mask else None
            step = BeamStep(b, b.op("Add", count, self.before), self.search, batch)
            totals = step.candidate_scores(found.logits, now, mask)
            over, after, ids, old = step.select_candidates(totals, now, found.logits)
            moved = [b.op("Gather", name, old, axis=0) for name in (*found.caches, *found.extra_state)]
            gone = b.op("ReduceSum", b.cast(settled_sentences(b, BeamValues(*after)), np.int64), keepdims=0)
            again = b.op("And", b.op("Less", gone, enough), b.op("Not", over))
            return again, [*after, over, ids, *moved]

        over = LoopCarried("over", b.const(False, np.bool_), np.bool_, ())
        whole = [*firsts[: len(texts)], over, *firsts[len(texts) :]]
        trips = b.op("Sub", "max_new_tokens", self.before)
        found = b.loop("beams", trips, whole, body)
        return found[len(texts)], found[: len(texts)], found[len(texts) + 1 :]


def _write_finished(b: GraphBuilder, all_texts: str, places: str, finished: str, taken: str) -> str:
    """Return int64 [all, T]: `all_texts`, `taken` tokens longer, with the best finished ones at `places`."""
    block = b.op("Concat", b.row_count(all_texts), b.op("Unsqueeze", taken, b.const([0])), axis=0)
    wide = b.op("Concat", all_texts, b.op("Expand", "pad_token_id", block), axis=1)
    best = b.op("Gather", finished, b.const(0), axis=1)
    return b.op("ScatterND", wide, b.op("Unsqueeze", places, b.const([1])), best)


def _search_values(b: GraphBuilder, source: StepModel, vocabulary: int) -> BeamSearchValues:
    words, one = source.shortlist_ids, b.const(1)
    n = b.op("Unsqueeze", "num_beams", b.const([0]))
    # enough that N remain even if all others end
    each = b.op("Max", b.op("Add", b.row_count("eos_token_ids"), b.const([1])), b.const([2]))
    kept = b.op("Mul", n, b.op("Min", each, b.row_count(words) if words else b.const([vocabulary])))
    place = b.op("Range", b.const(0), b.op("Squeeze", kept, b.const([0])), one)
    return BeamSearchValues(
        vocabulary, words, prepare_rules(b, vocabulary),
        b.op("Gather", "rule_biases", words, axis=1) if words else "rule_biases", n, kept,
        beam_indices=b.op("Range", b.const(0), "num_beams", one),
        is_reserve=b.op("GreaterOrEqual", place, n),
    )  # fmt: skip


def _batch_values(b: GraphBuilder, search: BeamSearchValues, texts: str) -> BeamBatchValues:
    size, words = b.row_count(texts), search.token_ids
    count = b.op("Range", b.const(0), b.op("Squeeze", size, b.const([0])), b.const(1))
    # [-1, C]
    scores = [b.const([-1]), b.row_count(words)] if words else [b.const([-1, search.vocabulary])]
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
    others = b.op("Greater", b.op("Range", b.const(0), "num_beams", b.const(1)), b.const(0))
    out, zero = b.const(EXCLUDED_SCORE, np.float32), b.const(0, np.float32)
    scores = b.op("Expand", b.op("Where", others, out, zero), table)
    none = b.op("Expand", b.const(False, np.bool_), table)
    all_may = b.op("Expand", b.const([[True]], np.bool_), b.op("Concat", batch, b.const([1]), axis=0))
    return [
        LoopCarried("running", texts, np.int64, (None, None, None)),
        LoopCarried("scores", scores, np.float32, (None, None)),
        LoopCarried("finished", texts, np.int64, (None, None, None)),
        LoopCarried("finished_scores", b.op("Expand", out, table), np.float32, (None, None)),
        LoopCarried("ended", none, np.bool_, (None, None)),
        LoopCarried("improvable", all_may, np.bool_, (None, 1)),
    ]
