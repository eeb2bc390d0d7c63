"""The straight-through estimator: rounding in the forward pass, identity gradient in the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, values: Tensor) -> Tensor:
        return values

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, None]:
        return outputs[0], None


def straight_through(weight: Tensor, values: Tensor) -> Tensor:
    """Return `values`, whose gradient is passed to `weight` unchanged.

    Bengio et al. 2013, Estimating or Propagating Gradients Through Stochastic Neurons, arXiv:1308.3432.

    Args:
        weight: float32, the trained weights.
        values: the dequantized values of `weight`, same shape.
    """
    out: Tensor = _StraightThrough.apply(weight, values.detach())  # type: ignore[no-untyped-call]
    return out
