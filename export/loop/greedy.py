"""Greedy search as loops of a graph, step for step as `smelt.runtime.generate.loop` does it.

Shapes: B = rows at first, R = rows of a step, T = tokens so far, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from smelt.export.loop.builder import Builder, Carried
from smelt.export.loop.logits import add_to_logits, are_many, largest
from smelt.export.loop.place import Level
from smelt.export.loop.rules import by_texts, ends, rule_of
from smelt.export.loop.source import Source


def greedy(root: Level, source: Source, vocabulary: int) -> str:
    """Append greedy search; return int64 [B, T], each row's prompt and new tokens, padded behind its end.

    Rows that have ended leave the batch once they are a quarter of it: to take the others out of the
    caches costs about as much as one of them does in a step. So there are two loops: the outer one runs
    once for each make-up of the batch.
    """
    b = root.builder
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
        after, texts, ids, done, state = _until_rows_may_leave(
            levels, source, vocabulary, step, texts, ids, shared, state
        )
        grown = b.op("Sub", b.size(texts, 1), b.size(all_texts, 1))
        block = b.op("Concat", b.rows(all_texts), b.op("Unsqueeze", grown, b.const([0])), axis=0)
        wide = b.op("Concat", all_texts, b.op("Expand", "pad_token_id", block), axis=1)
        all_texts = b.op("ScatterND", wide, b.op("Unsqueeze", places, b.const([1])), texts)
        kept = b.op("Squeeze", b.op("NonZero", b.op("Not", done)), b.const([0]))
        left = [b.op("Gather", name, kept, axis=0) for name in (places, texts, ids, *shared, *state)]
        some = b.op("Greater", b.op("Squeeze", b.rows(kept), b.const([0])), b.const(0))
        again = b.op("And", some, b.op("Less", after, "max_new_tokens"))
        return again, [after, all_texts, *left]

    return b.loop("phases", "max_new_tokens", carried, phase)[1]


def _until_rows_may_leave(
    levels: list[Level],
    source: Source,
    vocabulary: int,
    step: str,
    texts: str,
    ids: str,
    shared: Sequence[str],
    state: Sequence[str],
) -> tuple[str, str, str, str, list[str]]:
    """Append the inner loop; return number of the next step, texts, ids, which rows have ended, and state."""
    b = levels[-1].builder
    rows = b.rows(texts)
    none = b.op("Expand", b.const(False, np.bool_), rows)
    # as few rows left as this, and the others leave
    quarter = b.op("Max", b.op("Div", rows, b.const([4])), b.const([1]))
    many = are_many(b, rows, vocabulary)
    few = b.op("Squeeze", b.op("Sub", rows, quarter), b.const([0]))
    carried = [
        Carried("texts", texts, np.int64, (None, None)),
        Carried("ids", ids, np.int64, (None, None)),
        Carried("done", none, np.bool_, (None,)),
        *(_next(one, name) for one, name in zip([*source.caches, *source.extra], state, strict=True)),
    ]

    def body(b: Builder, count: str, names: list[str]) -> tuple[str, list[str]]:
        texts, ids, done, *rest = names
        caches, extra = rest[: len(source.caches)], rest[len(source.caches) :]
        inside = [*levels, Level(b)]
        rule = rule_of(b, b.op("Add", count, step))
        found = source.step(inside, ids, caches, extra, (1, shared), beams=False)
        scores = add_to_logits(b, found.logits, rule.row)
        mask = extra[0] if source.mask else None
        best = b.choose(
            "text_rules",
            lambda i: i.op("ArgMax", by_texts(i, scores, texts, mask), axis=1, keepdims=0),
            lambda i: largest(i, scores, vocabulary, many), np.int64, (None,),
        )  # fmt: skip
        forced = b.op("Where", b.op("Less", rule.forced, b.const(0)), best, rule.forced)
        token = b.op("Where", done, "pad_token_id", forced)
        done = b.op("Or", done, ends(b, token))
        ids = b.op("Unsqueeze", token, b.const([1]))
        left = b.op("ReduceSum", b.cast(b.op("Not", done), np.int64), keepdims=0)
        again = b.op("Greater", left, few)
        return again, [b.op("Concat", texts, ids, axis=1), ids, done, *found.caches, *found.extra]

    trips = b.op("Sub", "max_new_tokens", step)
    texts_after, ids, done, *after = b.loop("steps", trips, carried, body)
    taken = b.op("Sub", b.size(texts_after, 1), b.size(texts, 1))
    return b.op("Add", step, taken), texts_after, ids, done, after


def _next(one: Carried, name: str) -> Carried:
    return Carried(one.word, name, one.dtype, one.shape)
