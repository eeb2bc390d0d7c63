"""KL divergence from a teacher of which only the k largest logits and the sum of the others are known.

Each of the k largest logits has a bucket of its own, all others share one bucket, the tail: k + 1
probabilities are compared. Without the tail the student would learn that only the k tokens are possible
(Anshumann et al. 2025, Sparse Logit Sampling, arXiv:2503.16870, who show the bias and call the tail a ghost
token). Within the tail the student keeps its own proportions.

Shapes: N = positions, V = vocabulary, k = kept logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from smelt.compress.train.losses.tokens import blockwise_loss

_MIN_LOG_PROBABILITY = -1e4  # of the teacher's log-probabilities, as in `mixed_loss`


@dataclass(frozen=True)
class TopKLogits:
    """Top-k logits of a teacher at temperature T.

    logits: float32 [..., k + 1], divided by T: the k largest, then the logarithm of the sum of the
    exponentials of all others. ids: int64 [..., k], token ids of the largest, each once.
    """

    logits: Tensor
    ids: Tensor


def top_k_logits(logits: Tensor, top: int, temperature: float) -> TopKLogits:
    """Return the top-k buckets of `logits`, float [..., V] with V > `top`, relative to the largest logit."""
    values, ids = logits.float().topk(top, dim=-1)
    others = logits.float().scatter(-1, ids, float("-inf")) - values[..., :1]
    rest = (others / temperature).logsumexp(dim=-1, keepdim=True)
    return TopKLogits(torch.cat([(values - values[..., :1]) / temperature, rest], dim=-1), ids)


def _weighted_divergences(
    z: Tensor, theirs: Tensor, ids: Tensor, weights: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """Return the two weighted divergences per row, [rows, 2], and the gradient of their sum by z, [rows, V].

    With b(j) the bucket of token j and r the student's proportions within the tail,
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
    within = logq.scatter(1, ids, float("-inf"))  # the tail's tokens, relative to all
    tail = within.logsumexp(dim=1, keepdim=True)
    ours = torch.cat([logq.gather(1, ids), tail], dim=1)
    p, q, words = theirs.exp(), ours.exp(), logq.exp()
    values, slope = z.new_zeros(len(z), 2), torch.zeros_like(z)
    if forward:
        values[:, 0] = forward * torch.where(p > 0, p * (theirs - ours), 0.0).sum(dim=1)
        own = words - p[:, -1:] * (within - tail).exp()
        slope += forward * own.scatter_(1, ids, (q - p)[:, :-1])
    if reverse:
        ratio = torch.where(q > 0, ours - theirs.clamp(min=_MIN_LOG_PROBABILITY), 0.0)
        each = (q * ratio).sum(dim=1, keepdim=True)
        values[:, 1] = reverse * each.squeeze(1)
        turned = words * (ratio[:, -1:] - each)
        slope += reverse * turned.scatter_(1, ids, (q * (ratio - each))[:, :-1])
    return values, slope


def top_k_loss(
    logits: Tensor,
    labels: Tensor,
    teacher: TopKLogits,
    *,
    temperature: float,
    logits_weight: float,
    reverse_weight: float = 0.0,
    terms: dict[str, Tensor] | None = None,
) -> Tensor:
    """Return logits_weight * T^2 * KL(teacher || student) + reverse_weight * T^2 * KL(student || teacher).

    Both are computed over the buckets and averaged over the positions whose label is not -100.

    Args:
        logits: float [..., V] of the student.
        labels: int64 [...]; positions with label -100 are ignored.
        teacher: made at the same temperature; no gradient flows into it.
        temperature: T.
        logits_weight: weight of KL(teacher || student).
        reverse_weight: weight of KL(student || teacher).
        terms: receives the terms with a weight, `logits` and `reverse_kl`, as detached float32 scalars.

    Returns:
        float32 scalar, nats.
    """
    weights = (logits_weight, reverse_weight)
    k = teacher.ids.shape[-1]
    theirs, ids = teacher.logits.detach().reshape(-1, k + 1), teacher.ids.reshape(-1, k)

    def of_rows(z: Tensor, rows: slice, mask: Tensor) -> tuple[Tensor, Tensor]:
        values, slope = _weighted_divergences(
            z / temperature, theirs[rows].float().log_softmax(dim=1), ids[rows], weights
        )
        return temperature**2 * values[mask].double().sum(dim=0), slope.mul_(temperature)

    loss, parts = blockwise_loss(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), 2, of_rows)
    if terms is not None:
        names = ("logits", "reverse_kl")
        terms.update({n: part for n, part, weight in zip(names, parts, weights, strict=True) if weight})
    return loss
