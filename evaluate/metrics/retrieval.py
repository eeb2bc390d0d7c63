"""Recall of retrieval among embeddings of images and texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from smelt.evaluate.metrics.metric import BOOTSTRAP_SIGNATURE, Array, ExampleRows, Metric, Rows, Samples

RetrievedKind = Literal["image", "text"]


@dataclass(frozen=True)
class RetrievalSamples(Samples):
    """The similarities of images and texts, float64 [images, texts], and which match, bool of that shape."""

    similarities: Array
    matches: Any


def match_ranks(similarities: Array, matches: Any) -> list[int]:
    """Return for each query the rank, from 1, of its best match: [queries, candidates] -> [queries].

    Candidates as similar as the match count as better, so that equal embeddings find nothing.
    """
    best = np.where(matches, similarities, -np.inf).max(axis=1, keepdims=True)
    ranks = 1 + ((similarities >= best) & ~matches).sum(axis=1)
    return [int(rank) for rank in ranks]


@dataclass(frozen=True, kw_only=True)
class RetrievalRecall(Metric[RetrievalSamples]):
    """Rows, K = 2: whether one of the first `k` candidates matches, and the rank of the first that does.

    retrieved: what the candidates are; the queries are of the other kind.
    """

    samples = (RetrievalSamples,)
    n_unit = "query"
    retrieved: RetrievedKind
    k: int

    def example_rows(self, samples: RetrievalSamples, settings: Mapping[str, Any]) -> ExampleRows:
        """Return the hit and the rank of each query; chance: of candidates in random order."""
        similarities, matches = samples.similarities, samples.matches
        if self.retrieved == "image":
            similarities, matches = similarities.T, matches.T
        ranks = match_ranks(similarities, matches)
        rows: Rows = [[int(rank <= self.k), rank] for rank in ranks]
        pool = similarities.shape[1]
        chance = 100 * float(np.mean([_random_hit(pool, int(n), self.k) for n in matches.sum(axis=1)]))
        return ExampleRows(rows, f"pool:{pool}|ties:worst|{BOOTSTRAP_SIGNATURE}", chance=chance)


def _random_hit(pool: int, num_matches: int, k: int) -> float:
    """Return the probability that `k` of `pool` candidates, drawn at random, have one of the matches."""
    misses = [(pool - num_matches - i) / (pool - i) for i in range(min(k, pool))]
    return 1 - float(np.prod(np.maximum(misses, 0)))


def _recall(retrieved: RetrievedKind, k: int) -> RetrievalRecall:
    query = "images" if retrieved == "text" else "texts"
    return RetrievalRecall(
        name=f"{retrieved}_retrieval_recall@{k}",
        title=f"{retrieved.title()} retrieval R@{k}",
        unit="%",
        description=f"{query} with a matching {retrieved} among the {k} most similar ones",
        tasks=("image-text",),
        kind="mean",
        retrieved=retrieved,
        k=k,
    )


RETRIEVAL_RECALLS: Sequence[RetrievalRecall] = tuple(
    _recall(retrieved, k) for k in (1, 5) for retrieved in ("text", "image")
)
