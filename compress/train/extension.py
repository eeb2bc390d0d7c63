"""What a technique adds to the training that all share; every part is optional.

    train(model, src, settings, ctx, objective=..., extension=Extension(modules={"scores": scores}))

The loop, its checks and the choice of what is kept stay those of every training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

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


def _nothing(step: int, total: int) -> None:
    pass


@dataclass(frozen=True)
class Extension:
    """Parts that a technique adds to a training.

    modules: train with the model (same device, gradient clipping, averages, choice of what is kept) and are
        not saved: projections, scores of masks, multipliers.
    groups: parameters of the model or of `modules` with a learning rate or weight decay of their own.
    around: entered when the model is ready to train, left afterwards (hooks that read what it computes).
    stored: entered while a checkpoint is written, and makes of the model what will be stored.
    before_step, after_step: called with the number of the update, from 1, and how many there will be; after
        the update's weights are there, and before they are averaged or validated.
    eligible: whether the weights after this update (0: before the first) may be those that are kept: while
        weights are still being pruned, the lowest loss is that of the densest.
    """

    modules: Mapping[str, nn.Module] = field(default_factory=dict)
    groups: Sequence[Group] = ()
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    stored: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    before_step: Callable[[int, int], None] = _nothing
    after_step: Callable[[int, int], None] = _nothing
    eligible: Callable[[int], bool] = _always


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
