"""Beam search as a loop of a graph, step for step as `smelt.runtime.generate.beam` does it.

Shapes: B = sentences, N = beams, R = rows of a step, K = candidates kept in a step, P = prompt, T = tokens
so far, V = vocabulary, C = words that are scored, which are V unless there is a shortlist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from smelt.export.loop.beam_step import OUT, Batch, Beams, Search, Step, settled
from smelt.export.loop.builder import Builder, Carried
from smelt.export.loop.place import Level
from smelt.export.loop.rules import prepare_rules
from smelt.export.loop.source import Source

# inputs of a graph that searches with beams, besides those of the rules
BEAM_INPUTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "num_beams": (np.int64, ()),
    "length_penalty": (np.float64, ()),
    "early_stopping": (np.bool_, ()),  # as soon as there are as many texts as beams
    "never_stop_early": (np.bool_, ()),  # ask with the longest text that there may be
    "renormalize_logits": (np.bool_, ()),
}


def beam(root: Level, source: Source, vocabulary: int) -> str:
    """Append beam search; return int64 [B, T], each row's prompt and the new tokens of its best text.

    A sentence whose finished texts nothing can beat any more is settled; the beams of settled sentences leave
    the batch once these are an eighth of it. So there are two loops: the outer one runs once for each make-up
    of the batch.

    Args:
        root: the outermost graph.
        source: the model.
        vocabulary: V.
    """
    b = root.builder
    search = _begin(b, source, vocabulary)
    parts = _nothing_said(b, source.prompt)
    count = b.op("Squeeze", b.rows("input_ids"), b.const([0]))
    carried = [
        Carried("steps_done", b.const(0), np.int64, ()),
        Carried("all_texts", source.prompt, np.int64, (None, None)),
        Carried("places", b.op("Range", b.const(0), count, b.const(1)), np.int64, (None,)),
        *parts,
        *source.shared,
        Carried("ids", source.ids, np.int64, (None, None)),
        *source.caches,
        *source.extra,
    ]

    def phase(b: Builder, unused: str, names: list[str]) -> tuple[str, list[str]]:
        before, all_texts, places, *rest = names
        texts, rest = rest[: len(parts)], rest[len(parts) :]
        shared, state = rest[: len(source.shared)], rest[len(source.shared) :]
        inner = _Phase([root, Level(b)], source, search, before, shared)
        over, texts, state = inner.run([*parts, *carried[-len(state) :]], texts, state)
        now = Beams(*texts)
        taken = b.op("Sub", b.size(now.texts, 2), b.size(all_texts, 1))
        all_texts = _put(b, all_texts, places, now.finished, taken)
        kept = b.op("Squeeze", b.op("NonZero", b.op("Not", settled(b, now))), b.const([0]))
        left = [b.op("Gather", name, kept, axis=0) for name in (places, *texts, *shared)]
        rows = b.op("Add", b.op("Mul", b.op("Unsqueeze", kept, b.const([1])), search.n), search.beams)
        rows = b.op("Reshape", rows, b.const([-1]))
        left += [b.op("Gather", name, rows, axis=0) for name in state]
        again = b.op("And", b.op("Greater", b.size(kept, 0), b.const(0)), b.op("Not", over))
        return again, [b.op("Add", before, taken), all_texts, *left]

    # attention and reshapes fail on a batch without rows: it takes no step
    trips = b.op("Mul", "max_new_tokens", b.op("Min", count, b.const(1)))
    return b.loop("phases", trips, carried, phase)[1]


@dataclass(frozen=True)
class _Phase:
    """Steps with the same sentences in the batch. levels: the graphs around a step; shared: at the last one.

    before: int64 scalar, steps of earlier phases.
    """

    levels: list[Level]
    source: Source
    search: Search
    before: str
    shared: Sequence[str]

    def run(
        self, carried: Sequence[Carried], texts: Sequence[str], state: Sequence[str]
    ) -> tuple[str, list[str], list[str]]:
        """Append the loop; return whether the search is over (bool scalar), and the new texts and state.

        Args:
            carried: what is handed on from step to step.
            texts: of `Beams`.
            state: ids, caches and extra of the source.
        """
        source, b = self.source, self.levels[-1].builder
        batch = _batch(b, self.search, texts[0])
        # as many sentences settled as this, and they leave
        enough = b.op("Max", b.op("Div", batch.size, b.const([8])), b.const([1]))
        enough = b.op("Squeeze", enough, b.const([0]))
        firsts = [replace(one, first=name) for one, name in zip(carried, (*texts, *state), strict=True)]

        def body(b: Builder, count: str, names: list[str]) -> tuple[str, list[str]]:
            now, (_, ids, *rest) = Beams(*names[: len(texts)]), names[len(texts) :]
            caches, extra = rest[: len(source.caches)], rest[len(source.caches) :]
            found = source.step([*self.levels, Level(b)], ids, caches, extra, (1, self.shared), beams=True)
            mask = extra[0] if source.mask else None
            step = Step(b, b.op("Add", count, self.before), self.search, batch)
            totals = step.totals(found.logits, now, mask)
            over, after, ids, old = step.choose(totals, now, found.logits)
            moved = [b.op("Gather", name, old, axis=0) for name in (*found.caches, *found.extra)]
            gone = b.op("ReduceSum", b.cast(settled(b, Beams(*after)), np.int64), keepdims=0)
            again = b.op("And", b.op("Less", gone, enough), b.op("Not", over))
            return again, [*after, over, ids, *moved]

        over = Carried("over", b.const(False, np.bool_), np.bool_, ())
        whole = [*firsts[: len(texts)], over, *firsts[len(texts) :]]
        trips = b.op("Sub", "max_new_tokens", self.before)
        found = b.loop("beams", trips, whole, body)
        return found[len(texts)], found[: len(texts)], found[len(texts) + 1 :]


def _put(b: Builder, all_texts: str, places: str, finished: str, taken: str) -> str:
    """Return int64 [all, T]: `all_texts`, `taken` tokens longer, with the best finished ones at `places`."""
    block = b.op("Concat", b.rows(all_texts), b.op("Unsqueeze", taken, b.const([0])), axis=0)
    wide = b.op("Concat", all_texts, b.op("Expand", "pad_token_id", block), axis=1)
    best = b.op("Gather", finished, b.const(0), axis=1)
    return b.op("ScatterND", wide, b.op("Unsqueeze", places, b.const([1])), best)


def _begin(b: Builder, source: Source, vocabulary: int) -> Search:
    words, one = source.words, b.const(1)
    n = b.op("Unsqueeze", "num_beams", b.const([0]))
    # so many that N are left even if all others end
    each = b.op("Max", b.op("Add", b.rows("eos_token_ids"), b.const([1])), b.const([2]))
    kept = b.op("Mul", n, b.op("Min", each, b.rows(words) if words else b.const([vocabulary])))
    place = b.op("Range", b.const(0), b.op("Squeeze", kept, b.const([0])), one)
    return Search(
        vocabulary, words, prepare_rules(b, vocabulary),
        b.op("Gather", "rule_biases", words, axis=1) if words else "rule_biases", n, kept,
        beams=b.op("Range", b.const(0), "num_beams", one),
        reserve=b.op("GreaterOrEqual", place, n),
    )  # fmt: skip


def _batch(b: Builder, search: Search, texts: str) -> Batch:
    size, words = b.rows(texts), search.words
    count = b.op("Range", b.const(0), b.op("Squeeze", size, b.const([0])), b.const(1))
    # [-1, C]
    scores = [b.const([-1]), b.rows(words)] if words else [b.const([-1, search.vocabulary])]
    return Batch(
        size,
        places=b.op("Unsqueeze", count, b.const([1])),
        by_beam=b.op("Concat", size, *scores, axis=0),
        flat=b.op("Concat", size, b.const([-1]), axis=0),
        tail=b.op("Expand", "pad_token_id", b.op("Concat", size, search.n, b.const([1]), axis=0)),
    )


def _nothing_said(b: Builder, prompt: str) -> list[Carried]:
    """Return the parts of the `Beams` of the first step."""
    batch, n = b.rows(prompt), b.op("Unsqueeze", "num_beams", b.const([0]))
    table = b.op("Concat", batch, n, axis=0)
    length = b.op("Shape", prompt, start=1, end=2)
    texts = b.op("Expand", b.op("Unsqueeze", prompt, b.const([1])), b.op("Concat", batch, n, length, axis=0))
    # or all beams would say the same
    others = b.op("Greater", b.op("Range", b.const(0), "num_beams", b.const(1)), b.const(0))
    out, zero = b.const(OUT, np.float32), b.const(0, np.float32)
    scores = b.op("Expand", b.op("Where", others, out, zero), table)
    none = b.op("Expand", b.const(False, np.bool_), table)
    all_may = b.op("Expand", b.const([[True]], np.bool_), b.op("Concat", batch, b.const([1]), axis=0))
    return [
        Carried("running", texts, np.int64, (None, None, None)),
        Carried("scores", scores, np.float32, (None, None)),
        Carried("finished", texts, np.int64, (None, None, None)),
        Carried("finished_scores", b.op("Expand", out, table), np.float32, (None, None)),
        Carried("ended", none, np.bool_, (None, None)),
        Carried("improvable", all_may, np.bool_, (None, 1)),
    ]
