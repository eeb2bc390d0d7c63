"""Losses of a sentence embedder: the order of pairs' scores, and a teacher's embeddings.

Shapes: B = pairs or texts, T = texts of a batch (2 B for pairs: all first texts first), D = width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smelt.compress.train.encoded_samples import model_inputs

COSENT_SCALE = 20.0  # scale of cosines, as in sentence-transformers' CoSENTLoss


def batch_sentence_vectors(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the embeddings of a batch's texts, float32 [T, D]; `labels` are not passed to the model."""
    out: Any = model(**model_inputs(batch))
    vectors: Tensor = out.sentence_embedding
    return vectors.float()


def cosent_loss(vectors: Tensor, scores: Tensor) -> Tensor:
    """Return CoSENT: log(1 + sum over pairs i, j with score_i > score_j of exp(20 (cos_j - cos_i))).

    Only the order of the scores counts, so they may be on any scale. 0 if all scores of a batch are equal.
    Huang et al. 2024, CoSENT: Consistent Sentence Embedding via Similarity Ranking, IEEE/ACM TASLP 32;
    sentence-transformers' CoSENTLoss.

    Args:
        vectors: float [2 B, D].
        scores: float [B] or [B, 1].
    """
    first, second = vectors.chunk(2)
    cosines = COSENT_SCALE * F.cosine_similarity(first, second)
    scores = scores.flatten()
    higher = scores[:, None] > scores[None, :]
    wrong = (cosines[None, :] - cosines[:, None])[higher]
    return torch.cat([wrong.new_zeros(1), wrong]).logsumexp(dim=0)


def vector_distance_loss(vectors: Tensor, teacher: Tensor) -> Tensor:
    """Return the squared distance of each vector from the teacher's, mean over texts.

    It is D times torch's MSELoss, which Reimers & Gurevych 2020 (arXiv:2004.09813) train students with, so
    that it is independent of the width: 2 - 2 cos for vectors of length 1.

    Args:
        vectors: float [T, D].
        teacher: float [T, D]; no gradient flows into it.
    """
    return (vectors - teacher.detach()).square().sum(dim=1).mean()


def pairwise_similarity_loss(vectors: Tensor, teacher: Tensor) -> Tensor:
    """Return the mean squared difference of all pairwise cosines in a batch, student against teacher.

    Works for vectors of different widths: Tung & Mori 2019 (arXiv:1907.09682), with cosines for the rows of
    its similarity matrix.

    Args:
        vectors: float [T, D].
        teacher: float [T, any width]; no gradient flows into it.
    """
    return F.mse_loss(_cosine_matrix(vectors), _cosine_matrix(teacher.detach()))


def _cosine_matrix(vectors: Tensor) -> Tensor:
    """Return all pairwise cosines, [T, T]."""
    directions = F.normalize(vectors.to(torch.promote_types(vectors.dtype, torch.float32)), dim=1)
    with torch.autocast(vectors.device.type, enabled=False):  # otherwise matmul is bfloat16
        return directions @ directions.t()
