"""Cosine loss of hidden states, token by token.

Shapes: B = batch, S = tokens, D = width.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def cosine_loss(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of 1 - cos(student, teacher) over the tokens where `mask` is true.

    Sanh et al. 2019, DistilBERT, arXiv:1910.01108: CosineEmbeddingLoss with target 1 on the last hidden
    states (distiller.py, alpha_cos).

    Args:
        student: float [B, S, D].
        teacher: float [B, S, D]; no gradient flows into it.
        mask: bool [B, S], false for padding.

    Returns:
        float32 scalar, 0 to 2.
    """
    apart = 1 - F.cosine_similarity(student.float(), teacher.detach().float(), dim=-1)
    return apart.masked_fill(~mask, 0.0).sum() / mask.sum().clamp(min=1)
