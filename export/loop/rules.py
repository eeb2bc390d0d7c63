"""Which token may come when, inside the graph: what `smelt.runtime.generate.rules` does in Python.

What depends on the number of a step alone is a row of a table that is added to all scores. What depends on
the words so far is computed where it is asked for.

Shapes: R = rows, T = tokens so far, V = vocabulary, K = different rules, n = tokens of an n-gram.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from smelt.export.loop.builder import Builder

# inputs of the graph, with dtype and shape
INPUTS: dict[str, tuple[Any, tuple[str, ...]]] = {
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
class Rules:
    """What the steps look up, known before the first.

    last: int64 scalar, the last row of `step_rules`; it holds for all steps behind it. ends: bool [V + 1],
    which tokens end a text.
    """

    last: str
    ends: str


@dataclass(frozen=True)
class Rule:
    """What holds in a step. number: int64 scalar, the rule's. row: float32 [V], added to scores."""

    number: str
    row: str

    def forced(self, b: Builder) -> str:
        """Return int64 scalar: the token that the step must give, or -1."""
        return b.op("Gather", "forced_tokens", self.number, axis=0)


def prepare_rules(b: Builder, vocabulary: int) -> Rules:
    """Append to the outermost graph what the steps look up; `vocabulary` is V."""
    from onnx import numpy_helper

    none = b.op(
        "ConstantOfShape", b.const([vocabulary + 1]), value=numpy_helper.from_array(np.zeros(1, bool))
    )
    # -1, and what is no token, is the place behind the last token
    places = b.op("Where", b.op("Less", "eos_token_ids", b.const(vocabulary)), "eos_token_ids", b.const(-1))
    true = b.op("Expand", b.const(True, np.bool_), b.op("Shape", places))
    ends = b.op("ScatterElements", none, places, true, axis=0)
    return Rules(b.op("Sub", b.size("step_rules", 0), b.const(1)), ends)


def rule_of(b: Builder, rules: Rules, step: str, rows: str = "rule_biases") -> Rule:
    """Return the rule of step `step` (int64 scalar, 0 for the first new token), its row one of `rows`."""
    number = b.op("Gather", "step_rules", b.op("Min", step, rules.last), axis=0)
    return Rule(number, b.op("Gather", rows, number, axis=0))


def forcing_rows(b: Builder, vocabulary: int) -> str:
    """Return `rule_biases` such that a row which forces a token hides all others."""
    forced = b.op("Unsqueeze", "forced_tokens", b.const([1]))
    other = b.op("Not", b.op("Equal", b.op("Range", b.const(0), b.const(vocabulary), b.const(1)), forced))
    hidden = b.op("Where", other, b.const(-np.inf, np.float32), b.const(0, np.float32))
    return b.op("Where", b.op("GreaterOrEqual", forced, b.const(0)), hidden, "rule_biases")


def by_texts(b: Builder, scores: str, texts: str, mask: str | None) -> str:
    """Return float32 `scores` [R, V] as the rules change them that ask for the words so far.

    Args:
        b: the graph of the step.
        scores: [R, V].
        texts: int64 [R, T], the tokens so far.
        mask: int64 [R, T], 0 where a text's prompt is padded; None where it never is.
    """
    seen = texts if mask is None else _without_padding(b, texts, mask)
    return _no_repeated_ngrams(b, _less_repetition(b, scores, seen), texts)


def ends(b: Builder, rules: Rules, tokens: str) -> str:
    """Return bool, of the shape of int64 `tokens`: which of them end a text."""
    return b.op("Gather", rules.ends, tokens, axis=0)


def _without_padding(b: Builder, texts: str, mask: str) -> str:
    """Replace padding by the row's last token, which is there anyway."""
    last = b.op("Slice", texts, b.const([-1]), b.const([2**31]), b.const([1]))
    return b.op("Where", b.op("Equal", mask, b.const(0)), last, texts)


def _less_repetition(b: Builder, scores: str, texts: str) -> str:
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


def _no_repeated_ngrams(b: Builder, scores: str, texts: str) -> str:
    """Forbid every token that would complete a run of n tokens for the second time; n = 0 forbids nothing."""
    zero, one = b.const(0), b.const(1)
    asked = b.op("Greater", "no_repeat_ngram_size", zero)
    length = b.size(texts, 1)
    size = b.op("Where", asked, "no_repeat_ngram_size", b.op("Add", length, one))
    before = b.op("Sub", size, one)
    windows = b.op("Max", b.op("Sub", length, before), zero)
    starts = b.op("Unsqueeze", b.op("Range", zero, windows, one), b.const([1]))
    places = b.op("Add", starts, b.op("Range", zero, before, one))  # [W, n - 1]
    heads = b.op("Gather", texts, places, axis=1)  # [R, W, n - 1]
    # the last n - 1 tokens; where there are fewer, there is no window that is compared with them
    end = b.op("Max", b.op("Range", b.op("Sub", length, before), length, one), b.const([0]))
    tail = b.op("Unsqueeze", b.op("Gather", texts, end, axis=1), b.const([1]))
    other = b.cast(b.op("Not", b.op("Equal", heads, tail)), np.int64)
    same = b.op("Equal", b.op("ReduceSum", other, b.const([2]), keepdims=0), zero)  # [R, W]
    first = b.op("Unsqueeze", b.op("Min", before, length), b.const([0]))
    completes = b.op("Slice", texts, first, b.const([2**31]), b.const([1]))
    lost = b.op("Where", same, b.const(-np.inf, np.float32), b.const(0, np.float32))
    return b.op("ScatterElements", scores, completes, lost, axis=1, reduction="add")
