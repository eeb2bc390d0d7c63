"""What a classifier is trained on, by its problem type: one class, several classes, or a number.

Shapes: B = batch, C = classes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from smelt.compress.train.losses.of_tokens import mixed_loss
from smelt.core.labels import REGRESSION, ProblemType, problem_type


def problem_of(config: Any) -> ProblemType:
    """Return the problem type of a transformers config; the outputs count, not their names."""
    names = dict.fromkeys(range(config.num_labels), "")
    return problem_type({"problem_type": getattr(config, "problem_type", None), "id2label": names})


def training_loss(
    config: Any,
    logits: Tensor,
    labels: Tensor,
    teacher: Tensor | None = None,
    *,
    temperature: float = 1.0,
    logits_weight: float = 0.0,
    labels_weight: float = 1.0,
    reverse_weight: float = 0.0,
    smoothing: float = 0.0,
    told: dict[str, Tensor] | None = None,
) -> Tensor:
    """Return the mean loss that fits the model: see `mixed_loss`, `class_sets_loss`, `numbers_loss`.

    Labels of floats belong to a classifier with several classes a text, or a number; the latter has no
    divergence that could be turned round. told: see `mixed_loss`.

    Returns:
        float32 scalar.
    """
    if not labels.is_floating_point():
        return mixed_loss(
            logits, labels, teacher, temperature=temperature, logits_weight=logits_weight,
            labels_weight=labels_weight, reverse_weight=reverse_weight, smoothing=smoothing, told=told,
        )  # fmt: skip
    if problem_of(config) == REGRESSION:
        return numbers_loss(
            logits, labels, teacher, logits_weight=logits_weight, labels_weight=labels_weight, told=told
        )
    return class_sets_loss(
        logits, labels, teacher, temperature=temperature, logits_weight=logits_weight,
        labels_weight=labels_weight, reverse_weight=reverse_weight, smoothing=smoothing, told=told,
    )  # fmt: skip


def class_sets_loss(
    logits: Tensor,
    labels: Tensor,
    teacher: Tensor | None = None,
    *,
    temperature: float = 1.0,
    logits_weight: float = 0.0,
    labels_weight: float = 1.0,
    reverse_weight: float = 0.0,
    smoothing: float = 0.0,
    told: dict[str, Tensor] | None = None,
) -> Tensor:
    """Return labels_weight * BCE(logits, labels) + logits_weight * T^2 * KL(teacher || student).

    Each class is a coin of its own with probability sigmoid(z / T), so the divergence is that of
    Hinton et al. 2015 (arXiv:1503.02531) for two classes, z and 0. Both are means over rows and
    classes, as torch's BCEWithLogitsLoss, which transformers trains such models with.

    Args:
        logits: float [B, C] of the student.
        labels: float [B, C], 1 where the class holds, else 0.
        teacher: float [B, C]; no gradient flows into it.
        temperature: T.
        logits_weight: weight of the divergence.
        labels_weight: weight of the binary cross-entropy.
        reverse_weight: weight of the divergence the other way round.
        smoothing: label smoothing: each label moves this fraction of the way to 1/2.
        told: gets the parts by name, as in `mixed_loss`.
    """
    z, parts = logits.float(), {}
    if labels_weight:
        wanted = labels.float() * (1 - smoothing) + smoothing / 2
        parts["labels"] = labels_weight * F.binary_cross_entropy_with_logits(z, wanted)
    if teacher is not None:
        s, t = z / temperature, teacher.detach().float() / temperature
        if logits_weight:
            parts["logits"] = logits_weight * temperature**2 * _coins_apart(t, s)
        if reverse_weight:
            parts["reverse_kl"] = reverse_weight * temperature**2 * _coins_apart(s, t)
    return _added(parts, told, z)


def _coins_apart(one: Tensor, other: Tensor) -> Tensor:
    """Return KL(sigmoid(one) || sigmoid(other)), mean over all coins; 0 where they are the same."""
    p = one.sigmoid()
    own = F.binary_cross_entropy_with_logits(one, p)
    return F.binary_cross_entropy_with_logits(other, p) - own


def _added(parts: dict[str, Tensor], told: dict[str, Tensor] | None, like: Tensor) -> Tensor:
    if told is not None:
        told.update({name: value.detach() for name, value in parts.items()})
    return sum(parts.values(), like.new_zeros(()))


def numbers_loss(
    logits: Tensor,
    labels: Tensor,
    teacher: Tensor | None = None,
    *,
    logits_weight: float = 0.0,
    labels_weight: float = 1.0,
    told: dict[str, Tensor] | None = None,
) -> Tensor:
    """Return labels_weight * MSE(logits, labels) + logits_weight * MSE(logits, teacher).

    A number has no temperature: the student is drawn to what the teacher says, as TinyBERT does it for
    STS-B (Jiao et al. 2020, arXiv:1909.10351, task_distill.py).

    Args:
        logits: float [B, 1] of the student.
        labels: float [B, 1].
        teacher: float [B, 1]; no gradient flows into it.
        logits_weight: weight of the distance from the teacher.
        labels_weight: weight of the distance from the labels.
        told: gets the parts by name, as in `mixed_loss`.
    """
    z, parts = logits.float(), {}
    if labels_weight:
        parts["labels"] = labels_weight * F.mse_loss(z, labels.float())
    if teacher is not None and logits_weight:
        parts["logits"] = logits_weight * F.mse_loss(z, teacher.detach().float())
    return _added(parts, told, z)
