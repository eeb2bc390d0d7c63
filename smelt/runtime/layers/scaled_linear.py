"""A linear layer whose inputs are multiplied by one factor each.

Where no preceding layer can absorb a scale (a residual sum also reads the norm, or a function that
is not linear is between), the layer holds it itself, as in AWQ's published code (qmodule.py,
ScaledActivation).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ScaledLinear(nn.Module):
    """y = linear(x * factors).

    linear: a plain `nn.Linear`, so that quantization finds it. factors: float32 [K].
    """

    weight = None  # T5 reads the type of its layers' weight, and skips layers without one

    def __init__(self, linear: nn.Linear) -> None:
        """Add factors, all 1, before `linear`, on the same device."""
        super().__init__()
        self.linear = linear
        like = linear.weight
        self.factors = nn.Parameter(torch.ones(linear.in_features, dtype=like.dtype, device=like.device))

    @property
    def in_features(self) -> int:
        """Return K."""
        return self.linear.in_features

    @property
    def out_features(self) -> int:
        """Return N."""
        return self.linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., K] to [..., N]."""
        out: Tensor = self.linear(x * self.factors)
        return out
