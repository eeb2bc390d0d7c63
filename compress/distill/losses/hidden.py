"""The distance of hidden states (or embeddings), place by place.

Shapes: B = batch, S = tokens, D = width.
"""

from __future__ import annotations

from torch import Tensor


def hidden_loss(student: Tensor, teacher: Tensor, there: Tensor) -> Tensor:
    """Return the mean squared difference, over the tokens that are `there` and the width.

    Jiao et al. 2020, TinyBERT, arXiv:1909.10351, equations 8 and 9; task_distill.py takes the mean over
    padding as well, which would make it depend on what else is in a batch.

    Args:
        student: float [B, S, D], projected to the teacher's width where that is another.
        teacher: float [B, S, D]; no gradient flows into it.
        there: bool [B, S], false for padding.

    Returns:
        float32 scalar.
    """
    squares = (student.float() - teacher.detach().float()).square().mean(dim=-1)
    return squares.masked_fill(~there, 0.0).sum() / there.sum().clamp(min=1)
