"""A linear layer whose inputs are multiplied first, each by a factor of its own.

Where nothing in front of a layer can take a scale (the sum after a norm reads that norm too, a function that
is not linear lies between), the layer brings it along, as in AWQ's published code (qmodule.py,
ScaledActivation).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ScaledLinear(nn.Module):
    """y = linear(x * factors).

    linear: a plain `nn.Linear`, so that quantization finds it. factors: float32 [K].
    """

    weight = None  # T5 asks its layers for the type of their weight, and goes on where there is none

    def __init__(self, linear: nn.Linear) -> None:
        """Put factors, all 1, before `linear`, on the same device."""
        super().__init__()
        self.linear = linear
        like = linear.weight
        self.factors = nn.Parameter(torch.ones(linear.in_features, dtype=like.dtype, device=like.device))

    @property
    def in_features(self) -> int:
        """K."""
        return self.linear.in_features

    @property
    def out_features(self) -> int:
        """N."""
        return self.linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., K] to [..., N]."""
        out: Tensor = self.linear(x * self.factors)
        return out
