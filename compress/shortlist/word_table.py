"""Which target words a source word makes likely: IBM Model 1, on token ids.

t(target | source) is found by expectation maximization over rows of pairs, every target word coming from one
of its row's source words, or from none (the word NULL, which takes what comes whatever the source says).

Source: Brown et al. 1993, The Mathematics of Statistical Machine Translation, Computational Linguistics
19(2), section 4.

Shapes: P = pairs of a source and a target word in all rows, T = target words in all rows, U = different
pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.core.stage import Progress, silent

Ints = NDArray[np.int64]
Pair = tuple[Sequence[int], Sequence[int]]
_AT_ONCE = 4_000_000  # pairs; what is computed of them at a time takes 32 bytes each


@dataclass(frozen=True)
class Likely:
    """Pairs of words that stand in a row together, by source word, the likeliest target word first.

    source, target: int64 [U]. probability: float64 [U], t(target | source).
    """

    source: Ints
    target: Ints
    probability: NDArray[np.float64]


def pair_count(row: Pair) -> int:
    """Return how many pairs of words a row has, those with NULL too."""
    return (len(row[0]) + 1) * len(row[1])


def learn(
    rows: Sequence[Pair],
    sources: int,
    targets: int,
    iterations: int,
    tell: Progress = silent,
) -> Likely:
    """Return what Model 1 finds in `rows` (source ids, target ids); no row without target words counts.

    Args:
        rows: of token ids.
        sources: S, the number of source words.
        targets: V, the number of target words.
        iterations: of expectation maximization; the first begins with all pairs equally likely.
        tell: is told how many of them are done.
    """
    chunks, keys = _pairs(rows, sources, targets)
    source, target = keys // targets, keys % targets
    chance = np.ones(len(keys))
    for done in range(iterations):
        tell(done, iterations, "learning which words go together")
        counts = np.zeros(len(keys))
        for pair, place in chunks:
            found = chance[pair]
            found /= np.bincount(place, found)[place]
            counts += np.bincount(pair, found, len(keys))
        chance = counts / np.bincount(source, counts, sources + 1)[source]
    real = source < sources
    order = np.lexsort((target[real], -chance[real], source[real]))
    return Likely(source[real][order], target[real][order], chance[real][order])


def best(likely: Likely, sources: int, most: int, without: Ints) -> list[Ints]:
    """Return for each of the source words its `most` likeliest target words; none of those in `without`."""
    kept = ~np.isin(likely.target, without)
    ends = np.searchsorted(likely.source[kept], np.arange(sources + 1))
    target = likely.target[kept]
    return [target[begin : min(end, begin + most)] for begin, end in pairwise(ends)]


def _pairs(rows: Sequence[Pair], sources: int, targets: int) -> tuple[list[Any], Ints]:
    """Return for each chunk of rows its pairs and their target places, int32 each, and keys int64 [U].

    A pair is the number of its key, source * targets + target; the source of NULL is `sources`.
    """
    parts, keys = [], np.zeros(0, dtype=np.int64)
    at = 0
    while at < len(rows):
        size, begin = 0, at
        while at < len(rows) and (at == begin or size + pair_count(rows[at]) <= _AT_ONCE):
            size += pair_count(rows[at])
            at += 1
        found, place = _of_rows(rows[begin:at], sources, targets)
        own, number = np.unique(found, return_inverse=True)
        parts.append((own, number.astype(np.int32), place))
        keys = np.union1d(keys, own)
    return [(np.searchsorted(keys, own).astype(np.int32)[n], place) for own, n, place in parts], keys


def _of_rows(rows: Sequence[Pair], sources: int, targets: int) -> tuple[Ints, NDArray[np.int32]]:
    """Return the keys of all pairs, int64 [P], and the number of the target place of each, int32 [P]."""
    words = np.concatenate([[*source, sources] for source, _ in rows]).astype(np.int64)
    lengths = np.array([len(source) + 1 for source, _ in rows])
    begins = np.cumsum(lengths) - lengths
    owner = np.repeat(np.arange(len(rows)), [len(target) for _, target in rows])  # [T]
    each = lengths[owner]
    place = np.repeat(np.arange(len(owner), dtype=np.int32), each)
    inside = np.arange(len(place)) - np.repeat(np.cumsum(each) - each, each)
    said = np.concatenate([np.asarray(target, dtype=np.int64) for _, target in rows])
    return words[begins[owner][place] + inside] * targets + said[place], place
