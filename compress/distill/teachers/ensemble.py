"""Combine several teachers into one: average their probabilities, label by label if labels differ.

Hinton et al. 2015, arXiv:1503.02531, use the (arithmetic) mean of an ensemble's probabilities as soft
targets. Probabilities at temperature T are averaged; the result is logits whose softmax (or sigmoids) at T
are that mean, so that every loss with one teacher also works with several.

Shapes: C = labels of one teacher, U = labels of all teachers, V = vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from smelt.compress.train.losses.classification import model_problem_type
from smelt.core.errors import InputError
from smelt.core.labels import MULTI_LABEL, REGRESSION, ProblemType


class Ensemble(nn.Module):
    """Runs several models of one task on the same inputs and combines their logits.

    config: the first model's config, with the labels of all.
    """

    def __init__(self, models: Sequence[Any], join: Callable[[list[Tensor]], Tensor], config: Any) -> None:
        super().__init__()
        self.models: Any = nn.ModuleList(models)
        self.join, self.config = join, config

    def forward(self, **inputs: Any) -> Any:
        """Return the combined `logits`."""
        return SimpleNamespace(logits=self.join([model(**inputs).logits for model in self.models]))

    def can_generate(self) -> bool:
        """Return whether the models generate text."""
        found: bool = self.models[0].can_generate()
        return found


def average_logits(logits: Sequence[Tensor], temperature: float) -> Tensor:
    """Return float32 [..., V], whose softmax at T is the mean of the softmaxes of `logits` at T."""
    each = torch.stack([(z.float() / temperature).log_softmax(dim=-1) for z in logits])
    return temperature * (each.logsumexp(dim=0) - math.log(len(logits)))


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
    chances = logits[0].new_zeros(len(logits[0]), num_labels, dtype=torch.float64)
    others, known = torch.zeros_like(chances), chances.new_zeros(num_labels)
    for z, mine, kind in zip(logits, label_indices, problem_types, strict=True):
        scaled = z.double() / temperature
        if kind == MULTI_LABEL:
            yes, no = scaled.sigmoid(), (-scaled).sigmoid()
        else:
            yes = scaled.softmax(dim=-1)
            no = _sum_of_others(yes)
        at = torch.tensor(list(mine), device=z.device)
        chances.index_add_(1, at, yes)
        others.index_add_(1, at, no)
        known[at] += 1
    odds = (chances.log() - others.log()).clamp(-_MAX_LOGIT, _MAX_LOGIT)  # the number of teachers cancels
    return (temperature * odds).float()


_MAX_LOGIT = 80.0  # e^-80 is near the smallest float32 above 0


def _sum_of_others(p: Tensor) -> Tensor:
    """Return the sum of the other classes' probabilities for each class, [B, C], exact near 0."""
    left = torch.cat([torch.zeros_like(p[:, :1]), p.cumsum(dim=1)[:, :-1]], dim=1)
    right = torch.cat([p.flip(1).cumsum(dim=1).flip(1)[:, 1:], torch.zeros_like(p[:, :1])], dim=1)
    return left + right


def make_ensemble(models: Sequence[Any], names: Sequence[str], student: Any, temperature: float) -> Ensemble:
    """Return `models` combined into one teacher of `student`.

    Args:
        models: in eval mode.
        names: of each, for messages.
        student: sets the order of labels; None if there is no student yet.
        temperature: of the loss.

    Raises:
        InputError: their tasks differ, or their labels do not match each other or the student's.
    """
    config = models[0].config
    if any(model.can_generate() for model in models):
        return Ensemble(models, lambda found: average_logits(found, temperature), config)
    labels = [_label_names(model.config) for model in models]
    kinds = [model_problem_type(model.config) for model in models]
    union = list(dict.fromkeys(label for own in labels for label in own))
    order = union if student is None else _ordered_labels(student, union, kinds, labels)
    places = [[order.index(label) for label in own] for own in labels]
    if REGRESSION in kinds:
        if set(kinds) != {REGRESSION}:
            raise InputError(
                f"distill: some of the teachers {', '.join(names)} are regression models and some are"
                " classifiers. Use teachers of one kind.",
                code="problem-type-mismatch",
                setting="teacher",
            )
        return Ensemble(models, lambda found: torch.stack([z.float() for z in found]).mean(dim=0), config)
    same = all(set(own) == set(union) for own in labels) and len(set(kinds)) == 1
    if same and kinds[0] != MULTI_LABEL:
        columns = [[own.index(label) for label in order] for own in labels]
        return Ensemble(
            models,
            lambda found: average_logits([z[:, c] for z, c in zip(found, columns, strict=True)], temperature),
            _config_with_labels(config, order, kinds[0]),
        )
    return Ensemble(
        models,
        lambda found: combine_label_logits(found, places, len(order), kinds, temperature),
        _config_with_labels(config, order, MULTI_LABEL),
    )


def _label_names(config: Any) -> list[str]:
    return [str(config.id2label[i]) for i in range(len(config.id2label))]


def _config_with_labels(config: Any, labels: Sequence[str], kind: ProblemType) -> Any:
    """Return a copy of `config` with these labels."""
    values: Mapping[str, Any] = config.to_dict() | {
        "id2label": dict(enumerate(labels)),
        "label2id": {label: i for i, label in enumerate(labels)},
        "problem_type": kind,
    }
    return type(config).from_dict(values)


def _ordered_labels(
    student: Any, union: Sequence[str], kinds: Sequence[ProblemType], labels: Sequence[Sequence[str]]
) -> list[str]:
    """Return the labels in the student's order.

    Raises:
        InputError: the student lacks a label, has one without a teacher, or is not multi-label.
    """
    mine = _label_names(student.config)
    lacking = [label for label in union if label not in mine]
    untaught = [label for label in mine if label not in union]
    if lacking or untaught:
        what = (
            f"the student lacks {_first_labels(lacking)}"
            if lacking
            else f"no teacher has {_first_labels(untaught)}"
        )
        raise InputError(
            f"distill: the teachers' labels are {_first_labels(union)}, but the student's are"
            f" {_first_labels(mine)}: {what}. With several teachers, the student must have all"
            " their labels and no others. Start from an encoder without classifier and"
            f" samples with all labels, or set student: {{config: FILE}}.",
            code="labels-mismatch" if lacking else "untaught-labels",
            setting="teacher",
        )
    apart = any(set(own) != set(union) for own in labels) or len(set(kinds)) > 1
    if apart and model_problem_type(student.config) != MULTI_LABEL:
        raise InputError(
            "distill: the teachers have different labels, so a sample can have several, but the student"
            f" predicts only one ({model_problem_type(student.config)}). Use samples with lists of labels:"
            f' ["{union[0]}", "{union[-1]}"].',
            code="single-label-student",
            setting="teacher",
        )
    return mine


def _first_labels(labels: Sequence[str]) -> str:
    return ", ".join(f"'{label}'" for label in labels[:6]) + (
        f" and {len(labels) - 6} more" if len(labels) > 6 else ""
    )
