"""Mean squared difference of attention scores before the softmax.

Shapes: B = batch, H = heads, Q = queries, K = keys.
"""

from __future__ import annotations

from torch import Tensor


def attention_loss(student: Tensor, teacher: Tensor, visible: Tensor, mask: Tensor) -> Tensor:
    """Return the mean squared difference over visible keys, heads and queries.

    Jiao et al. 2020, TinyBERT, arXiv:1909.10351, equation 7. task_distill.py sets masked scores (-1e2 and
    below) to 0 in both models and divides by all entries; here each query's sum is divided by the number of
    its visible keys. Without padding the two are equal; this form does not depend on the padded length.

    Args:
        student: float [B, H, Q, K], scaled, with position biases, without the mask.
        teacher: float [B, H, Q, K]; no gradient flows into it.
        visible: bool, broadcastable to [B, 1, Q, K]: which keys a query sees.
        mask: bool [B, Q], false for padded queries.

    Returns:
        float32 scalar.
    """
    squares = (student.float() - teacher.detach().float()).square().mean(dim=1, keepdim=True)
    visible = visible.expand_as(squares)
    each = squares.masked_fill(~visible, 0.0).sum(dim=-1) / visible.sum(dim=-1).clamp(min=1)
    return each.squeeze(1).masked_fill(~mask, 0.0).sum() / mask.sum().clamp(min=1)
