"""A linear layer of codes with a low-rank adapter beside it, which stays float."""

from __future__ import annotations

from torch import Tensor, nn

from smelt.runtime.layers.low_rank import LowRankLinear
from smelt.runtime.layers.quantized import QuantizedLinear


class AdaptedLinear(nn.Module):
    """y = coded(x) + adapter(x), both [..., K] -> [..., N]; the bias is that of `coded`.

    What training found beside codes is kept as it is. Merged, the sum would have to be rounded to codes
    again, with an error as large as the one that the adapter was trained to make good.
    """

    weight = None  # T5 asks its layers for the type of their weight, and goes on where there is none

    def __init__(self, coded: QuantizedLinear, rank: int) -> None:
        """Put an adapter of a rank, with room for its weights, beside `coded`, on the same device."""
        super().__init__()
        self.coded = coded
        pair = LowRankLinear(coded.in_features, coded.out_features, rank, bias=False)
        self.adapter = pair.to(coded.matrix.codes.device)

    @property
    def in_features(self) -> int:
        """K."""
        return self.coded.in_features

    @property
    def out_features(self) -> int:
        """N."""
        return self.coded.out_features

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., K] to [..., N]."""
        out: Tensor = self.coded(x) + self.adapter(x)
        return out
