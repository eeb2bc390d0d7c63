"""What a sentence embedder is trained on: the order of pairs' scores, and the vectors of a teacher.

Shapes: B = pairs or texts, T = texts of a batch (2 B for pairs: first all first texts), D = width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smelt.compress.train.data import inputs_of

SCALE = 20.0  # of cosines, as sentence-transformers' CoSENTLoss has it


def vectors_of(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the vectors of a batch's texts, float32 [T, D]; `labels` are not fed."""
    out: Any = model(**inputs_of(batch))
    vectors: Tensor = out.sentence_embedding
    return vectors.float()


def order_loss(vectors: Tensor, scores: Tensor) -> Tensor:
    """Return CoSENT: log(1 + sum over pairs i, j with score_i > score_j of exp(20 (cos_j - cos_i))).

    Only the order of the scores counts, so they may be on any scale. 0 where all of a batch are equal.
    Huang et al. 2024, CoSENT: Consistent Sentence Embedding via Similarity Ranking, IEEE/ACM TASLP 32;
    sentence-transformers' CoSENTLoss.

    Args:
        vectors: float [2 B, D].
        scores: float [B] or [B, 1].
    """
    first, second = vectors.chunk(2)
    cosines = SCALE * F.cosine_similarity(first, second)
    scores = scores.flatten()
    higher = scores[:, None] > scores[None, :]
    wrong = (cosines[None, :] - cosines[:, None])[higher]
    return torch.cat([wrong.new_zeros(1), wrong]).logsumexp(dim=0)


def distance_loss(vectors: Tensor, teacher: Tensor) -> Tensor:
    """Return the squared distance of each vector from the teacher's, mean over texts.

    It is D times torch's MSELoss, which Reimers & Gurevych 2020 (arXiv:2004.09813) train students with, so
    that it means the same for vectors of any width: 2 - 2 cos for those of length 1.

    Args:
        vectors: float [T, D].
        teacher: float [T, D]; no gradient flows into it.
    """
    return (vectors - teacher.detach()).square().sum(dim=1).mean()


def similarity_loss(vectors: Tensor, teacher: Tensor) -> Tensor:
    """Return the mean squared difference of the cosines of all two texts of a batch, student against teacher.

    The vectors themselves, and how many numbers they have, do not matter: Tung & Mori 2019
    (arXiv:1907.09682), with cosines for the rows of its similarity matrix.

    Args:
        vectors: float [T, D].
        teacher: float [T, any width]; no gradient flows into it.
    """
    return F.mse_loss(_cosines(vectors), _cosines(teacher.detach()))


def _cosines(vectors: Tensor) -> Tensor:
    """Return the cosines of all with all, [T, T]."""
    directions = F.normalize(vectors.to(torch.promote_types(vectors.dtype, torch.float32)), dim=1)
    with torch.autocast(vectors.device.type, enabled=False):  # or the product would be bfloat16
        return directions @ directions.t()
