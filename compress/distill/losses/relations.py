"""Self-attention relations (MiniLMv2): similarities between tokens by queries, keys and values.

Shapes: B = batch, S = tokens, W = width of all heads together, R = relation heads.
"""

from __future__ import annotations

import torch
from torch import Tensor


def relation_loss(student: Tensor, teacher: Tensor, mask: Tensor, heads: int, causal: bool) -> Tensor:
    """Return KL(teacher's relations || student's), the mean over relation heads and tokens in `mask`.

    Wang et al. 2021, MiniLMv2, arXiv:2012.15828, equations 4 to 7, for one of queries, keys and values: all
    heads are concatenated and split again into R relation heads, and a relation is
    softmax(A A^T / sqrt(W / R)). So widths and numbers of heads may differ.

    Args:
        student: float [B, S, W].
        teacher: float [B, S, another W]; no gradient flows into it.
        mask: bool [B, S]; false for padding, which takes part in no relation.
        heads: R, which divides both widths.
        causal: whether a token is compared only with tokens before it, as in a decoder.

    Returns:
        float32 scalar, nats.
    """
    hidden = ~mask[:, None, None, :]
    if causal:
        size = mask.shape[1]
        later = torch.ones(size, size, dtype=torch.bool, device=mask.device).triu(1)
        hidden = hidden | later
    ours = _relation_log_probs(student, heads, hidden)
    theirs = _relation_log_probs(teacher.detach(), heads, hidden)
    # hidden entries add nothing
    terms = torch.where(hidden, 0.0, theirs.exp() * (theirs - ours).masked_fill(hidden, 0.0))
    each = terms.sum(dim=-1).mean(dim=1)
    return each.masked_fill(~mask, 0.0).sum() / mask.sum().clamp(min=1)


def _relation_log_probs(vectors: Tensor, heads: int, hidden: Tensor) -> Tensor:
    """Return log-probabilities [B, R, S, S] over the tokens that are not hidden."""
    batch, size, width = vectors.shape
    split = vectors.float().reshape(batch, size, heads, width // heads).transpose(1, 2)
    with torch.autocast(vectors.device.type, enabled=False):  # otherwise matmul is bfloat16
        scores = split @ split.transpose(-1, -2) / (width / heads) ** 0.5
    # finite, so that a row of padding only has no NaN gradient
    found: Tensor = scores.masked_fill(hidden, torch.finfo(scores.dtype).min).log_softmax(dim=-1)
    return found
