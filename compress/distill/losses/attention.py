"""The distance of attention scores, before their softmax.

Shapes: B = batch, H = heads, Q = queries, K = keys.
"""

from __future__ import annotations

from torch import Tensor


def attention_loss(student: Tensor, teacher: Tensor, seen: Tensor, there: Tensor) -> Tensor:
    """Return the mean squared difference over the keys that a query sees, its heads, and the queries.

    Jiao et al. 2020, TinyBERT, arXiv:1909.10351, equation 7. task_distill.py sets what the mask hides (scores
    of -1e2 and below) to 0 in both, so that it adds nothing, and divides by all entries; here each query's
    sum is divided by the number of keys that it sees. Where nothing is padded that is the same, and it does
    not depend on how wide a batch is.

    Args:
        student: float [B, H, Q, K], scaled, with biases by distance, without the mask.
        teacher: float [B, H, Q, K]; no gradient flows into it.
        seen: bool, [B, 1, Q, K] or what can be broadcast to it: which keys a query sees.
        there: bool [B, Q], false for queries that are padding.

    Returns:
        float32 scalar.
    """
    squares = (student.float() - teacher.detach().float()).square().mean(dim=1, keepdim=True)
    seen = seen.expand_as(squares)
    each = squares.masked_fill(~seen, 0.0).sum(dim=-1) / seen.sum(dim=-1).clamp(min=1)
    return each.squeeze(1).masked_fill(~there, 0.0).sum() / there.sum().clamp(min=1)
