"""How alike the tokens of a text are to each other, by their queries, keys and values.

Shapes: B = batch, S = tokens, W = width of all heads together, R = relation heads.
"""

from __future__ import annotations

import torch
from torch import Tensor


def relation_loss(student: Tensor, teacher: Tensor, there: Tensor, heads: int, causal: bool) -> Tensor:
    """Return KL(teacher's relations || student's), mean over relation heads and the tokens that are `there`.

    Wang et al. 2021, MiniLMv2, arXiv:2012.15828, equations 4 to 7, for one of queries, keys and values: all
    heads stand behind each other and are cut anew into R, whatever the number of attention heads, and a
    relation is softmax(A A^T / sqrt(W / R)). So no width and no number of heads must agree.

    Args:
        student: float [B, S, W].
        teacher: float [B, S, another W]; no gradient flows into it.
        there: bool [B, S]; padding is no token that another one could be like.
        heads: R, which divides both widths.
        causal: whether a token is compared with those before it only, as a decoder sees them.

    Returns:
        float32 scalar, nats.
    """
    hidden = ~there[:, None, None, :]
    if causal:
        size = there.shape[1]
        later = torch.ones(size, size, dtype=torch.bool, device=there.device).triu(1)
        hidden = hidden | later
    ours = _relations(student, heads, hidden)
    theirs = _relations(teacher.detach(), heads, hidden)
    # what is hidden adds nothing
    terms = torch.where(hidden, 0.0, theirs.exp() * (theirs - ours).masked_fill(hidden, 0.0))
    each = terms.sum(dim=-1).mean(dim=1)
    return each.masked_fill(~there, 0.0).sum() / there.sum().clamp(min=1)


def _relations(vectors: Tensor, heads: int, hidden: Tensor) -> Tensor:
    """Return log-probabilities [B, R, S, S] over the tokens that are not hidden."""
    batch, size, width = vectors.shape
    split = vectors.float().reshape(batch, size, heads, width // heads).transpose(1, 2)
    with torch.autocast(vectors.device.type, enabled=False):  # or the product would be bfloat16
        scores = split @ split.transpose(-1, -2) / (width / heads) ** 0.5
    # finite, so that a row of padding alone has no gradient that is not a number
    found: Tensor = scores.masked_fill(hidden, torch.finfo(scores.dtype).min).log_softmax(dim=-1)
    return found
