"""Select the tokens to keep: those that the data use, their dependencies, and required ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from smelt.compress.trim_vocabulary.vocabulary import TrimmableVocabulary
from smelt.core.errors import InputError

TokenCounts = NDArray[np.int64]


def select_tokens(
    counts: TokenCounts,
    vocabulary: TrimmableVocabulary,
    required: Iterable[int],
    *,
    min_count: int = 1,
    coverage: float | None = None,
    size: int | None = None,
    multiple_of: int = 1,
) -> list[int]:
    """Return the token ids to keep, rising.

    Args:
        counts: occurrences of each id in the data, int64 [V].
        vocabulary: the vocabulary.
        required: ids to keep in addition to those that the tokenizer needs.
        min_count: keep ids with at least this many occurrences.
        coverage: instead, keep the most frequent ids with this share of all occurrences.
        size: instead, keep this many ids in all, the most frequent ones.
        multiple_of: filled up to a multiple of this with the most frequent of the others.

    Raises:
        InputError: more ids are required than `size`.
    """
    known = frozenset(vocabulary.ids.values())
    kept = {at for at in required if 0 <= at < len(counts)}
    kept |= {at for at in vocabulary.required if at < len(counts)}
    _add_with_dependencies(kept, sorted(kept), vocabulary)
    order = [at for at in _ids_by_frequency(counts) if at in known]
    if size is not None:
        if size < len(kept):
            raise InputError(
                f"trim-vocabulary: size {size} is less than the {len(kept)} tokens that are required:"
                " special tokens, single characters and bytes. Increase size.",
                code="size-too-small",
                setting="size",
            )
        return sorted(_fill_up(kept, order, vocabulary, min(size, len(counts))))
    _add_with_dependencies(kept, _wanted_ids(counts, order, min_count, coverage), vocabulary)
    return sorted(_fill_up(kept, order, vocabulary, math.ceil(len(kept) / multiple_of) * multiple_of))


def _ids_by_frequency(counts: TokenCounts) -> list[int]:
    """Return all ids, the most frequent first; ties by the smaller id."""
    found: list[int] = np.argsort(-counts, kind="stable").tolist()
    return found


def _wanted_ids(
    counts: TokenCounts, order: Sequence[int], min_count: int, coverage: float | None
) -> list[int]:
    if coverage is None:
        return [at for at in order if counts[at] >= min_count]
    sums = np.cumsum(counts[list(order)])
    seen = int(sums[-1]) if len(sums) else 0
    count = int(np.searchsorted(sums, coverage * seen)) + 1 if seen else 0
    return [at for at in order[:count] if counts[at]]


def _add_with_dependencies(kept: set[int], ids: Iterable[int], vocabulary: TrimmableVocabulary) -> None:
    """Add `ids` and their dependencies to `kept`."""
    for at in ids:
        kept.add(at)
        kept |= vocabulary.dependencies(at)


def _fill_up(kept: set[int], order: Sequence[int], vocabulary: TrimmableVocabulary, size: int) -> set[int]:
    """Add the ids in `order` with their dependencies to `kept`, up to `size` in all."""
    grown = True
    while len(kept) < size and grown:
        grown = False
        for at in order:
            if at in kept:
                continue
            more = {at, *vocabulary.dependencies(at)} - kept
            if len(kept) + len(more) <= size:
                kept |= more
                grown = True
    return kept
