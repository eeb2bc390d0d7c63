"""The straight-through gradient: rounding computes forwards and is looked through backwards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, values: Tensor, passes: Tensor | None) -> Tensor:
        ctx.save_for_backward(*(() if passes is None else (passes,)))
        return values

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, None, None]:
        gradient = outputs[0]
        return (gradient * ctx.saved_tensors[0] if ctx.saved_tensors else gradient), None, None


def straight_through(weight: Tensor, values: Tensor, passes: Tensor | None = None) -> Tensor:
    """Return `values`; their gradient goes to `weight` where `passes` is true, and nowhere else.

    Bengio et al. 2013, Estimating or Propagating Gradients Through Stochastic Neurons, arXiv:1308.3432.

    Args:
        weight: float32, what the optimizer moves.
        values: what the codes made of `weight` stand for, same shape.
        passes: bool, same shape; None lets all gradients through.
    """
    out: Tensor = _StraightThrough.apply(weight, values.detach(), passes)  # type: ignore[no-untyped-call]
    return out
