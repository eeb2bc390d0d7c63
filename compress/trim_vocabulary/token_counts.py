"""Tokenize a split, count its tokens, and compare tokenizations before and after trimming."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from smelt.compress.trim_vocabulary.select_tokens import TokenCounts
from smelt.data.splits import TEXT_TO_TEXT_TASKS, Split, Task, input_texts
from smelt.runtimes.predict_texts import encode_texts
from smelt.training.samples import encode_targets

_NO_LIMIT = 10**9  # no truncation


def tokenize_split(split: Split, tokenizer: Any, task: Task) -> list[list[int]]:
    """Return the ids of every text of `split` without truncation: inputs, then targets."""
    texts, pairs = input_texts(split.examples, task)
    rows = list(encode_texts(texts, tokenizer, _NO_LIMIT, pairs).ids)
    if task in TEXT_TO_TEXT_TASKS:
        targets = [reference for example in split.examples for reference in example.references]
        rows += encode_targets(targets, tokenizer, _NO_LIMIT)[0]
    return rows


def count_tokens(rows: Sequence[Sequence[int]], vocabulary_size: int) -> TokenCounts:
    """Return the number of occurrences of each id in `rows`, int64 [vocabulary_size]."""
    ids = np.fromiter((at for row in rows for at in row), dtype=np.int64)
    return np.bincount(ids, minlength=vocabulary_size)


@dataclass(frozen=True)
class TokenizationChange:
    """How a trimmed vocabulary changes the tokenization of texts.

    texts: number of texts. changed: number of texts that are tokenized differently. tokens, tokens_after: of
    all texts. kept: share of the tokens that are kept. unknown, unknown_after: number of unknown tokens.
    wrong: texts whose tokens are all kept and that are tokenized differently; must be 0.
    """

    texts: int
    changed: int
    tokens: int
    tokens_after: int
    kept: float
    unknown: int
    unknown_after: int
    wrong: int

    def details(self) -> dict[str, float]:
        """Return the details for the report."""
        found = {name: value for name, value in vars(self).items() if name != "wrong"}
        return {**found, "kept": round(self.kept, 6)}


def compare_tokenizations(
    before: Sequence[Sequence[int]],
    after: Sequence[Sequence[int]],
    new_ids: Mapping[int, int],
    unknown: int | None,
) -> TokenizationChange:
    """Compare the token ids of texts before and after trimming.

    Args:
        before: ids by the original tokenizer.
        after: ids of the same texts by the trimmed one.
        new_ids: new id of each kept token.
        unknown: id of the unknown token before; None if there is none.
    """
    changed = wrong = kept = 0
    for old, now in zip(before, after, strict=True):
        expected = [new_ids.get(at) for at in old]
        kept += sum(at is not None for at in expected)
        changed += expected != list(now)
        wrong += all(at is not None for at in expected) and expected != list(now)
    tokens, tokens_after = (sum(map(len, rows)) for rows in (before, after))
    strange, strange_after = (
        0 if at is None else sum(list(row).count(at) for row in rows)
        for rows, at in ((before, unknown), (after, None if unknown is None else new_ids.get(unknown)))
    )
    share = kept / max(1, tokens)
    return TokenizationChange(
        len(before), changed, tokens, tokens_after, share, strange, strange_after, wrong
    )
