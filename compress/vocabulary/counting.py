"""The texts of a split as a tokenizer cuts them: how often each token comes, and what changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from smelt.compress.train.data import encode_targets
from smelt.compress.vocabulary.choose import Counts
from smelt.core.data import TEXT_TO_TEXT, Split, Task, texts_read
from smelt.runtime.predict import encode_texts

_WHOLE = 10**9  # no text is cut


def token_rows(split: Split, tokenizer: Any, task: Task) -> list[list[int]]:
    """Return the ids of every text of `split`, whole: what a model reads, then what it is to write."""
    texts, pairs = texts_read(split.examples, task)
    rows = list(encode_texts(texts, tokenizer, _WHOLE, pairs).ids)
    if task in TEXT_TO_TEXT:
        targets = [reference for example in split.examples for reference in example.references]
        rows += encode_targets(targets, tokenizer, _WHOLE)[0]
    return rows


def counted(rows: Sequence[Sequence[int]], words: int) -> Counts:
    """Return how often each of `words` ids comes in `rows`, int64 [words]."""
    ids = np.fromiter((at for row in rows for at in row), dtype=np.int64)
    return np.bincount(ids, minlength=words)


@dataclass(frozen=True)
class Change:
    """What a trimmed vocabulary does to texts.

    texts: how many. changed: of these, how many are cut otherwise. tokens, tokens_after: of all. kept: the
    share of the tokens that are still words. unknown, unknown_after: tokens that stand for what is no word.
    wrong: texts of words that all stay, and which yet are cut otherwise; there must be none.
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
        """Return what the report tells."""
        found = {name: value for name, value in vars(self).items() if name != "wrong"}
        return {**found, "kept": round(self.kept, 6)}


def change(
    before: Sequence[Sequence[int]],
    after: Sequence[Sequence[int]],
    new: Mapping[int, int],
    unknown: int | None,
) -> Change:
    """Compare the ids of texts before and after.

    Args:
        before: by the whole tokenizer.
        after: of the same texts, by the trimmed one.
        new: the new number of each token that stayed.
        unknown: the token that stands for what is no word, before; None where there is none.
    """
    changed = wrong = kept = 0
    for old, now in zip(before, after, strict=True):
        there = [new.get(at) for at in old]
        kept += sum(at is not None for at in there)
        changed += there != list(now)
        wrong += all(at is not None for at in there) and there != list(now)
    tokens, tokens_after = (sum(map(len, rows)) for rows in (before, after))
    strange, strange_after = (
        0 if at is None else sum(list(row).count(at) for row in rows)
        for rows, at in ((before, unknown), (after, None if unknown is None else new.get(unknown)))
    )
    share = kept / max(1, tokens)
    return Change(len(before), changed, tokens, tokens_after, share, strange, strange_after, wrong)
