"""The loss of a model with some of its layers, or parts of layers, removed, for one choice after another."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from smelt.compress.calibration.prefix_cache import PrefixCachedModel
from smelt.compress.drop_layers.block_influence import UnitId
from smelt.compress.train.encoded_samples import TensorBatch
from smelt.compress.train.objective import label_objective, mean_loss
from smelt.core.stage import Context
from smelt.runtime.backends.device import torch_device

# Disables the given units inside the context.
WithoutUnits = Callable[[Collection[UnitId]], AbstractContextManager[None]]


@dataclass
class AblationLosses:
    """Losses of one model on the same samples, each without another unit (see `drop_units_by_loss`).

    Trials in a row with the same units removed start at the layer of the tried unit: the states before it
    are cached.

    prefix_model: the model and its samples, on `device`. without: disables units. layer_of: the layer that
    contains a unit. progress: called with each loss.
    """

    prefix_model: PrefixCachedModel
    device: torch.device
    without: WithoutUnits
    layer_of: Callable[[UnitId], UnitId]
    progress: Callable[[float], None]
    already_removed: frozenset[UnitId] = field(default=frozenset())

    def __call__(self, gone: frozenset[UnitId], tried: UnitId | None = None) -> float:
        """Return the loss without `gone`, of which `tried` is on trial; None: no unit is on trial."""
        besides = gone - {tried}
        if tried is None or besides != self.already_removed:
            self.prefix_model.reset()
        self.already_removed = besides
        if tried is not None:
            with self.without(besides):
                self.prefix_model.start_at(*self.layer_of(tried))
        objective = self.prefix_model.resume_each(label_objective())
        with self.without(gone):
            loss = mean_loss(
                self.prefix_model.model, self.prefix_model.batches, objective, "fp32", self.device
            )
        self.progress(loss)
        return loss


@contextmanager
def ablation_losses(
    model: Any,
    batches: Sequence[TensorBatch],
    without: WithoutUnits,
    ctx: Context,
    max_trials: int,
    layer_of: Callable[[UnitId], UnitId] = lambda layer: layer,
) -> Iterator[AblationLosses]:
    """Yield the losses of `model`, in eval mode, which is on the device of `ctx` inside the context.

    Args:
        model: of a supported family.
        batches: with labels.
        without: see `AblationLosses`.
        ctx: device, progress; a temporary folder next to `ctx.out` if memory is short.
        max_trials: the number of losses, for the display.
        layer_of: see `AblationLosses`; by default a unit is a layer.
    """
    tries = 0

    def progress(loss: float) -> None:
        nonlocal tries
        tries += 1
        ctx.progress(tries, max_trials, f"loss {loss:.3f}")

    with model_on_device(model, ctx) as device, tempfile.TemporaryDirectory(dir=ctx.out.parent) as space:
        placed = [{name: value.to(device) for name, value in batch.items()} for batch in batches]
        yield AblationLosses(
            PrefixCachedModel(model, placed, Path(space)), device, without, layer_of, progress
        )


def max_trials(num_kept: dict[str, int], num_present: dict[str, int]) -> int:
    """Return the largest possible number of losses, for the display."""
    drops = sum(num_present[name] - count for name, count in num_kept.items())
    layers = sum(num_present[name] for name in num_kept)
    return 1 + sum(layers - at for at in range(drops))


@contextmanager
def model_on_device(model: Any, ctx: Context) -> Iterator[torch.device]:
    """Move `model` to the device of `ctx` inside the context."""
    device = torch.device(torch_device(ctx.device))
    try:
        model.to(device)
        yield device
    finally:
        model.to("cpu")
