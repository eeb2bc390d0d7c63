"""The straight-through gradient: rounding computes forwards and is looked through backwards."""

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
    """Return `values`; their gradient goes to `weight` as it is.

    Bengio et al. 2013, Estimating or Propagating Gradients Through Stochastic Neurons, arXiv:1308.3432.

    Args:
        weight: float32, what the optimizer moves.
        values: what the codes made of `weight` stand for, same shape.
    """
    out: Tensor = _StraightThrough.apply(weight, values.detach())  # type: ignore[no-untyped-call]
    return out
