"""Combine the outputs of several teachers into the targets of one student.

Hinton et al. 2015, arXiv:1503.02531, use the (arithmetic) mean of an ensemble's probabilities as soft
targets. Probabilities at temperature T are averaged, label by label if labels differ and a sample can have
several; the result is logits whose softmax (or sigmoids) at T are that mean, so that every loss with one
teacher also works with several.

If a sample has one class, a teacher with other labels than the student defines only the proportions of its
own labels: p_i(l) = q(l) / sum of q over the labels of teacher i, where q is the distribution over all labels
(Vongkulbhisal et al. 2019, Unifying Heterogeneous Classifiers with Distillation, arXiv:1904.06062). Their
cross-entropy sum_i H(p_i, q_i), with q_i the student's softmax over the labels of teacher i alone, is
minimized directly; `restricted_divergence` is the same up to the constant entropies of the teachers. Without
a common label and without labels of samples, the proportions between labels of different teachers are
undefined; then the teachers' logits are concatenated, as Shen et al. 2019 (Amalgamating Knowledge towards
Comprehensive Classification, arXiv:1811.02796) stack the scores of theirs.

Shapes: B = batch, C = labels of one teacher, U = labels of all teachers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smelt.compress.distill.teacher_labels import (
    Combination,
    ModelLabels,
    combination_of,
    new_student_labels,
    several_teacher_errors,
)
from smelt.core.errors import InputError
from smelt.data.labels import MULTI_LABEL, REGRESSION, ProblemType
from smelt.models.families.registry import predicts_tokens
from smelt.models.sentence_model import head_output


class Ensemble(nn.Module):
    """Runs several models of one task on the same inputs and combines their logits.

    config: the first model's config, with the labels of all. combination: how the logits were combined.
    label_groups: if "restricted", of each model the indices of its labels among the student's; the combined
    logits are those of all models next to each other.
    """

    def __init__(
        self,
        models: Sequence[Any],
        join: Callable[[list[Tensor]], Tensor],
        config: Any,
        combination: Combination = "mean",
        label_groups: Sequence[Sequence[int]] | None = None,
    ) -> None:
        super().__init__()
        self.models: Any = nn.ModuleList(models)
        self.join, self.config = join, config
        self.combination, self.label_groups = combination, label_groups

    def forward(self, **inputs: Any) -> Any:
        """Return the combined `logits`."""
        return SimpleNamespace(logits=self.join([head_output(model(**inputs)) for model in self.models]))

    def can_generate(self) -> bool:
        """Return whether the models generate text."""
        generates: bool = self.models[0].can_generate()
        return generates

    def get_output_embeddings(self) -> Any:
        """Return the output layer of the first model; None for one without tokens as outputs."""
        return self.models[0].get_output_embeddings()


def average_logits(logits: Sequence[Tensor], temperature: float) -> Tensor:
    """Return float32 [..., V], whose softmax at T is the mean of the softmaxes of `logits` at T."""
    log_probs = torch.stack([(z.float() / temperature).log_softmax(dim=-1) for z in logits])
    return temperature * (log_probs.logsumexp(dim=0) - math.log(len(logits)))


def combine_label_logits(
    logits: Sequence[Tensor],
    label_indices: Sequence[Sequence[int]],
    num_labels: int,
    problem_types: Sequence[ProblemType],
    temperature: float,
) -> Tensor:
    """Return float32 [B, U], whose sigmoids at T are the probabilities of the labels.

    The probability of a label is the mean over the teachers that have it.

    Args:
        logits: of each teacher, float [B, C].
        label_indices: of each teacher's labels among all.
        num_labels: U.
        problem_types: of each teacher: softmax for single-label, sigmoid for multi-label classifiers.
        temperature: T.
    """
    positives = logits[0].new_zeros(len(logits[0]), num_labels, dtype=torch.float64)
    negatives, num_teachers = torch.zeros_like(positives), positives.new_zeros(num_labels)
    for z, indices, problem_type in zip(logits, label_indices, problem_types, strict=True):
        scaled = z.double() / temperature
        if problem_type == MULTI_LABEL:
            positive, negative = scaled.sigmoid(), (-scaled).sigmoid()
        else:
            positive = scaled.softmax(dim=-1)
            negative = _sum_of_others(positive)
        columns = torch.tensor(list(indices), device=z.device)
        positives.index_add_(1, columns, positive)
        negatives.index_add_(1, columns, negative)
        num_teachers[columns] += 1
    odds = (positives.log() - negatives.log()).clamp(
        -_MAX_LOGIT, _MAX_LOGIT
    )  # the number of teachers cancels
    return (temperature * odds).float()


_MAX_LOGIT = 80.0  # e^-80 is near the smallest float32 above 0


def _sum_of_others(p: Tensor) -> Tensor:
    """Return the sum of the other classes' probabilities for each class, [B, C], exact near 0."""
    left = torch.cat([torch.zeros_like(p[:, :1]), p.cumsum(dim=1)[:, :-1]], dim=1)
    right = torch.cat([p.flip(1).cumsum(dim=1).flip(1)[:, 1:], torch.zeros_like(p[:, :1])], dim=1)
    return left + right


_MIN_LOG_PROBABILITY = -1e4  # of a label that a teacher excludes: the divergence is large but finite


def restricted_divergence(
    logits: Tensor,
    teachers: Tensor,
    label_groups: Sequence[Sequence[int]],
    labels: Tensor | None = None,
    *,
    temperature: float,
    logits_weight: float,
    reverse_weight: float = 0.0,
    terms: dict[str, Tensor] | None = None,
) -> Tensor:
    """Return the sum over teachers i of T^2 KL(p_i || q_i), with q_i over the labels of teacher i alone.

    p_i = softmax(t_i / T) and q_i = softmax(z_i / T), where z_i are the student's logits of the labels of
    teacher i: Vongkulbhisal et al. 2019, arXiv:1904.06062. They have no labels of samples; with them, a
    teacher counts for samples of its own labels only: for others p_i is conditioned on what is not the case.
    Each divergence is the mean over the samples of the batch, 0 for those that do not count.

    Args:
        logits: of the student, float [B, U].
        teachers: the logits of all teachers next to each other, float [B, sum of C]; no gradient.
        label_groups: of each teacher, the indices of its labels among the student's.
        labels: of the samples, int64 [B]; None: unknown.
        temperature: T.
        logits_weight: weight of KL(p_i || q_i).
        reverse_weight: weight of KL(q_i || p_i).
        terms: receives the terms with a weight by name, detached float32 scalars.

    Returns:
        float32 scalar, nats.
    """
    sums = dict.fromkeys(("logits", "reverse_kl"), logits.new_zeros((), dtype=torch.float32))
    sizes = [len(group) for group in label_groups]
    for group, t in zip(label_groups, teachers.detach().split(sizes, dim=-1), strict=True):
        columns = torch.tensor(list(group), device=logits.device)
        log_q = _log_probabilities(logits.index_select(-1, columns), temperature)
        log_p = _log_probabilities(t, temperature)
        counts = None if labels is None else torch.isin(labels, columns)
        if logits_weight:
            sums["logits"] = sums["logits"] + _mean_divergence(log_p, log_q, counts)
        if reverse_weight:
            sums["reverse_kl"] = sums["reverse_kl"] + _mean_divergence(log_q, log_p, counts)
    weights = {"logits": logits_weight, "reverse_kl": reverse_weight}
    values = {name: temperature**2 * weight * sums[name] for name, weight in weights.items() if weight}
    if terms is not None:
        terms.update({name: value.detach() for name, value in values.items()})
    return sum(values.values(), logits.new_zeros((), dtype=torch.float32))


def _log_probabilities(logits: Tensor, temperature: float) -> Tensor:
    return (logits.float() / temperature).log_softmax(dim=-1).clamp(min=_MIN_LOG_PROBABILITY)


def _mean_divergence(log_p: Tensor, log_q: Tensor, counts: Tensor | None) -> Tensor:
    """Return the mean of KL(p || q) over samples, 0 for those with False in `counts`, bool [B]."""
    divergences = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(dim=-1)
    return (divergences if counts is None else divergences * counts).mean()


def make_ensemble(
    models: Sequence[Any],
    names: Sequence[str],
    student: Any,
    temperature: float,
    *,
    uses_labels: bool = True,
    source: Mapping[str, Any] | None = None,
) -> Ensemble:
    """Return `models` combined into one teacher of `student`.

    Args:
        models: in eval mode.
        names: of each, for messages.
        student: sets the order of labels; None if there is no student yet.
        temperature: of the loss.
        uses_labels: whether the student also learns from labels of the samples.
        source: config of the step's input, as a dict, for the problem type of a student that is still to be
            made.

    Raises:
        InputError: their tasks differ, or their labels do not match each other or the student's.
    """
    config = models[0].config
    if any(map(predicts_tokens, models)):
        return Ensemble(models, lambda logits: average_logits(logits, temperature), config)
    labels = [ModelLabels.from_config(model.config.to_dict()) for model in models]
    student_labels = None if student is None else ModelLabels.from_config(student.config.to_dict())
    for error in several_teacher_errors(labels, student_labels, uses_labels=uses_labels):
        text = f"distill: teachers {', '.join(names)}: {error.message}"
        raise InputError(text, code=error.code, setting=error.setting)
    if labels[0].problem == REGRESSION:
        return Ensemble(models, lambda logits: torch.stack([z.float() for z in logits]).mean(dim=0), config)
    if student_labels is None:
        source_labels = labels[0] if source is None else ModelLabels.from_config(source)
        student_labels = new_student_labels(labels, source_labels)
    return _combine_classifiers(models, labels, student_labels, temperature, uses_labels)


def _combine_classifiers(
    models: Sequence[Any],
    labels: Sequence[ModelLabels],
    student: ModelLabels,
    temperature: float,
    uses_labels: bool,
) -> Ensemble:
    """Return the ensemble of `models`, whose labels and those of the student have been checked."""
    combination = combination_of(labels, student, uses_labels)
    groups = [[student.names.index(name) for name in model_labels.names] for model_labels in labels]
    stacked = [name for model_labels in labels for name in model_labels.names]
    config = _config_with_labels(models[0].config, student.names, student.problem)
    if combination == "mean":
        columns = [[model_labels.names.index(name) for name in student.names] for model_labels in labels]
        return Ensemble(
            models,
            lambda logits: average_logits(
                [z[..., c] for z, c in zip(logits, columns, strict=True)], temperature
            ),
            config,
        )
    if combination == "restricted":
        return Ensemble(models, lambda logits: torch.cat(logits, dim=-1), config, combination, groups)
    if combination == "concatenated":
        order = [stacked.index(name) for name in student.names]
        return Ensemble(models, lambda logits: torch.cat(logits, dim=-1)[..., order], config, combination)
    problems = [model_labels.problem for model_labels in labels]
    return Ensemble(
        models,
        lambda logits: combine_label_logits(logits, groups, len(student.names), problems, temperature),
        config,
        combination,
    )


def _config_with_labels(config: Any, labels: Sequence[str], kind: ProblemType) -> Any:
    """Return a copy of `config` with these labels."""
    values: Mapping[str, Any] = config.to_dict() | {
        "id2label": dict(enumerate(labels)),
        "label2id": {label: i for i, label in enumerate(labels)},
        "problem_type": kind,
    }
    return type(config).from_dict(values)
