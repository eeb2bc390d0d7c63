"""What a technique adds to the training that all share; every part is optional.

    train(model, src, settings, ctx, objective=..., extension=Extension(modules={"scores": scores}))

The loop, its checks and the choice of what is kept stay those of every training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from smelt.compress.train.data import Row
from smelt.compress.train.terms import Objective
from smelt.core.stage import Context

_NAME = "smelt_extension"  # under it the modules hang on the model while it trains


@dataclass(frozen=True)
class Group:
    """Parameters that the optimizer treats in their own way.

    learning_rate: the highest; the schedule is that of the others. weight_decay: of these. None: as the
    others. maximize: they rise along the gradient, as the multipliers of a constraint do.
    """

    parameters: Sequence[nn.Parameter]
    learning_rate: float | None = None
    weight_decay: float | None = None
    maximize: bool = False

    def options(self) -> dict[str, Any]:
        """Return what of it is said, by the optimizer's words."""
        said = {"lr": self.learning_rate, "weight_decay": self.weight_decay}
        found: dict[str, Any] = {word: value for word, value in said.items() if value is not None}
        return found | ({"maximize": True} if self.maximize else {})


def _always(step: int) -> bool:
    return True


def _same(rows: list[Row], validation: list[Row] | None) -> tuple[list[Row], list[Row] | None]:
    return rows, validation


def _nothing(step: int, total: int) -> None:
    pass


@dataclass(frozen=True)
class Extension:
    """Parts that a technique adds to a training.

    modules: train with the model (same device, gradient clipping, averages, choice of what is kept) and are
        not saved: projections, scores of masks, multipliers.
    groups: parameters of the model or of `modules` with a learning rate or weight decay of their own.
    rows: gets the rows of training and validation when they are encoded, and returns those that are taken.
    around: entered when the model is ready to train, left afterwards (hooks that read what it computes).
    stored: entered while a checkpoint is written, and makes of the model what will be stored.
    incoming: entered while the model is validated before the first update: a quantized model computes with
        the integers that came in, which are not those of the float weights that train.
    before_step, after_step: called with the number of the update, from 1, and how many there will be; after
        the update's weights are there, and before they are averaged or validated.
    resumes: whether a training that was stopped can go on with it: all that changes is in parameters and
        buffers. None: where nothing is called in each step.
    eligible: whether the weights after this update (0: before the first) may be those that are kept: while
        weights are still being pruned, the lowest loss is that of the densest.
    """

    modules: Mapping[str, nn.Module] = field(default_factory=dict)
    groups: Sequence[Group] = ()
    rows: Callable[[list[Row], list[Row] | None], tuple[list[Row], list[Row] | None]] = _same
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    stored: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    incoming: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    before_step: Callable[[int, int], None] = _nothing
    after_step: Callable[[int, int], None] = _nothing
    resumes: bool | None = None
    eligible: Callable[[int], bool] = _always

    @property
    def can_resume(self) -> bool:
        """Whether a training with it can go on from a checkpoint."""
        plain = self.before_step is _nothing and self.after_step is _nothing
        return plain if self.resumes is None else self.resumes


class WhileTraining(Protocol):
    """A technique that changes the model while it trains: it begins when it is made."""

    def objective(self, objective: Objective) -> Objective:
        """Return what is minimised instead of `objective`."""

    def extension(self) -> Extension:
        """Return what it adds to the training."""

    def settle(self, ctx: Context) -> None:
        """Leave the model as it is to be stored, and say in `ctx` what became of it."""


def both(one: Extension, other: Extension) -> Extension:
    """Return what two techniques add together; weights may be kept where both allow it."""

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

    def rows(train: list[Row], validation: list[Row] | None) -> tuple[list[Row], list[Row] | None]:
        return other.rows(*one.rows(train, validation))

    return Extension(
        modules={**one.modules, **other.modules},
        rows=rows,
        groups=[*one.groups, *other.groups],
        around=entering(one.around, other.around),
        stored=entering(one.stored, other.stored),
        before_step=after_one_another(one.before_step, other.before_step),
        after_step=after_one_another(one.after_step, other.after_step),
        eligible=lambda step: one.eligible(step) and other.eligible(step),
        resumes=one.can_resume and other.can_resume,
    )


@contextlib.contextmanager
def attached(model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Let `modules` be part of `model` meanwhile, so that they go where it goes."""
    if not modules:
        yield
        return
    model.add_module(_NAME, nn.ModuleDict(dict(modules)))
    try:
        yield
    finally:
        del model._modules[_NAME]


@contextlib.contextmanager
def detached(model: nn.Module) -> Iterator[None]:
    """Let `model` be without what is attached to it meanwhile, as it will be stored."""
    there = model._modules.pop(_NAME, None)
    try:
        yield
    finally:
        if there is not None:
            model._modules[_NAME] = there


def split_groups(options: Sequence[Mapping[str, Any]], groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Take the parameters of `groups` out of an optimizer's groups, and put those of their own behind them.

    Args:
        options: torch's parameter groups.
        groups: what is taken out; each inherits what it does not say from the group that held it.
    """
    found: list[dict[str, Any]] = []
    own = {id(p): number for number, group in enumerate(groups) for p in group.parameters}
    for option in options:
        kept = [p for p in option["params"] if id(p) not in own]
        found.append({**option, "params": kept})
        for number, group in enumerate(groups):
            mine = [p for p in option["params"] if own.get(id(p)) == number]
            if mine:
                found.append({**option, "params": mine, **group.options()})
    return [option for option in found if option["params"]]
