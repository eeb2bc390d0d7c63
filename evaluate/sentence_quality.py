"""Quality of vectors of texts: cosines of pairs against their scores, and of each with a baseline's.

Shapes: n = pairs, T = texts, D = numbers of a vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smelt.core.errors import InputError, nearest
from smelt.core.files import hash_of
from smelt.evaluate.label_quality import score_numbers
from smelt.evaluate.quality import _BOOTSTRAP, Score, _score
from smelt.evaluate.significance import Statistics

AGREEMENT = "agreement"
SCORE_METRICS = ("spearman", "pearson")
VECTOR_METRICS = (*SCORE_METRICS, AGREEMENT)

Vectors = NDArray[np.float32]


@dataclass(frozen=True)
class Reference:
    """The vectors that others are compared with, float32 [T, D], and the key of what made them."""

    vectors: Vectors
    key: str


def cosines(one: Vectors, other: Vectors) -> NDArray[np.float64]:
    """Return the cosine of each row of `one` with the same row of `other`: [n, D], [n, D] -> [n].

    A vector of zeros has no direction: its cosine reads 0.
    """
    a, b = one.astype(np.float64), other.astype(np.float64)
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    products = (a * b).sum(axis=1)
    found = np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0)
    return np.asarray(np.clip(found, -1, 1))


def score_vectors(
    metrics: Sequence[str],
    vectors: Vectors,
    texts: Sequence[str],
    gold: Sequence[float] | None = None,
    reference: Reference | None = None,
) -> dict[str, Score]:
    """Score the vectors of texts.

    spearman and pearson are the correlations (times 100) of the cosines of pairs with their scores, as STS
    benchmarks report them. agreement is the mean cosine (times 100) of each text's vector with the one of
    the reference; it needs no scores. What cannot be computed is left out: correlations without `gold`,
    agreement without a reference or where its vectors have another width.

    Args:
        metrics: names from VECTOR_METRICS; the result has their order.
        vectors: float32 [T, D]; of pairs first the n first texts, then the n second ones.
        texts: T texts, in the same order.
        gold: n scores, where T is 2 n.
        reference: of the same texts.

    Raises:
        InputError: an unknown metric, or no texts.
    """
    for metric in metrics:
        if metric not in VECTOR_METRICS:
            known = ", ".join(VECTOR_METRICS)
            raise InputError(
                f"Unknown metric '{metric}' here; known: {known}.{nearest(metric, VECTOR_METRICS)}",
                code="unknown-metric",
            )
    if not len(texts) == len(vectors) > 0:
        raise InputError(
            f"{len(vectors)} vectors for {len(texts)} texts; there must be one for each.",
            code="count-mismatch",
        )
    found: dict[str, Score] = {}
    for metric in metrics:
        if metric == AGREEMENT and reference is not None and reference.vectors.shape == vectors.shape:
            found[metric] = _agreement(vectors, texts, reference)
        elif metric in SCORE_METRICS and gold is not None:
            half = len(vectors) // 2
            found |= score_numbers([metric], cosines(vectors[:half], vectors[half:]).tolist(), gold)
    return found


def _agreement(vectors: Vectors, texts: Sequence[str], reference: Reference) -> Score:
    signature = f"mean cosine|x100|reference:{reference.key[:12]}|{_BOOTSTRAP}"
    rows: list[list[int | float]] = [[value] for value in cosines(vectors, reference.vectors).tolist()]
    examples = hash_of(list(texts))
    return _score(Statistics(metric=AGREEMENT, signature=signature, examples=examples, rows=rows))
