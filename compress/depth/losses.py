"""The loss of a model without some of its layers, or parts of them, for one choice after another."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from smelt.compress.calibration.retried import Retried
from smelt.compress.depth.influence import Layer
from smelt.compress.train.data import TensorBatch
from smelt.compress.train.objective import label_objective, mean_loss
from smelt.core.stage import Context
from smelt.runtime.backends.device import torch_device

# Lets the model compute meanwhile as if what it is given were not there.
Without = Callable[[Collection[Layer]], AbstractContextManager[None]]


@dataclass
class Losses:
    """Losses of one model on the same rows, each without something else (see `drop_by_loss`).

    What is tried one behind another, while the same is gone besides, runs from its own layer on: what stands
    before that has been run.

    retried: the model and its rows, on `device`. without: what is gone meanwhile. place: the layer in which
    something lies. progress: is told each loss.
    """

    retried: Retried
    device: torch.device
    without: Without
    place: Callable[[Layer], Layer]
    progress: Callable[[float], None]
    besides: frozenset[Layer] = field(default=frozenset())

    def __call__(self, gone: frozenset[Layer], tried: Layer | None = None) -> float:
        """Return the loss without `gone`, of which `tried` is tried; None: nothing is."""
        besides = gone - {tried}
        if tried is None or besides != self.besides:
            self.retried.start_over()
        self.besides = besides
        if tried is not None:
            with self.without(besides):
                self.retried.start_at(*self.place(tried))
        objective = self.retried.calling(label_objective())
        with self.without(gone):
            loss = mean_loss(self.retried.model, self.retried.batches, objective, "fp32", self.device)
        self.progress(loss)
        return loss


@contextmanager
def losses_of(
    model: Any,
    batches: Sequence[TensorBatch],
    without: Without,
    ctx: Context,
    most: int,
    place: Callable[[Layer], Layer] = lambda layer: layer,
) -> Iterator[Losses]:
    """Give the losses of `model`, in eval mode, which is on the device of `ctx` meanwhile.

    Args:
        model: of a family.
        batches: with labels.
        without: see `Losses`.
        ctx: device, progress; a temporary folder beside `ctx.out` where memory is short.
        most: how many losses there will be, for the display.
        place: see `Losses`; a layer lies in itself.
    """
    tries = 0

    def progress(loss: float) -> None:
        nonlocal tries
        tries += 1
        ctx.progress(tries, most, f"loss {loss:.3f}")

    with on_device(model, ctx) as device, tempfile.TemporaryDirectory(dir=ctx.out.parent) as space:
        placed = [{name: value.to(device) for name, value in batch.items()} for batch in batches]
        yield Losses(Retried(model, placed, Path(space)), device, without, place, progress)


def most_tries(numbers: dict[str, int], there: dict[str, int]) -> int:
    """Return at most how many losses are taken, for the display."""
    drops = sum(there[name] - count for name, count in numbers.items())
    layers = sum(there[name] for name in numbers)
    return 1 + sum(layers - at for at in range(drops))


@contextmanager
def on_device(model: Any, ctx: Context) -> Iterator[torch.device]:
    """Let `model` be on the device of `ctx` meanwhile."""
    device = torch.device(torch_device(ctx.device))
    try:
        model.to(device)
        yield device
    finally:
        model.to("cpu")
