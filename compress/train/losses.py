"""Cross-entropy and distillation over large vocabularies, value and gradient in one pass.

Autograd keeps several float32 copies of [N, V]: log-probabilities of both models, their
exponentials, the gradient. Both losses have a gradient that is known in closed form, so it is
computed together with the value in blocks of rows, and one [N, V] tensor in the logits' own dtype
is all that is kept.

Shapes: N = rows (batch times positions), V = vocabulary or classes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

IGNORE = -100
_BLOCK_BYTES = 8 * 2**20  # of float32 per block: small enough for the caches, large enough for threads


class _BlockLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        teacher: Tensor | None,
        temperature: float,
        logits_weight: float,
        labels_weight: float,
        smoothing: float,
    ) -> Tensor:
        kept = labels != IGNORE
        count = int(kept.sum())
        total = logits.new_zeros((), dtype=torch.float64)
        gradient = torch.zeros_like(logits) if logits.requires_grad else None
        size = max(1, _BLOCK_BYTES // (4 * logits.shape[1]))
        for at in range(0, logits.shape[0], size):
            rows = slice(at, at + size)
            mask = kept[rows]
            if not bool(mask.any()):
                continue
            value, slope = torch.zeros_like(total), None
            z, y = logits[rows].float(), labels[rows].clamp(min=0)
            if labels_weight:
                value, slope = _cross_entropy(z, y, mask, smoothing=smoothing, weight=labels_weight)
            if teacher is not None and logits_weight:
                more, steeper = _divergence(
                    z, teacher[rows].float(), mask, temperature=temperature, weight=logits_weight
                )
                value = value + more
                slope = steeper if slope is None else slope.add_(steeper)
            total += value
            if gradient is not None and slope is not None:
                gradient[rows] = (slope.mul_(mask.unsqueeze(1)) / max(1, count)).to(gradient.dtype)
        if gradient is not None:
            ctx.save_for_backward(gradient)
        return (total / max(1, count)).float()

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * outputs[0].to(gradient.dtype), None, None, None, None, None, None


def _cross_entropy(
    z: Tensor, y: Tensor, mask: Tensor, smoothing: float, weight: float
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum over kept rows and dsum/dz = w * (softmax(z) - target), [rows, V]."""
    logp = z.log_softmax(dim=1)
    nll = -logp.gather(1, y.unsqueeze(1)).squeeze(1)
    if smoothing:
        nll = (1 - smoothing) * nll - smoothing * logp.mean(dim=1)
    slope = logp.exp_()
    if smoothing:
        slope -= smoothing / z.shape[1]
    slope.scatter_add_(1, y.unsqueeze(1), slope.new_full((len(y), 1), smoothing - 1.0))
    return weight * nll[mask].double().sum(), slope.mul_(weight)


def _divergence(
    z: Tensor, t: Tensor, mask: Tensor, temperature: float, weight: float
) -> tuple[Tensor, Tensor]:
    """Return w T^2 KL(softmax(t/T) || softmax(z/T)) summed over kept rows, and its slope in z.

    d/dz T^2 KL = T (softmax(z/T) - softmax(t/T)).
    """
    logq = (z / temperature).log_softmax(dim=1)
    logp = (t / temperature).log_softmax(dim=1)
    p = logp.exp()
    # where the teacher's probability is 0 (a logit of -inf), the term is 0
    terms = torch.where(p > 0, p * (logp - logq), 0.0).sum(dim=1)
    slope = logq.exp_().sub_(p).mul_(weight * temperature)
    return weight * temperature**2 * terms[mask].double().sum(), slope


def mixed_loss(
    logits: Tensor,
    labels: Tensor,
    teacher: Tensor | None = None,
    *,
    temperature: float = 1.0,
    logits_weight: float = 0.0,
    labels_weight: float = 1.0,
    smoothing: float = 0.0,
) -> Tensor:
    """Return labels_weight * CE(logits, labels) + logits_weight * T^2 * KL(teacher || student).

    Both are means over the rows whose label is not -100 (Hinton et al. 2015, arXiv:1503.02531; T^2
    keeps the gradient's scale when T changes; padding is left out before averaging as in DistilBERT's
    distiller.py). A weight of 0 leaves a part out.

    Args:
        logits: float [..., V] of the student.
        labels: int64 [...], -100 where a position does not count.
        teacher: float [..., V], no gradient flows into it.
        temperature: T.
        logits_weight: weight of the distillation loss.
        labels_weight: weight of the cross-entropy.
        smoothing: label smoothing of the cross-entropy.

    Returns:
        float32 scalar, nats.
    """
    flat = logits.reshape(-1, logits.shape[-1])
    other = None if teacher is None else teacher.detach().reshape(-1, teacher.shape[-1])
    loss: Tensor = _BlockLoss.apply(  # type: ignore[no-untyped-call]
        flat, labels.reshape(-1), other, temperature, logits_weight, labels_weight, smoothing
    )
    return loss
