"""IBM Model 1 on token ids: the target tokens that each source token makes likely.

t(target | source) is estimated by expectation maximization over pairs of texts; every target token comes
from one of the source tokens of its sample, or from the token NULL, which takes tokens without a source.

Source: Brown et al. 1993, The Mathematics of Statistical Machine Translation, Computational Linguistics
19(2), section 4.

Shapes: P = pairs of a source and a target token in all samples, T = target tokens in all samples, U =
different pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.core.stage import Progress, no_progress

IntArray = NDArray[np.int64]
TokenPair = tuple[Sequence[int], Sequence[int]]
_CHUNK_PAIRS = 4_000_000  # pairs per chunk; each takes 32 bytes of working memory


@dataclass(frozen=True)
class TranslationTable:
    """Pairs of tokens that occur in a sample together, by source token, the likeliest target token first.

    source, target: int64 [U]. probability: float64 [U], t(target | source).
    """

    source: IntArray
    target: IntArray
    probability: NDArray[np.float64]


def count_word_pairs(row: TokenPair) -> int:
    """Return the number of token pairs of a sample, including those with NULL."""
    return (len(row[0]) + 1) * len(row[1])


def fit_ibm_model1(
    rows: Sequence[TokenPair],
    num_sources: int,
    num_targets: int,
    iterations: int,
    progress: Progress = no_progress,
) -> TranslationTable:
    """Return the translation table of Model 1 for `rows` (source ids, target ids); empty targets are skipped.

    Args:
        rows: token ids of samples.
        num_sources: S, the size of the source vocabulary.
        num_targets: V, the size of the target vocabulary.
        iterations: of expectation maximization; the first starts with all pairs equally likely.
        progress: called with the number of finished iterations.
    """
    chunks, keys = _chunk_pairs(rows, num_sources, num_targets)
    source, target = keys // num_targets, keys % num_targets
    chance = np.ones(len(keys))
    for done in range(iterations):
        progress(done, iterations, "estimating translation probabilities")
        counts = np.zeros(len(keys))
        for pair, place in chunks:
            found = chance[pair]
            found /= np.bincount(place, found)[place]
            counts += np.bincount(pair, found, len(keys))
        chance = counts / np.bincount(source, counts, num_sources + 1)[source]
    real = source < num_sources
    order = np.lexsort((target[real], -chance[real], source[real]))
    return TranslationTable(source[real][order], target[real][order], chance[real][order])


def top_targets(table: TranslationTable, num_sources: int, top_k: int, excluded: IntArray) -> list[IntArray]:
    """Return the `top_k` likeliest target tokens of each source token, without those in `excluded`."""
    kept = ~np.isin(table.target, excluded)
    ends = np.searchsorted(table.source[kept], np.arange(num_sources + 1))
    target = table.target[kept]
    return [target[begin : min(end, begin + top_k)] for begin, end in pairwise(ends)]


def _chunk_pairs(rows: Sequence[TokenPair], sources: int, targets: int) -> tuple[list[Any], IntArray]:
    """Return the pairs of each chunk of samples with their target positions, int32 each, and keys int64 [U].

    A pair is the number of its key, source * targets + target; the source of NULL is `sources`.
    """
    parts, keys = [], np.zeros(0, dtype=np.int64)
    at = 0
    while at < len(rows):
        size, begin = 0, at
        while at < len(rows) and (at == begin or size + count_word_pairs(rows[at]) <= _CHUNK_PAIRS):
            size += count_word_pairs(rows[at])
            at += 1
        found, place = _pair_keys(rows[begin:at], sources, targets)
        own, number = np.unique(found, return_inverse=True)
        parts.append((own, number.astype(np.int32), place))
        keys = np.union1d(keys, own)
    return [(np.searchsorted(keys, own).astype(np.int32)[n], place) for own, n, place in parts], keys


def _pair_keys(rows: Sequence[TokenPair], sources: int, targets: int) -> tuple[IntArray, NDArray[np.int32]]:
    """Return the keys of all pairs, int64 [P], and the target position of each, int32 [P]."""
    words = np.concatenate([[*source, sources] for source, _ in rows]).astype(np.int64)
    lengths = np.array([len(source) + 1 for source, _ in rows])
    begins = np.cumsum(lengths) - lengths
    owner = np.repeat(np.arange(len(rows)), [len(target) for _, target in rows])  # [T]
    each = lengths[owner]
    place = np.repeat(np.arange(len(owner), dtype=np.int32), each)
    inside = np.arange(len(place)) - np.repeat(np.cumsum(each) - each, each)
    said = np.concatenate([np.asarray(target, dtype=np.int64) for _, target in rows])
    return words[begins[owner][place] + inside] * targets + said[place], place
