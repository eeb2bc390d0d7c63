"""A linear layer as the product of two thin ones."""

from __future__ import annotations

from torch import Tensor, nn


class LowRankLinear(nn.Module):
    """y = up(down(x)): [in -> rank] without bias, then [rank -> out] with the layer's bias.

    Both halves are plain `nn.Linear` (named `down` and `up`), so that quantization finds them.
    """

    weight = None  # T5 asks its layers for the type of their weight, and goes on where there is none

    def __init__(self, in_features: int, out_features: int, rank: int, bias: bool = True) -> None:
        super().__init__()
        self.down = nn.Linear(in_features, rank, bias=False)
        self.up = nn.Linear(rank, out_features, bias=bias)

    @property
    def in_features(self) -> int:
        """Width of the input; pruning may have changed it."""
        return self.down.in_features

    @property
    def out_features(self) -> int:
        """Width of the output; pruning may have changed it."""
        return self.up.out_features

    @property
    def rank(self) -> int:
        """Width between the two halves."""
        return self.down.out_features

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features]."""
        out: Tensor = self.up(self.down(x))
        return out
