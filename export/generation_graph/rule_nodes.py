"""Generation rules inside the graph: the same as `smelt.runtime.generate.logits_processors` in Python.

Rules that depend only on the number of a step are rows of a table that are added to all scores. Rules that
depend on the tokens so far are computed in each step.

Shapes: R = rows, T = tokens so far, V = vocabulary, K = different rules, n = tokens of an n-gram.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from smelt.export.generation_graph.graph_builder import GraphBuilder

# inputs of the graph, with dtype and shape
GENERATION_INPUTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "max_new_tokens": (np.int64, ()),
    "eos_token_ids": (np.int64, ("ends",)),
    "pad_token_id": (np.int64, ()),
    "step_rules": (np.int64, ("steps",)),
    "rule_biases": (np.float32, ("rules", "vocabulary")),
    "forced_tokens": (np.int64, ("rules",)),
    "text_rules": (np.bool_, ()),
    "repetition_penalty": (np.float32, ()),
    "no_repeat_ngram_size": (np.int64, ()),
}


@dataclass(frozen=True)
class RuleTables:
    """Tables that the steps look up, computed before the first step.

    last_rule: int64 scalar, the last row of `step_rules`, which applies to all later steps. eos_token_ids:
    bool [V + 1], the end tokens.
    """

    last_rule: str
    eos_token_ids: str


@dataclass(frozen=True)
class StepRule:
    """The rule of a step. number: int64 scalar, the rule's. biases: float32 [V], added to scores."""

    number: str
    biases: str

    def forced_token(self, b: GraphBuilder) -> str:
        """Return int64 scalar: the token that the step is forced to return, or -1."""
        return b.op("Gather", "forced_tokens", self.number, axis=0)


def prepare_rules(b: GraphBuilder, vocabulary: int) -> RuleTables:
    """Append the tables of the steps to the outermost graph; `vocabulary` is V."""
    from onnx import numpy_helper

    none = b.op(
        "ConstantOfShape", b.const([vocabulary + 1]), value=numpy_helper.from_array(np.zeros(1, bool))
    )
    # -1, and other ids outside of the vocabulary, map to the place after the last token
    places = b.op("Where", b.op("Less", "eos_token_ids", b.const(vocabulary)), "eos_token_ids", b.const(-1))
    true = b.op("Expand", b.const(True, np.bool_), b.op("Shape", places))
    ends = b.op("ScatterElements", none, places, true, axis=0)
    return RuleTables(b.op("Sub", b.dimension("step_rules", 0), b.const(1)), ends)


def step_rule(b: GraphBuilder, rules: RuleTables, step: str, rows: str = "rule_biases") -> StepRule:
    """Return the rule of step `step` (int64 scalar, 0 for the first new token) from the rows of `rows`."""
    number = b.op("Gather", "step_rules", b.op("Min", step, rules.last_rule), axis=0)
    return StepRule(number, b.op("Gather", rows, number, axis=0))


def biases_with_forced_tokens(b: GraphBuilder, vocabulary: int) -> str:
    """Return `rule_biases` in which a row with a forced token excludes all others."""
    forced = b.op("Unsqueeze", "forced_tokens", b.const([1]))
    other = b.op("Not", b.op("Equal", b.op("Range", b.const(0), b.const(vocabulary), b.const(1)), forced))
    hidden = b.op("Where", other, b.const(-np.inf, np.float32), b.const(0, np.float32))
    return b.op("Where", b.op("GreaterOrEqual", forced, b.const(0)), hidden, "rule_biases")


def apply_history_rules(b: GraphBuilder, scores: str, texts: str, mask: str | None) -> str:
    """Return float32 `scores` [R, V] after the rules that depend on the tokens so far.

    Args:
        b: the graph of the step.
        scores: [R, V].
        texts: int64 [R, T], the tokens so far.
        mask: int64 [R, T], 0 where a text's prompt is padded; None if it never is.
    """
    seen = texts if mask is None else _without_padding(b, texts, mask)
    return _no_repeat_ngrams(b, _repetition_penalty(b, scores, seen), texts)


def is_eos(b: GraphBuilder, rules: RuleTables, tokens: str) -> str:
    """Return bool, of the shape of int64 `tokens`: which of them are end tokens."""
    return b.op("Gather", rules.eos_token_ids, tokens, axis=0)


def _without_padding(b: GraphBuilder, texts: str, mask: str) -> str:
    """Replace padding by the row's last token, which occurs anyway."""
    last = b.op("Slice", texts, b.const([-1]), b.const([2**31]), b.const([1]))
    return b.op("Where", b.op("Equal", mask, b.const(0)), last, texts)


def _repetition_penalty(b: GraphBuilder, scores: str, texts: str) -> str:
    """Make every token of the texts less likely, once (Keskar et al. 2019, arXiv:1909.05858)."""
    found = b.op("GatherElements", scores, texts, axis=1)
    negative = b.op("Less", found, b.const(0, np.float32))
    less = b.op(
        "Where",
        negative,
        b.op("Mul", found, "repetition_penalty"),
        b.op("Div", found, "repetition_penalty"),
    )
    return b.op("ScatterElements", scores, texts, less, axis=1)


def _no_repeat_ngrams(b: GraphBuilder, scores: str, texts: str) -> str:
    """Forbid every token that would repeat an n-gram; n = 0 forbids nothing."""
    zero, one = b.const(0), b.const(1)
    asked = b.op("Greater", "no_repeat_ngram_size", zero)
    length = b.dimension(texts, 1)
    size = b.op("Where", asked, "no_repeat_ngram_size", b.op("Add", length, one))
    before = b.op("Sub", size, one)
    windows = b.op("Max", b.op("Sub", length, before), zero)
    starts = b.op("Unsqueeze", b.op("Range", zero, windows, one), b.const([1]))
    places = b.op("Add", starts, b.op("Range", zero, before, one))  # [W, n - 1]
    heads = b.op("Gather", texts, places, axis=1)  # [R, W, n - 1]
    # the last n - 1 tokens; if there are fewer, there is no window to compare with
    end = b.op("Max", b.op("Range", b.op("Sub", length, before), length, one), b.const([0]))
    tail = b.op("Unsqueeze", b.op("Gather", texts, end, axis=1), b.const([1]))
    other = b.cast(b.op("Not", b.op("Equal", heads, tail)), np.int64)
    same = b.op("Equal", b.op("ReduceSum", other, b.const([2]), keepdims=0), zero)  # [R, W]
    first = b.op("Unsqueeze", b.op("Min", before, length), b.const([0]))
    completes = b.op("Slice", texts, first, b.const([2**31]), b.const([1]))
    lost = b.op("Where", same, b.const(-np.inf, np.float32), b.const(0, np.float32))
    return b.op("ScatterElements", scores, completes, lost, axis=1, reduction="add")
