"""Losses on logits: cross-entropy and distillation (both directions) of tokens, and classifiers' losses.

Autograd keeps several float32 copies of [N, V]: log-probabilities of both models, their exponentials, the
gradient. The gradients of the losses over large vocabularies have a closed form, so they are computed
together with the value, in one pass in blocks of rows, and only one [N, V] tensor in the logits' own dtype is
kept.

The loss of a classifier depends on its problem type: single-label, multi-label, or regression. A sentence
embedder learns the order of pairs' scores. `label_objective` is the loss of a model with its labels; it needs
no training loop, so that stages measure with it without transformers' Trainer, which takes seconds to import.

Shapes: N = rows (batch times positions), V = vocabulary or classes, B = batch (pairs or texts), C = classes,
T = texts of a batch (2 B for pairs: all first texts first), D = width, L = tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smelt.data.labels import REGRESSION
from smelt.models.image_text_model import has_two_towers
from smelt.models.sentence_model import has_span_logits, head_output
from smelt.models.text_rules import is_sentence_model
from smelt.tasks.samples import CACHE_INDEX_KEY, IGNORE_INDEX, TOKEN_MASK_KEY, model_problem_type

_NON_INPUTS = frozenset({"labels", CACHE_INDEX_KEY, TOKEN_MASK_KEY})
COSENT_SCALE = 20.0  # scale of cosines, as in sentence-transformers' CoSENTLoss
_MIN_LOG_PROBABILITY = -1e4  # of log-probabilities: if a teacher masks a token, the loss is large but finite
_BLOCK_BYTES = 8 * 2**20  # of float32 per block: fits the caches, and is large enough for threads
RowLoss: TypeAlias = Callable[[Tensor, slice, Tensor], tuple[Tensor, Tensor | None]]


class _BlockwiseLoss(torch.autograd.Function):
    """Returns the sum of all terms, and each term without gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, parts: int, of_rows: RowLoss) -> tuple[Tensor, ...]:
        is_labeled = labels != IGNORE_INDEX
        count = max(1, int(is_labeled.sum()))
        sums = logits.new_zeros(parts, dtype=torch.float64)
        gradient = torch.zeros_like(logits) if logits.requires_grad else None
        size = max(1, _BLOCK_BYTES // (4 * logits.shape[1]))
        for start in range(0, logits.shape[0], size):
            row_slice = slice(start, start + size)
            mask = is_labeled[row_slice]
            if not bool(mask.any()):
                continue
            values, slope = of_rows(logits[row_slice].float(), row_slice, mask)
            sums += values
            if gradient is not None and slope is not None:
                gradient[row_slice] = (slope.mul_(mask.unsqueeze(1)) / count).to(gradient.dtype)
        if gradient is not None:
            ctx.save_for_backward(gradient)
        means = tuple((sums / count).float())
        ctx.mark_non_differentiable(*means)
        return ((sums.sum() / count).float(), *means)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * outputs[0].to(gradient.dtype), None, None, None


def blockwise_loss(logits: Tensor, labels: Tensor, parts: int, row_loss: RowLoss) -> tuple[Tensor, Tensor]:
    """Return a loss with a known gradient, float32 scalar, and its terms without gradient, float32 [parts].

    Both are means over the rows that count.

    Args:
        logits: float [N, V].
        labels: int64 [N], -100 for rows that do not count.
        parts: the number of terms of the loss.
        row_loss: given rows of the logits, float32 [n, V], their indices, and which of them count
            (bool [n]), returns the sums of the terms over those that count, float64 [parts], and the gradient
            of their sum, float32 [n, V], which may be overwritten; None: it is 0.
    """
    values: tuple[Tensor, ...] = _BlockwiseLoss.apply(logits, labels, parts, row_loss)  # type: ignore[no-untyped-call]
    return values[0], torch.stack(values[1:])


def _cross_entropy(
    z: Tensor, y: Tensor, mask: Tensor, smoothing: float, weight: float, sloped: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the weighted sum over kept rows and dsum/dz = w * (softmax(z) - target), [rows, V].

    sloped: whether the latter is needed.
    """
    logp = z.log_softmax(dim=1)
    nll = -logp.gather(1, y.unsqueeze(1)).squeeze(1)
    if smoothing:
        nll = (1 - smoothing) * nll - smoothing * logp.mean(dim=1)
    loss = weight * nll[mask].double().sum()
    if not sloped:
        return loss, None
    slope = logp.exp_()
    if smoothing:
        slope -= smoothing / z.shape[1]
    slope.scatter_add_(1, y.unsqueeze(1), slope.new_full((len(y), 1), smoothing - 1.0))
    return loss, slope.mul_(weight)


def _forward_kl(
    z: Tensor, t: Tensor, mask: Tensor, temperature: float, weight: float
) -> tuple[Tensor, Tensor]:
    """Return w T^2 KL(softmax(t/T) || softmax(z/T)) summed over kept rows, and its gradient by z.

    d/dz T^2 KL = T (softmax(z/T) - softmax(t/T)).
    """
    logq = (z / temperature).log_softmax(dim=1)
    logp = (t / temperature).log_softmax(dim=1)
    p = logp.exp()
    # where the teacher's probability is 0 (a logit of -inf), the term is 0
    terms = torch.where(p > 0, p * (logp - logq), 0.0).sum(dim=1)
    slope = logq.exp_().sub_(p).mul_(weight * temperature)
    return weight * temperature**2 * terms[mask].double().sum(), slope


def _reverse_kl(
    z: Tensor, t: Tensor, mask: Tensor, temperature: float, weight: float
) -> tuple[Tensor, Tensor]:
    """Return w T^2 KL(softmax(z/T) || softmax(t/T)) summed over kept rows, and its gradient by z.

    With q of the student: d/dz T^2 KL = T q (log q - log p - KL).
    """
    logq = (z / temperature).log_softmax(dim=1)
    logp = (t / temperature).log_softmax(dim=1).clamp_(min=_MIN_LOG_PROBABILITY)
    q = logq.exp()
    ratio = logq.sub_(logp)
    divergences = (q * ratio).sum(dim=1)
    slope = ratio.sub_(divergences.unsqueeze(1)).mul_(q).mul_(weight * temperature)
    return weight * temperature**2 * divergences[mask].double().sum(), slope


def token_loss(
    logits: Tensor,
    labels: Tensor,
    teacher: Tensor | None = None,
    *,
    temperature: float = 1.0,
    logits_weight: float = 0.0,
    labels_weight: float = 1.0,
    reverse_weight: float = 0.0,
    smoothing: float = 0.0,
    terms: dict[str, Tensor] | None = None,
) -> Tensor:
    """Return labels_weight * CE(logits, labels) + logits_weight * T^2 * KL(teacher || student).

    Both are means over the rows whose label is not -100 (Hinton et al. 2015, arXiv:1503.02531; T^2
    keeps the gradient's scale when T changes; padding is ignored before averaging as in DistilBERT's
    distiller.py), as is reverse_weight * T^2 * KL(student || teacher), which is mode-seeking: the student
    learns what the teacher finds likely instead of its whole distribution (Gu et al. 2024, MiniLLM,
    arXiv:2306.08543, here token by token on the training samples). A weight of 0 disables a term.

    Args:
        logits: float [..., V] of the student.
        labels: int64 [...], -100 for ignored positions.
        teacher: float [..., V], no gradient flows into it.
        temperature: T.
        logits_weight: weight of the distillation loss.
        labels_weight: weight of the cross-entropy.
        reverse_weight: weight of the reverse divergence.
        smoothing: label smoothing of the cross-entropy.
        terms: receives the terms with a weight by name, detached float32 scalars that add up to the result.

    Returns:
        float32 scalar, nats.
    """
    flat = logits.reshape(-1, logits.shape[-1])
    teacher_logits = None if teacher is None else teacher.detach().reshape(-1, teacher.shape[-1])
    weights = (logits_weight, labels_weight, reverse_weight)
    y = labels.reshape(-1)

    def of_rows(z: Tensor, rows: slice, mask: Tensor) -> tuple[Tensor, Tensor | None]:
        sums = z.new_zeros(3, dtype=torch.float64)
        slope: Tensor | None = None
        if labels_weight:
            y_of = y[rows].clamp(min=0)
            sums[1], slope = _cross_entropy(z, y_of, mask, smoothing, labels_weight, logits.requires_grad)
        for term_index, weight, divergence in (
            (0, logits_weight, _forward_kl),
            (2, reverse_weight, _reverse_kl),
        ):
            if teacher_logits is None or not weight:
                continue
            sums[term_index], term_slope = divergence(
                z, teacher_logits[rows].float(), mask, temperature, weight
            )
            slope = term_slope if slope is None else slope.add_(term_slope)
        return sums, slope

    loss, parts = blockwise_loss(flat, y, 3, of_rows)
    if terms is not None:
        names = ("logits", "labels", "reverse_kl")
        terms.update(
            {n: divergence for n, divergence, weight in zip(names, parts, weights, strict=True) if weight}
        )
    return loss


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
    terms: dict[str, Tensor] | None = None,
) -> Tensor:
    """Return the mean loss for the model: see `token_loss`, `multi_label_loss`, `regression_loss`.

    Labels of floats are multi-label or regression; regression has no reverse divergence.
    terms: see `token_loss`.

    Returns:
        float32 scalar.
    """
    if not labels.is_floating_point():
        return token_loss(
            logits, labels, teacher, temperature=temperature, logits_weight=logits_weight,
            labels_weight=labels_weight, reverse_weight=reverse_weight, smoothing=smoothing, terms=terms,
        )  # fmt: skip
    if model_problem_type(config) == REGRESSION:
        return regression_loss(
            logits, labels, teacher, logits_weight=logits_weight, labels_weight=labels_weight, terms=terms
        )
    return multi_label_loss(
        logits, labels, teacher, temperature=temperature, logits_weight=logits_weight,
        labels_weight=labels_weight, reverse_weight=reverse_weight, smoothing=smoothing, terms=terms,
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
    terms: dict[str, Tensor] | None = None,
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
        terms: receives the terms by name, as in `token_loss`.
    """
    z, parts = logits.float(), {}
    if labels_weight:
        soft_labels = labels.float() * (1 - smoothing) + smoothing / 2
        parts["labels"] = labels_weight * F.binary_cross_entropy_with_logits(z, soft_labels)
    if teacher is not None:
        s, t = z / temperature, teacher.detach().float() / temperature
        if logits_weight:
            parts["logits"] = logits_weight * temperature**2 * _bernoulli_divergence(t, s)
        if reverse_weight:
            parts["reverse_kl"] = reverse_weight * temperature**2 * _bernoulli_divergence(s, t)
    return _add_terms(parts, terms, z)


def _bernoulli_divergence(one: Tensor, other: Tensor) -> Tensor:
    """Return KL(sigmoid(one) || sigmoid(other)), the mean over all entries; 0 where they are equal."""
    p = one.sigmoid()
    entropy = F.binary_cross_entropy_with_logits(one, p)
    return F.binary_cross_entropy_with_logits(other, p) - entropy


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
        logits: float [B, C] of the student.
        labels: float [B, C].
        teacher: float [B, C]; no gradient flows into it.
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


def model_inputs(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the model inputs in `batch`."""
    return {name: value for name, value in batch.items() if name not in _NON_INPUTS}


def batch_vectors(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the embeddings of a batch, float32 [T, D], of pairs of an image and a text the images' first.

    `labels` are not passed to the model.
    """
    return head_output(model(**model_inputs(batch))).float()


def contrastive_loss(model: Any, vectors: Tensor) -> Tensor:
    """Return the loss by which each image and its text recognize each other among those of the batch.

    CLIP's is the mean of the cross-entropies of both directions (Radford et al. 2021, arXiv:2103.00020);
    SigLIP's, whose model has a bias of the logits, the binary cross-entropy of all pairs, summed over images
    (Zhai et al. 2023, arXiv:2303.15343). Both are those of transformers' models.

    Args:
        model: with the scale of the logits, and their bias.
        vectors: float [2 B, D] of length 1, images first.
    """
    inner_model = getattr(model, "module", model)
    images, texts = vectors.chunk(2)
    logits = texts @ images.t() * inner_model.logit_scale.exp()
    if hasattr(inner_model, "logit_bias"):
        signs = 2 * torch.eye(len(logits), device=logits.device) - 1
        return -F.logsigmoid(signs * (logits + inner_model.logit_bias)).sum(dim=-1).mean()
    targets = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.t(), targets)) / 2


def cosent_loss(vectors: Tensor, scores: Tensor) -> Tensor:
    """Return CoSENT: log(1 + sum over pairs i, j with score_i > score_j of exp(20 (cos_j - cos_i))).

    Only the order of the scores counts, so they may be on any scale. 0 if all scores of a batch are equal.
    Huang et al. 2024, CoSENT: Consistent Sentence Embedding via Similarity Ranking, IEEE/ACM TASLP 32;
    sentence-transformers' CoSENTLoss.

    Args:
        vectors: float [2 B, D].
        scores: float [B] or [B, 1].
    """
    first, second = vectors.chunk(2)
    cosines = COSENT_SCALE * F.cosine_similarity(first, second)
    scores = scores.flatten()
    higher = scores[:, None] > scores[None, :]
    violations = (cosines[None, :] - cosines[:, None])[higher]
    return torch.cat([violations.new_zeros(1), violations]).logsumexp(dim=0)


def model_logits(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the logits: float [B, T, V] for a generating model, [B, C] for a classifier.

    Those of spans are [B, 2, L]: the classes of a start and an end are the tokens, padding included, as in
    transformers' loss. `labels` are not passed to the model.
    """
    inputs = model_inputs(batch)
    labels = batch["labels"]  # int64 [B, L] for generating models, which could return a cache
    no_cache = {"use_cache": False} if labels.dim() == 2 and not labels.is_floating_point() else {}
    output = model(**inputs, **no_cache)
    logits = head_output(output)
    return logits.transpose(1, 2) if has_span_logits(output) else logits


def class_weighted_loss(
    logits: Tensor, labels: Tensor, class_weights: Tensor, smoothing: float = 0.0
) -> Tensor:
    """Return the mean loss with the labels, in which classes count by their weights.

    Args:
        logits: float [..., C].
        labels: int64 [...], -100 for ignored positions; float [B, C] for multi-label.
        class_weights: float32 [C], `weight` of torch's cross-entropy; for multi-label its `pos_weight`.
        smoothing: label smoothing, as in `classification_loss`.

    Returns:
        float32 scalar. The cross-entropy is divided by the number of labels, not by the sum of their weights
        as torch's, so that a batch without a rare class does not count as much as one with it.
    """
    z, weights = logits.float(), class_weights.to(logits.device)
    if labels.is_floating_point():
        soft_labels = labels.float() * (1 - smoothing) + smoothing / 2
        return F.binary_cross_entropy_with_logits(z, soft_labels, pos_weight=weights)
    total = F.cross_entropy(
        z.flatten(0, -2),
        labels.flatten(),
        weight=weights,
        ignore_index=IGNORE_INDEX,
        label_smoothing=smoothing,
        reduction="sum",
    )
    return total / (labels != IGNORE_INDEX).sum().clamp(min=1)


def balanced_class_weights(targets: Sequence[int | tuple[float, ...]], num_classes: int) -> Tensor:
    """Return weights by which rare classes count as much as frequent ones, float32 [C].

    Of n samples with one class each: scikit-learn's `balanced`, n / (classes with samples * samples of the
    class); their mean over the samples is 1. For multi-label: samples without the class / samples with it, as
    in torch's documentation of BCEWithLogitsLoss. A class that no sample has, or there
    every one, has weight 1.

    Args:
        targets: the class of each sample, or C numbers, 1 or 0.
        num_classes: C.
    """
    from sklearn.utils.class_weight import compute_class_weight

    values = np.array(targets)
    weights = np.ones(num_classes)
    if values.ndim > 1:
        counts = values.sum(axis=0)
        varies = (counts > 0) & (counts < len(values))
        weights[varies] = (len(values) - counts[varies]) / counts[varies]
    else:
        classes = np.unique(values)
        weights[classes] = compute_class_weight("balanced", classes=classes, y=values)
    return torch.tensor(weights, dtype=torch.float32)


def label_objective(
    smoothing: float = 0.0, class_weights: Tensor | None = None
) -> Callable[[nn.Module, Mapping[str, Tensor]], Tensor]:
    """Return the function for the mean loss with the labels, smoothed only in training mode.

    See `classification_loss` and, with weights of classes, `class_weighted_loss`; for a sentence embedder it
    is `cosent_loss` with the scores, for images and texts `contrastive_loss`.
    """

    def objective(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        inner_model: Any = getattr(model, "module", model)
        if has_two_towers(inner_model):
            return contrastive_loss(model, batch_vectors(model, batch))
        if is_sentence_model(inner_model):
            return cosent_loss(batch_vectors(model, batch), batch["labels"])
        logits, rate = model_logits(model, batch), smoothing if model.training else 0.0
        if class_weights is not None:
            return class_weighted_loss(logits, batch["labels"], class_weights, rate)
        return classification_loss(inner_model.config, logits, batch["labels"], smoothing=rate)

    return objective
