"""Quality of sentence embeddings: cosines of pairs against their scores, and of each with the baseline's.

Shapes: n = pairs, T = texts, D = dimension of a vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smelt.core.errors import InputError, did_you_mean
from smelt.core.files import json_hash
from smelt.evaluate.label_quality import score_regression
from smelt.evaluate.quality import _BOOTSTRAP_SIGNATURE, MetricScore, _score
from smelt.evaluate.significance import Statistics

AGREEMENT_METRIC = "agreement"
CORRELATION_METRICS = ("spearman", "pearson")
EMBEDDING_METRICS = (*CORRELATION_METRICS, AGREEMENT_METRIC)

Vectors = NDArray[np.float32]


@dataclass(frozen=True)
class ReferenceVectors:
    """The vectors that others are compared with, float32 [T, D], and the key of their model."""

    vectors: Vectors
    key: str


def paired_cosines(one: Vectors, other: Vectors) -> NDArray[np.float64]:
    """Return the cosine of each row of `one` with the same row of `other`: [n, D], [n, D] -> [n].

    The cosine of a zero vector is set to 0.
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
    reference: ReferenceVectors | None = None,
) -> dict[str, MetricScore]:
    """Score sentence embeddings.

    spearman and pearson are the correlations (times 100) of the cosines of pairs with their scores, as STS
    benchmarks report them. agreement is the mean cosine (times 100) of each text's vector with the
    reference's; it needs no scores. Metrics that cannot be computed are left out: correlations without
    `gold`, agreement without a reference or where its vectors have another dimension.

    Args:
        metrics: names from VECTOR_METRICS; the result has their order.
        vectors: float32 [T, D]; for pairs first the n first texts, then the n second ones.
        texts: T texts, in the same order.
        gold: n scores, where T is 2 n.
        reference: vectors of the same texts.

    Raises:
        InputError: an unknown metric, or no texts.
    """
    for metric in metrics:
        if metric not in EMBEDDING_METRICS:
            known = ", ".join(EMBEDDING_METRICS)
            raise InputError(
                f"Unknown embedding metric '{metric}'; known:"
                f" {known}.{did_you_mean(metric, EMBEDDING_METRICS)}",
                code="unknown-metric",
            )
    if not len(texts) == len(vectors) > 0:
        raise InputError(
            f"{len(vectors)} vectors for {len(texts)} texts; one for each text is required.",
            code="count-mismatch",
        )
    found: dict[str, MetricScore] = {}
    for metric in metrics:
        if metric == AGREEMENT_METRIC and reference is not None and reference.vectors.shape == vectors.shape:
            found[metric] = _score_agreement(vectors, texts, reference)
        elif metric in CORRELATION_METRICS and gold is not None:
            half = len(vectors) // 2
            found |= score_regression([metric], paired_cosines(vectors[:half], vectors[half:]).tolist(), gold)
    return found


def _score_agreement(vectors: Vectors, texts: Sequence[str], reference: ReferenceVectors) -> MetricScore:
    signature = f"mean cosine|x100|reference:{reference.key[:12]}|{_BOOTSTRAP_SIGNATURE}"
    rows: list[list[int | float]] = [[value] for value in paired_cosines(vectors, reference.vectors).tolist()]
    examples = json_hash(list(texts))
    return _score(Statistics(metric=AGREEMENT_METRIC, signature=signature, examples=examples, rows=rows))
