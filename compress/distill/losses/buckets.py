"""The divergence from a teacher of whom the largest logits are known, and of all others only their sum.

The k largest stand each in a bucket of its own, all others together in one more, the tail: what is compared
are k + 1 probabilities. Without the tail the student would learn that nothing but the k words is possible
(Anshumann et al. 2025, Sparse Logit Sampling, arXiv:2503.16870, who show the bias and call the tail a ghost
token). Of the other words the student keeps its own proportions.

Shapes: N = positions, V = vocabulary, k = words that are kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from smelt.compress.train.losses.of_tokens import in_blocks

_FLOOR = -1e4  # of the teacher's log-probabilities, as in `mixed_loss`


@dataclass(frozen=True)
class Buckets:
    """What is known of a teacher's logits at the temperature T.

    logits: float32 [..., k + 1], divided by T: the largest ones, and last the logarithm of the sum of the
    exponentials of all others. ids: int64 [..., k], which words the largest are, each once.
    """

    logits: Tensor
    ids: Tensor


def buckets_of(logits: Tensor, top: int, temperature: float) -> Buckets:
    """Return the buckets of whole `logits`, float [..., V] with V > `top`, relative to the largest."""
    values, ids = logits.float().topk(top, dim=-1)
    others = logits.float().scatter(-1, ids, float("-inf")) - values[..., :1]
    rest = (others / temperature).logsumexp(dim=-1, keepdim=True)
    return Buckets(torch.cat([(values - values[..., :1]) / temperature, rest], dim=-1), ids)


def _compare(z: Tensor, theirs: Tensor, ids: Tensor, weights: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Return the two weighted divergences of each row, [rows, 2], and the slope of their sum in z, [rows, V].

    With b(j) the bucket of word j and r the student's proportions within the tail,
    d KL(p || q) / dz_j = q_j - p_b(j) (of the tail q_j - p_tail r_j), and
    d KL(q || p) / dz_j = q_j (log q_b(j) - log p_b(j) - KL).

    Args:
        z: the student's logits over T, float32 [rows, V].
        theirs: the teacher's log-probabilities of the buckets, float32 [rows, k + 1].
        ids: int64 [rows, k].
        weights: of KL(teacher || student) and KL(student || teacher).
    """
    forward, reverse = weights
    logq = z.log_softmax(dim=1)
    within = logq.scatter(1, ids, float("-inf"))  # the tail's words, relative to all
    tail = within.logsumexp(dim=1, keepdim=True)
    ours = torch.cat([logq.gather(1, ids), tail], dim=1)
    p, q, words = theirs.exp(), ours.exp(), logq.exp()
    values, slope = z.new_zeros(len(z), 2), torch.zeros_like(z)
    if forward:
        values[:, 0] = forward * torch.where(p > 0, p * (theirs - ours), 0.0).sum(dim=1)
        own = words - p[:, -1:] * (within - tail).exp()
        slope += forward * own.scatter_(1, ids, (q - p)[:, :-1])
    if reverse:
        ratio = torch.where(q > 0, ours - theirs.clamp(min=_FLOOR), 0.0)
        each = (q * ratio).sum(dim=1, keepdim=True)
        values[:, 1] = reverse * each.squeeze(1)
        turned = words * (ratio[:, -1:] - each)
        slope += reverse * turned.scatter_(1, ids, (q * (ratio - each))[:, :-1])
    return values, slope


def bucket_loss(
    logits: Tensor,
    labels: Tensor,
    teacher: Buckets,
    *,
    temperature: float,
    logits_weight: float,
    reverse_weight: float = 0.0,
    told: dict[str, Tensor] | None = None,
) -> Tensor:
    """Return logits_weight * T^2 * KL(teacher || student) + reverse_weight * T^2 * KL(student || teacher).

    Both are over the buckets, and means over the positions whose label is not -100.

    Args:
        logits: float [..., V] of the student.
        labels: int64 [...], which say what counts.
        teacher: made at the same temperature; no gradient flows into it.
        temperature: T.
        logits_weight: of the first divergence.
        reverse_weight: of the other.
        told: gets the parts that count, `logits` and `reverse_kl`, detached float32 scalars.

    Returns:
        float32 scalar, nats.
    """
    weights = (logits_weight, reverse_weight)
    k = teacher.ids.shape[-1]
    theirs, ids = teacher.logits.detach().reshape(-1, k + 1), teacher.ids.reshape(-1, k)

    def of_rows(z: Tensor, rows: slice, mask: Tensor) -> tuple[Tensor, Tensor]:
        values, slope = _compare(z / temperature, theirs[rows].float().log_softmax(dim=1), ids[rows], weights)
        return temperature**2 * values[mask].double().sum(dim=0), slope.mul_(temperature)

    loss, parts = in_blocks(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), 2, of_rows)
    if told is not None:
        names = ("logits", "reverse_kl")
        told.update({n: part for n, part, weight in zip(names, parts, weights, strict=True) if weight})
    return loss
