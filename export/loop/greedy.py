"""Greedy search as loops of a graph, step for step as `smelt.runtime.generate.loop` does it.

Shapes: B = rows at first, R = rows of a step, T = tokens so far, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from smelt.export.loop.builder import Builder, Carried
from smelt.export.loop.logits import (
    add_to_logits,
    are_many,
    in_vocabulary,
    largest,
    largest_in_blocks,
)
from smelt.export.loop.place import Level
from smelt.export.loop.rules import Rule, Rules, by_texts, ends, forcing_rows, prepare_rules, rule_of
from smelt.export.loop.source import Source


def greedy(root: Level, source: Source, vocabulary: int) -> str:
    """Append greedy search; return int64 [B, T], each row's prompt and new tokens, padded behind its end.

    Rows that have ended leave the batch once they are a quarter of it: to take the others out of the
    caches costs about as much as one of them does in a step. So there are two loops: the outer one runs
    once for each make-up of the batch.
    """
    b = root.builder
    rules, words = prepare_rules(b, vocabulary), source.words
    rows = b.op("Gather", "rule_biases", words, axis=1) if words else forcing_rows(b, vocabulary)
    count = b.op("Squeeze", b.rows("input_ids"), b.const([0]))
    places = b.op("Range", b.const(0), count, b.const(1))
    own = [*source.caches, *source.extra]
    carried = [
        Carried("step", b.const(0), np.int64, ()),
        Carried("all_texts", source.prompt, np.int64, (None, None)),
        Carried("places", places, np.int64, (None,)),
        Carried("texts", source.prompt, np.int64, (None, None)),
        Carried("ids", source.ids, np.int64, (None, None)),
        *source.shared,
        *own,
    ]

    def phase(b: Builder, unused: str, names: list[str]) -> tuple[str, list[str]]:
        step, all_texts, places, texts, ids, *rest = names
        shared, state = rest[: len(source.shared)], rest[len(source.shared) :]
        levels = [root, Level(b)]
        search = _Search(levels, source, vocabulary, rules, rows)
        after, texts, ids, done, state = _until_rows_may_leave(search, step, texts, ids, shared, state)
        grown = b.op("Sub", b.size(texts, 1), b.size(all_texts, 1))
        block = b.op("Concat", b.rows(all_texts), b.op("Unsqueeze", grown, b.const([0])), axis=0)
        wide = b.op("Concat", all_texts, b.op("Expand", "pad_token_id", block), axis=1)
        all_texts = b.op("ScatterND", wide, b.op("Unsqueeze", places, b.const([1])), texts)
        kept = b.op("Squeeze", b.op("NonZero", b.op("Not", done)), b.const([0]))
        left = [b.op("Gather", name, kept, axis=0) for name in (places, texts, ids, *shared, *state)]
        some = b.op("Greater", b.op("Squeeze", b.rows(kept), b.const([0])), b.const(0))
        again = b.op("And", some, b.op("Less", after, "max_new_tokens"))
        return again, [after, all_texts, *left]

    # attention and reshapes fail on a batch without rows: it takes no step
    trips = b.op("Mul", "max_new_tokens", b.op("Min", count, b.const(1)))
    return b.loop("phases", trips, carried, phase)[1]


@dataclass(frozen=True)
class _Search:
    """What stays as it is. levels: the graphs around the steps. rows: of rules.

    Rows force words too, but for scores of some words alone.
    """

    levels: list[Level]
    source: Source
    vocabulary: int
    rules: Rules
    rows: str


def _until_rows_may_leave(
    search: _Search, step: str, texts: str, ids: str, shared: Sequence[str], state: Sequence[str]
) -> tuple[str, str, str, str, list[str]]:
    """Append the inner loop; return number of the next step, texts, ids, which rows have ended, and state."""
    levels, source = search.levels, search.source
    b = levels[-1].builder
    rows = b.rows(texts)
    none = b.op("Expand", b.const([[False]], np.bool_), b.op("Concat", rows, b.const([1]), axis=0))
    # as few rows left as this, and the others leave
    quarter = b.op("Max", b.op("Div", rows, b.const([4])), b.const([1]))
    enough = b.op("Squeeze", quarter, b.const([0]))
    many = are_many(b, rows, search.vocabulary)
    plain = b.op("Not", b.op("Or", "text_rules", many))
    carried = [
        Carried("texts", texts, np.int64, (None, None)),
        Carried("ids", ids, np.int64, (None, None)),
        Carried("done", none, np.bool_, (None, 1)),
        *(_next(one, name) for one, name in zip([*source.caches, *source.extra], state, strict=True)),
    ]

    def body(b: Builder, count: str, names: list[str]) -> tuple[str, list[str]]:
        texts, ids, done, *rest = names
        caches, extra = rest[: len(source.caches)], rest[len(source.caches) :]
        rule = rule_of(b, search.rules, b.op("Add", count, step), search.rows)
        found = source.step([*levels, Level(b)], ids, caches, extra, (1, shared), beams=False)
        scores = add_to_logits(b, found.logits, rule.row)
        mask = extra[0] if source.mask else None
        if source.words:
            best = _among_words(b, search, scores, texts, rule)
        else:
            best = b.choose(
                plain, lambda i: largest(i, scores),
                lambda i: _otherwise(i, search, scores, texts, mask, rule), np.int64, (None, 1),
            )  # fmt: skip
        ids = b.op("Where", done, "pad_token_id", best)
        done = b.op("Or", done, ends(b, search.rules, best))
        gone = b.op("ReduceSum", b.cast(done, np.int64), keepdims=0)
        again = b.op("Less", gone, enough)
        return again, [b.op("Concat", texts, ids, axis=1), ids, done, *found.caches, *found.extra]

    trips = b.op("Sub", "max_new_tokens", step)
    texts_after, ids, done, *after = b.loop("steps", trips, carried, body)
    taken = b.op("Sub", b.size(texts_after, 1), b.size(texts, 1))
    return b.op("Add", step, taken), texts_after, ids, b.op("Squeeze", done, b.const([1])), after


def _otherwise(b: Builder, search: _Search, scores: str, texts: str, mask: str | None, rule: Rule) -> str:
    """Return int64 [R, 1]: the next tokens where rules ask for the words so far, or the logits are many."""

    def ruled(inside: Builder) -> str:
        best = largest_in_blocks(inside, by_texts(inside, scores, texts, mask), search.vocabulary)
        forced = rule.forced(inside)
        return inside.op("Where", inside.op("Less", forced, inside.const(0)), best, forced)

    return b.choose(
        "text_rules", ruled, lambda i: largest_in_blocks(i, scores, search.vocabulary), np.int64, (None, 1)
    )


def _among_words(b: Builder, search: _Search, scores: str, texts: str, rule: Rule) -> str:
    """Return int64 [R, 1]: the next tokens, by scores [R, C] of the source's words alone."""
    words = search.source.words
    assert words is not None

    def ruled(inside: Builder) -> str:
        every = in_vocabulary(inside, scores, words, search.vocabulary)
        return largest_in_blocks(inside, by_texts(inside, every, texts, None), search.vocabulary)

    best = b.choose(
        "text_rules", ruled, lambda i: i.op("Gather", words, largest(i, scores), axis=0), np.int64, (None, 1)
    )
    forced = rule.forced(b)
    return b.op("Where", b.op("Less", forced, b.const(0)), best, forced)


def _next(one: Carried, name: str) -> Carried:
    return Carried(one.word, name, one.dtype, one.shape)
