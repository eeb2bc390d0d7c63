"""Losses of a classifier, by its problem type: single-label, multi-label, or regression.

Shapes: B = batch, C = classes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from smelt.compress.train.losses.tokens import token_loss
from smelt.core.labels import REGRESSION, ProblemType, problem_type


def model_problem_type(config: Any) -> ProblemType:
    """Return the problem type of a transformers config, by the number of outputs, not their names."""
    names = dict.fromkeys(range(config.num_labels), "")
    return problem_type({"problem_type": getattr(config, "problem_type", None), "id2label": names})


def classification_loss(
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
    """Return the mean loss for the model: see `token_loss`, `multi_label_loss`, `regression_loss`.

    Labels of floats are multi-label or regression; regression has no reverse divergence.
    told: see `token_loss`.

    Returns:
        float32 scalar.
    """
    if not labels.is_floating_point():
        return token_loss(
            logits, labels, teacher, temperature=temperature, logits_weight=logits_weight,
            labels_weight=labels_weight, reverse_weight=reverse_weight, smoothing=smoothing, told=told,
        )  # fmt: skip
    if model_problem_type(config) == REGRESSION:
        return regression_loss(
            logits, labels, teacher, logits_weight=logits_weight, labels_weight=labels_weight, terms=told
        )
    return multi_label_loss(
        logits, labels, teacher, temperature=temperature, logits_weight=logits_weight,
        labels_weight=labels_weight, reverse_weight=reverse_weight, smoothing=smoothing, told=told,
    )  # fmt: skip


def multi_label_loss(
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

    Each class is an independent Bernoulli variable with probability sigmoid(z / T), so the divergence is that
    of Hinton et al. 2015 (arXiv:1503.02531) for two classes, z and 0. Both are means over samples and
    classes, as in torch's BCEWithLogitsLoss, which transformers uses for such models.

    Args:
        logits: float [B, C] of the student.
        labels: float [B, C], 1 for each class of the sample, else 0.
        teacher: float [B, C]; no gradient flows into it.
        temperature: T.
        logits_weight: weight of the divergence.
        labels_weight: weight of the binary cross-entropy.
        reverse_weight: weight of the reverse divergence.
        smoothing: label smoothing: each label is moved towards 1/2 by this fraction.
        told: receives the terms by name, as in `token_loss`.
    """
    z, parts = logits.float(), {}
    if labels_weight:
        wanted = labels.float() * (1 - smoothing) + smoothing / 2
        parts["labels"] = labels_weight * F.binary_cross_entropy_with_logits(z, wanted)
    if teacher is not None:
        s, t = z / temperature, teacher.detach().float() / temperature
        if logits_weight:
            parts["logits"] = logits_weight * temperature**2 * _bernoulli_divergence(t, s)
        if reverse_weight:
            parts["reverse_kl"] = reverse_weight * temperature**2 * _bernoulli_divergence(s, t)
    return _add_terms(parts, told, z)


def _bernoulli_divergence(one: Tensor, other: Tensor) -> Tensor:
    """Return KL(sigmoid(one) || sigmoid(other)), the mean over all entries; 0 where they are equal."""
    p = one.sigmoid()
    own = F.binary_cross_entropy_with_logits(one, p)
    return F.binary_cross_entropy_with_logits(other, p) - own


def _add_terms(parts: dict[str, Tensor], terms: dict[str, Tensor] | None, like: Tensor) -> Tensor:
    if terms is not None:
        terms.update({name: value.detach() for name, value in parts.items()})
    return sum(parts.values(), like.new_zeros(()))


def regression_loss(
    logits: Tensor,
    labels: Tensor,
    teacher: Tensor | None = None,
    *,
    logits_weight: float = 0.0,
    labels_weight: float = 1.0,
    terms: dict[str, Tensor] | None = None,
) -> Tensor:
    """Return labels_weight * MSE(logits, labels) + logits_weight * MSE(logits, teacher).

    A regression output has no temperature: the student learns the teacher's value, as TinyBERT does for
    STS-B (Jiao et al. 2020, arXiv:1909.10351, task_distill.py).

    Args:
        logits: float [B, 1] of the student.
        labels: float [B, 1].
        teacher: float [B, 1]; no gradient flows into it.
        logits_weight: weight of the distance from the teacher.
        labels_weight: weight of the distance from the labels.
        terms: receives the terms by name, as in `token_loss`.
    """
    z, parts = logits.float(), {}
    if labels_weight:
        parts["labels"] = labels_weight * F.mse_loss(z, labels.float())
    if teacher is not None and logits_weight:
        parts["logits"] = logits_weight * F.mse_loss(z, teacher.detach().float())
    return _add_terms(parts, terms, z)
