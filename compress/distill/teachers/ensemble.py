"""Several teachers as one: their probabilities averaged, or each asked about the labels that it knows.

Hinton et al. 2015, arXiv:1503.02531, take the (arithmetic) mean of an ensemble's probabilities as soft
targets. What is averaged are probabilities at the temperature T; what comes out are logits whose softmax (or
sigmoids) at T are that mean, so that every loss with one teacher is one with several.

Shapes: C = labels of one teacher, U = of all together, V = words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from smelt.compress.train.losses.of_classes import problem_of
from smelt.core.errors import InputError
from smelt.core.labels import MULTI, REGRESSION, ProblemType


class Ensemble(nn.Module):
    """Runs several models of one task on the same inputs, and joins their logits.

    config: of what comes out: the first model's, with the labels of all.
    """

    def __init__(self, models: Sequence[Any], join: Callable[[list[Tensor]], Tensor], config: Any) -> None:
        super().__init__()
        self.models: Any = nn.ModuleList(models)
        self.join, self.config = join, config

    def forward(self, **inputs: Any) -> Any:
        """Return what they say together, as `logits`."""
        return SimpleNamespace(logits=self.join([model(**inputs).logits for model in self.models]))

    def can_generate(self) -> bool:
        """Say whether texts come out of them."""
        found: bool = self.models[0].can_generate()
        return found


def averaged(logits: Sequence[Tensor], temperature: float) -> Tensor:
    """Return float32 [..., V], whose softmax at T is the mean of the softmaxes of `logits` at T."""
    each = torch.stack([(z.float() / temperature).log_softmax(dim=-1) for z in logits])
    return temperature * (each.logsumexp(dim=0) - math.log(len(logits)))


def united(
    logits: Sequence[Tensor], places: Sequence[Sequence[int]], labels: int, kinds: Sequence[ProblemType],
    temperature: float,
) -> Tensor:  # fmt: skip
    """Return float32 [B, U], whose sigmoids at T say how likely each label is.

    Of a label that several know it is the mean of what they say.

    Args:
        logits: of each teacher, float [B, C].
        places: of each teacher's labels among all.
        labels: U.
        kinds: of each teacher: where a text has one label, softmax gives its probabilities, else sigmoid.
        temperature: T.
    """
    chances = logits[0].new_zeros(len(logits[0]), labels, dtype=torch.float64)
    others, known = torch.zeros_like(chances), chances.new_zeros(labels)
    for z, mine, kind in zip(logits, places, kinds, strict=True):
        scaled = z.double() / temperature
        if kind == MULTI:
            yes, no = scaled.sigmoid(), (-scaled).sigmoid()
        else:
            yes = scaled.softmax(dim=-1)
            no = _without_each(yes)
        at = torch.tensor(list(mine), device=z.device)
        chances.index_add_(1, at, yes)
        others.index_add_(1, at, no)
        known[at] += 1
    odds = (chances.log() - others.log()).clamp(-_MOST, _MOST)  # the count of who knows it cancels
    return (temperature * odds).float()


_MOST = 80.0  # of a logit: e^-80 is the last that float32 tells from 0


def _without_each(p: Tensor) -> Tensor:
    """Return for each class the sum of the probabilities of all others, [B, C], exact near 0."""
    left = torch.cat([torch.zeros_like(p[:, :1]), p.cumsum(dim=1)[:, :-1]], dim=1)
    right = torch.cat([p.flip(1).cumsum(dim=1).flip(1)[:, 1:], torch.zeros_like(p[:, :1])], dim=1)
    return left + right


def joined(models: Sequence[Any], names: Sequence[str], student: Any, temperature: float) -> Ensemble:
    """Return `models` as one teacher of `student`.

    Args:
        models: in eval mode.
        names: of each, for messages.
        student: None while there is none yet; its labels come out in its order.
        temperature: of the loss.

    Raises:
        InputError: they are of different tasks, or their labels do not fit each other or the student's.
    """
    config = models[0].config
    if any(model.can_generate() for model in models):
        return Ensemble(models, lambda found: averaged(found, temperature), config)
    labels = [_labels(model.config) for model in models]
    kinds = [problem_of(model.config) for model in models]
    union = list(dict.fromkeys(label for own in labels for label in own))
    order = union if student is None else _order(student, union, kinds, labels)
    places = [[order.index(label) for label in own] for own in labels]
    if REGRESSION in kinds:
        if set(kinds) != {REGRESSION}:
            raise InputError(
                f"distill: of the teachers {', '.join(names)} some give numbers and some classes.",
                code="problem-type-mismatch",
                setting="teacher",
            )
        return Ensemble(models, lambda found: torch.stack([z.float() for z in found]).mean(dim=0), config)
    same = all(set(own) == set(union) for own in labels) and len(set(kinds)) == 1
    if same and kinds[0] != MULTI:
        columns = [[own.index(label) for label in order] for own in labels]
        return Ensemble(
            models,
            lambda found: averaged([z[:, c] for z, c in zip(found, columns, strict=True)], temperature),
            _saying(config, order, kinds[0]),
        )
    return Ensemble(
        models,
        lambda found: united(found, places, len(order), kinds, temperature),
        _saying(config, order, MULTI),
    )


def _labels(config: Any) -> list[str]:
    return [str(config.id2label[i]) for i in range(len(config.id2label))]


def _saying(config: Any, labels: Sequence[str], kind: ProblemType) -> Any:
    """Return a copy of `config` with these labels."""
    values: Mapping[str, Any] = config.to_dict() | {
        "id2label": dict(enumerate(labels)),
        "label2id": {label: i for i, label in enumerate(labels)},
        "problem_type": kind,
    }
    return type(config).from_dict(values)


def _order(
    student: Any, union: Sequence[str], kinds: Sequence[ProblemType], labels: Sequence[Sequence[str]]
) -> list[str]:
    """Return the labels in the student's order.

    Raises:
        InputError: it lacks one, has one that nobody teaches, or can say only one where several hold.
    """
    mine = _labels(student.config)
    lacking = [label for label in union if label not in mine]
    untaught = [label for label in mine if label not in union]
    if lacking or untaught:
        what = (
            f"the student does not know {_few(lacking)}" if lacking else f"no teacher knows {_few(untaught)}"
        )
        raise InputError(
            f"distill: the teachers' labels are {_few(union)}, the student's {_few(mine)}: {what}. A student"
            " of several teachers has the labels of all; start from an encoder without a classifier and rows"
            " that have them, or give student: {config: FILE}.",
            code="labels-mismatch" if lacking else "untaught-labels",
            setting="teacher",
        )
    apart = any(set(own) != set(union) for own in labels) or len(set(kinds)) > 1
    if apart and problem_of(student.config) != MULTI:
        raise InputError(
            "distill: the teachers know different labels, so that several hold for a text, and the student"
            f' says one ({problem_of(student.config)}). Give rows whose label is a list: ["{union[0]}",'
            f' "{union[-1]}"].',
            code="single-label-student",
            setting="teacher",
        )
    return mine


def _few(labels: Sequence[str]) -> str:
    return ", ".join(f"'{label}'" for label in labels[:6]) + (
        f" and {len(labels) - 6} more" if len(labels) > 6 else ""
    )
