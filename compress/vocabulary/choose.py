"""Which tokens stay: those that the data use, what they need, and what must stay anyway."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from smelt.compress.vocabulary.words import Words
from smelt.core.errors import InputError

Counts = NDArray[np.int64]


def chosen(
    counts: Counts,
    words: Words,
    must: Iterable[int],
    *,
    min_count: int = 1,
    coverage: float | None = None,
    size: int | None = None,
    round_to: int = 1,
) -> list[int]:
    """Return the ids that stay, rising.

    Args:
        counts: how often each id comes in the data, int64 [V].
        words: the vocabulary.
        must: ids that stay besides those that the tokenizer needs.
        min_count: ids that come so often are wanted.
        coverage: instead, the most frequent ids that make up this share of all tokens.
        size: instead, as many ids as this in all, the most frequent ones.
        round_to: filled up to a multiple of this, the most frequent of the others first.

    Raises:
        InputError: more ids must stay than `size`.
    """
    known = frozenset(words.ids.values())
    kept = {at for at in must if 0 <= at < len(counts)}
    kept |= {at for at in words.stay if at < len(counts)}
    _take(kept, sorted(kept), words)
    order = [at for at in _by_count(counts) if at in known]
    if size is not None:
        if size < len(kept):
            raise InputError(
                f"trim-vocabulary: size {size} is less than the {len(kept)} tokens that must stay: special"
                " tokens, single characters and bytes. Give a larger size.",
                code="size-too-small",
                setting="size",
            )
        return sorted(_fill(kept, order, words, min(size, len(counts))))
    _take(kept, _wanted(counts, order, min_count, coverage), words)
    return sorted(_fill(kept, order, words, math.ceil(len(kept) / round_to) * round_to))


def _by_count(counts: Counts) -> list[int]:
    """Return all ids, the most frequent first; of two that come equally often the smaller one."""
    found: list[int] = np.argsort(-counts, kind="stable").tolist()
    return found


def _wanted(counts: Counts, order: Sequence[int], min_count: int, coverage: float | None) -> list[int]:
    if coverage is None:
        return [at for at in order if counts[at] >= min_count]
    sums = np.cumsum(counts[list(order)])
    seen = int(sums[-1]) if len(sums) else 0
    count = int(np.searchsorted(sums, coverage * seen)) + 1 if seen else 0
    return [at for at in order[:count] if counts[at]]


def _take(kept: set[int], ids: Iterable[int], words: Words) -> None:
    """Put `ids` and what they need into `kept`."""
    for at in ids:
        kept.add(at)
        kept |= words.parts(at)


def _fill(kept: set[int], order: Sequence[int], words: Words, size: int) -> set[int]:
    """Add to `kept`, in `order`, each id with what it needs, as long as there are not more than `size`."""
    grown = True
    while len(kept) < size and grown:
        grown = False
        for at in order:
            if at in kept:
                continue
            more = {at, *words.parts(at)} - kept
            if len(kept) + len(more) <= size:
                kept |= more
                grown = True
    return kept
