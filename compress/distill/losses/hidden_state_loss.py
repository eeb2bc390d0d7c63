"""Mean squared error of hidden states or embeddings, token by token.

Shapes: B = batch, S = tokens, D = width.
"""

from __future__ import annotations

from torch import Tensor


def hidden_state_loss(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    """Return the mean squared difference over the width and the tokens where `mask` is true.

    Jiao et al. 2020, TinyBERT, arXiv:1909.10351, equations 8 and 9; task_distill.py also averages over
    padding, which makes the loss depend on the other samples of a batch.

    Args:
        student: float [B, S, D], projected to the teacher's width if they differ.
        teacher: float [B, S, D]; no gradient flows into it.
        mask: bool [B, S], false for padding.

    Returns:
        float32 scalar.
    """
    squares = (student.float() - teacher.detach().float()).square().mean(dim=-1)
    return squares.masked_fill(~mask, 0.0).sum() / mask.sum().clamp(min=1)
