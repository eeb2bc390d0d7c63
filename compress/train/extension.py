"""Extensions of the shared training by a technique; every part is optional.

    train(model, src, settings, ctx, objective=..., extension=TrainingExtension(modules={"scores": scores}))

The loop, its checks and the selection of checkpoints are the same for every training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from smelt.compress.train.encoded_samples import EncodedSample
from smelt.compress.train.loss_terms import Objective
from smelt.core.stage import Context

_MODULES_NAME = "smelt_extension"  # attribute of the model that holds the modules while it trains


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with optimizer settings of their own.

    learning_rate: the peak; the schedule is that of the others. weight_decay: of these. None: as the
    others. maximize: gradient ascent, as for the multipliers of a constraint.
    """

    parameters: Sequence[nn.Parameter]
    learning_rate: float | None = None
    weight_decay: float | None = None
    maximize: bool = False

    def optimizer_options(self) -> dict[str, Any]:
        """Return the settings that are not None, by the optimizer's names."""
        said = {"lr": self.learning_rate, "weight_decay": self.weight_decay}
        found: dict[str, Any] = {word: value for word, value in said.items() if value is not None}
        return found | ({"maximize": True} if self.maximize else {})


def _allow_any_step(step: int) -> bool:
    return True


def _unchanged_samples(
    samples: list[EncodedSample], validation: list[EncodedSample] | None
) -> tuple[list[EncodedSample], list[EncodedSample] | None]:
    return samples, validation


def _ignore_step(step: int, total: int) -> None:
    pass


@dataclass(frozen=True)
class TrainingExtension:
    """Parts that a technique adds to a training.

    modules: trained with the model (same device, gradient clipping, averages, checkpoint selection) and
        not saved: projections, scores of masks, multipliers.
    groups: parameters of the model or of `modules` with their own learning rate or weight decay.
    prepare_samples: gets the encoded training and validation samples and returns the ones to use.
    training_context: active while the model trains (hooks that capture tensors).
    as_stored: active while a checkpoint is written; makes the model as it will be stored.
    as_incoming: active while the model is validated before the first update: a quantized model computes with
        its incoming quantized weights, which differ from those of its float master weights.
    before_step, after_step: called with the number of the update, from 1, and the number of updates; the
        latter after the weights are updated, and before they are averaged or validated.
    supports_resume: whether an interrupted training can resume with it: all its state is in parameters and
        buffers. None: if it has no calls in each step.
    may_be_best: whether the weights after this update (0: before the first) may be selected: while weights
        are still being pruned, the densest have the lowest loss.
    """

    modules: Mapping[str, nn.Module] = field(default_factory=dict)
    groups: Sequence[ParameterGroup] = ()
    prepare_samples: Callable[
        [list[EncodedSample], list[EncodedSample] | None],
        tuple[list[EncodedSample], list[EncodedSample] | None],
    ] = _unchanged_samples
    training_context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    as_stored: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    as_incoming: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    before_step: Callable[[int, int], None] = _ignore_step
    after_step: Callable[[int, int], None] = _ignore_step
    supports_resume: bool | None = None
    may_be_best: Callable[[int], bool] = _allow_any_step

    @property
    def can_resume(self) -> bool:
        """Whether a training with it can resume from a checkpoint."""
        plain = self.before_step is _ignore_step and self.after_step is _ignore_step
        return plain if self.supports_resume is None else self.supports_resume


class TrainingTechnique(Protocol):
    """A technique that changes the model while it trains: it starts when it is created."""

    def objective(self, objective: Objective) -> Objective:
        """Return the objective to minimize instead of `objective`."""

    def extension(self) -> TrainingExtension:
        """Return the extension of the training."""

    def finalize(self, ctx: Context) -> None:
        """Convert the model to its stored form, and report to `ctx`."""


def combine_extensions(first: TrainingExtension, second: TrainingExtension) -> TrainingExtension:
    """Return the combination of two extensions; weights may be selected if both allow it."""

    def entering(
        *parts: Callable[[], AbstractContextManager[Any]],
    ) -> Callable[[], AbstractContextManager[Any]]:
        @contextlib.contextmanager
        def entered() -> Iterator[None]:
            with contextlib.ExitStack() as stack:
                for part in parts:
                    stack.enter_context(part())
                yield

        return entered

    def after_one_another(*parts: Callable[[int, int], None]) -> Callable[[int, int], None]:
        def called(step: int, total: int) -> None:
            for part in parts:
                part(step, total)

        return called

    def rows(
        train: list[EncodedSample], validation: list[EncodedSample] | None
    ) -> tuple[list[EncodedSample], list[EncodedSample] | None]:
        return second.prepare_samples(*first.prepare_samples(train, validation))

    return TrainingExtension(
        modules={**first.modules, **second.modules},
        prepare_samples=rows,
        groups=[*first.groups, *second.groups],
        training_context=entering(first.training_context, second.training_context),
        as_stored=entering(first.as_stored, second.as_stored),
        before_step=after_one_another(first.before_step, second.before_step),
        after_step=after_one_another(first.after_step, second.after_step),
        may_be_best=lambda step: first.may_be_best(step) and second.may_be_best(step),
        supports_resume=first.can_resume and second.can_resume,
    )


@contextlib.contextmanager
def modules_attached(model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Attach `modules` to `model` inside the context, so that they move with it."""
    if not modules:
        yield
        return
    model.add_module(_MODULES_NAME, nn.ModuleDict(dict(modules)))
    try:
        yield
    finally:
        del model._modules[_MODULES_NAME]


@contextlib.contextmanager
def modules_detached(model: nn.Module) -> Iterator[None]:
    """Detach the attached modules from `model` inside the context, as it will be stored."""
    there = model._modules.pop(_MODULES_NAME, None)
    try:
        yield
    finally:
        if there is not None:
            model._modules[_MODULES_NAME] = there


def split_parameter_groups(
    options: Sequence[Mapping[str, Any]], groups: Sequence[ParameterGroup]
) -> list[dict[str, Any]]:
    """Return the optimizer's groups without the parameters of `groups`, followed by those groups.

    Args:
        options: torch's parameter groups.
        groups: the groups to split off; each inherits unset values from the group of its parameters.
    """
    found: list[dict[str, Any]] = []
    own = {id(p): number for number, group in enumerate(groups) for p in group.parameters}
    for option in options:
        kept = [p for p in option["params"] if id(p) not in own]
        found.append({**option, "params": kept})
        for number, group in enumerate(groups):
            mine = [p for p in option["params"] if own.get(id(p)) == number]
            if mine:
                found.append({**option, "params": mine, **group.optimizer_options()})
    return [option for option in found if option["params"]]
