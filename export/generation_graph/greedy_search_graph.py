"""Greedy search as loops of a graph, with the same steps as `smelt.runtime.generate.generation_loop`.

Shapes: B = rows at first, R = rows of a step, T = tokens so far, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from smelt.export.generation_graph.graph_builder import GraphBuilder, LoopCarried
from smelt.export.generation_graph.hoist_nodes import GraphLevel
from smelt.export.generation_graph.logits_ops import (
    add_to_logits,
    argmax,
    blocked_argmax,
    scatter_to_vocabulary,
    use_blocks,
)
from smelt.export.generation_graph.rule_nodes import (
    RuleTables,
    StepRule,
    apply_history_rules,
    biases_with_forced_tokens,
    is_eos,
    prepare_rules,
    step_rule,
)
from smelt.export.generation_graph.step_model import StepModel


def add_greedy_search(root: GraphLevel, source: StepModel, vocabulary: int) -> str:
    """Append greedy search; return int64 [B, T], each row's prompt and new tokens, padded after its end.

    Rows that have ended are removed from the batch once they are a quarter of it: gathering the caches of the
    others costs about as much as one step of a row. So there are two loops: the outer one runs once for each
    composition of the batch.
    """
    b = root.builder
    rules, words = prepare_rules(b, vocabulary), source.shortlist_ids
    rows = b.op("Gather", "rule_biases", words, axis=1) if words else biases_with_forced_tokens(b, vocabulary)
    count = b.op("Squeeze", b.row_count("input_ids"), b.const([0]))
    places = b.op("Range", b.const(0), count, b.const(1))
    own = [*source.caches, *source.extra_state]
    carried = [
        LoopCarried("step", b.const(0), np.int64, ()),
        LoopCarried("all_texts", source.prompt, np.int64, (None, None)),
        LoopCarried("places", places, np.int64, (None,)),
        LoopCarried("texts", source.prompt, np.int64, (None, None)),
        LoopCarried("ids", source.ids, np.int64, (None, None)),
        *source.shared,
        *own,
    ]

    def phase(b: GraphBuilder, unused: str, names: list[str]) -> tuple[str, list[str]]:
        step, all_texts, places, texts, ids, *rest = names
        shared, state = rest[: len(source.shared)], rest[len(source.shared) :]
        levels = [root, GraphLevel(b)]
        search = _GreedySearchValues(levels, source, vocabulary, rules, rows)
        after, texts, ids, done, state = _add_inner_loop(search, step, texts, ids, shared, state)
        grown = b.op("Sub", b.dimension(texts, 1), b.dimension(all_texts, 1))
        block = b.op("Concat", b.row_count(all_texts), b.op("Unsqueeze", grown, b.const([0])), axis=0)
        wide = b.op("Concat", all_texts, b.op("Expand", "pad_token_id", block), axis=1)
        all_texts = b.op("ScatterND", wide, b.op("Unsqueeze", places, b.const([1])), texts)
        kept = b.op("Squeeze", b.op("NonZero", b.op("Not", done)), b.const([0]))
        left = [b.op("Gather", name, kept, axis=0) for name in (places, texts, ids, *shared, *state)]
        some = b.op("Greater", b.op("Squeeze", b.row_count(kept), b.const([0])), b.const(0))
        again = b.op("And", some, b.op("Less", after, "max_new_tokens"))
        return again, [after, all_texts, *left]

    # attention and reshapes fail on a batch without rows, so it runs no step
    trips = b.op("Mul", "max_new_tokens", b.op("Min", count, b.const(1)))
    return b.loop("phases", trips, carried, phase)[1]


@dataclass(frozen=True)
class _GreedySearchValues:
    """Values that are constant over the steps. levels: the graphs around the steps. rule_biases: of rules.

    Biases also force tokens, except with a shortlist, where they cover only its tokens.
    """

    levels: list[GraphLevel]
    source: StepModel
    vocabulary: int
    rules: RuleTables
    rule_biases: str


def _add_inner_loop(
    search: _GreedySearchValues, step: str, texts: str, ids: str, shared: Sequence[str], state: Sequence[str]
) -> tuple[str, str, str, str, list[str]]:
    """Append the inner loop; return the number of the next step, texts, ids, which rows ended, and state."""
    levels, source = search.levels, search.source
    b = levels[-1].builder
    rows = b.row_count(texts)
    none = b.op("Expand", b.const([[False]], np.bool_), b.op("Concat", rows, b.const([1]), axis=0))
    # when only this many rows remain, the others are removed
    quarter = b.op("Max", b.op("Div", rows, b.const([4])), b.const([1]))
    enough = b.op("Squeeze", quarter, b.const([0]))
    many = use_blocks(b, rows, search.vocabulary)
    plain = b.op("Not", b.op("Or", "text_rules", many))
    carried = [
        LoopCarried("texts", texts, np.int64, (None, None)),
        LoopCarried("ids", ids, np.int64, (None, None)),
        LoopCarried("done", none, np.bool_, (None, 1)),
        *(
            _with_initial(one, name)
            for one, name in zip([*source.caches, *source.extra_state], state, strict=True)
        ),
    ]

    def body(b: GraphBuilder, count: str, names: list[str]) -> tuple[str, list[str]]:
        texts, ids, done, *rest = names
        caches, extra = rest[: len(source.caches)], rest[len(source.caches) :]
        rule = step_rule(b, search.rules, b.op("Add", count, step), search.rule_biases)
        found = source.add_step([*levels, GraphLevel(b)], ids, caches, extra, (1, shared), beams=False)
        scores = add_to_logits(b, found.logits, rule.biases)
        mask = extra[0] if source.mask else None
        if source.shortlist_ids:
            best = _next_tokens_from_shortlist(b, search, scores, texts, rule)
        else:
            best = b.if_else(
                plain, lambda i: argmax(i, scores),
                lambda i: _next_tokens_by_rules(i, search, scores, texts, mask, rule), np.int64, (None, 1),
            )  # fmt: skip
        ids = b.op("Where", done, "pad_token_id", best)
        done = b.op("Or", done, is_eos(b, search.rules, best))
        gone = b.op("ReduceSum", b.cast(done, np.int64), keepdims=0)
        again = b.op("Less", gone, enough)
        return again, [b.op("Concat", texts, ids, axis=1), ids, done, *found.caches, *found.extra_state]

    trips = b.op("Sub", "max_new_tokens", step)
    texts_after, ids, done, *after = b.loop("steps", trips, carried, body)
    taken = b.op("Sub", b.dimension(texts_after, 1), b.dimension(texts, 1))
    return b.op("Add", step, taken), texts_after, ids, b.op("Squeeze", done, b.const([1])), after


def _next_tokens_by_rules(
    b: GraphBuilder, search: _GreedySearchValues, scores: str, texts: str, mask: str | None, rule: StepRule
) -> str:
    """Return int64 [R, 1]: the next tokens, if rules depend on the history or there are many logits."""

    def ruled(inside: GraphBuilder) -> str:
        best = blocked_argmax(inside, apply_history_rules(inside, scores, texts, mask), search.vocabulary)
        forced = rule.forced_token(inside)
        return inside.op("Where", inside.op("Less", forced, inside.const(0)), best, forced)

    return b.if_else(
        "text_rules", ruled, lambda i: blocked_argmax(i, scores, search.vocabulary), np.int64, (None, 1)
    )


def _next_tokens_from_shortlist(
    b: GraphBuilder, search: _GreedySearchValues, scores: str, texts: str, rule: StepRule
) -> str:
    """Return int64 [R, 1]: the next tokens, from scores [R, C] of the shortlist's tokens only."""
    words = search.source.shortlist_ids
    assert words is not None

    def ruled(inside: GraphBuilder) -> str:
        every = scatter_to_vocabulary(inside, scores, words, search.vocabulary)
        return blocked_argmax(inside, apply_history_rules(inside, every, texts, None), search.vocabulary)

    best = b.if_else(
        "text_rules", ruled, lambda i: i.op("Gather", words, argmax(i, scores), axis=0), np.int64, (None, 1)
    )
    forced = rule.forced_token(b)
    return b.op("Where", b.op("Less", forced, b.const(0)), best, forced)


def _with_initial(one: LoopCarried, name: str) -> LoopCarried:
    return LoopCarried(one.name, name, one.dtype, one.shape)
