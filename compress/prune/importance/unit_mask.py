"""A mask of ones on the units of a model, whose gradient measures their importance."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


def unit_mask_hook(mask: Tensor, width: int) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
    """Return a hook that multiplies a layer's inputs by `mask` [units], `width` columns per unit."""

    def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0] * mask.repeat_interleave(width), *inputs[1:])

    return hook
