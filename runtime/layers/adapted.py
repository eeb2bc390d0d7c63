"""A linear layer of codes with a low-rank pair beside it, which stays float.

The pair is what adapters learned (compress/train/lora.py), or what codes lose
(compress/quantize/low_rank.py).
"""

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


def adapted(coded: QuantizedLinear, up: Tensor, down: Tensor) -> AdaptedLinear:
    """Return `coded` with the pair `up`, float [N, r], and `down`, float [r, K], beside it, in its mode."""
    new = AdaptedLinear(coded, len(down))
    new.adapter.up.weight.data, new.adapter.down.weight.data = up.detach().clone(), down.detach().clone()
    return new.train(coded.training)
