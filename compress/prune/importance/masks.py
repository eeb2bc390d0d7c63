"""A mask of ones on the units of a model, whose gradient says what each is worth."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


def masking(mask: Tensor, width: int) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
    """Return a hook that multiplies what a product is given with `mask` [units], `width` columns a unit."""

    def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0] * mask.repeat_interleave(width), *inputs[1:])

    return hook
