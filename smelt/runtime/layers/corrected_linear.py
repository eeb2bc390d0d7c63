"""A quantized linear layer with a low-rank correction, which stays float.

The correction is a trained adapter (compress/train/lora.py), or compensates quantization
error (compress/quantize/low_rank_correction.py).
"""

from __future__ import annotations

from torch import Tensor, nn

from smelt.runtime.layers.low_rank_linear import LowRankLinear
from smelt.runtime.layers.quantized import QuantizedLinear


class LowRankCorrectedLinear(nn.Module):
    """y = coded(x) + adapter(x), both [..., K] -> [..., N]; the bias is that of `coded`.

    The adapter that training added to quantized weights is kept separate. Merged, the sum would have to be
    quantized again, with an error as large as the one that the adapter was trained to compensate.
    """

    weight = None  # T5 reads the type of its layers' weight, and skips layers without one

    def __init__(self, coded: QuantizedLinear, rank: int) -> None:
        """Add an adapter of a rank, with room for its weights, to `coded`, on the same device."""
        super().__init__()
        self.coded = coded
        pair = LowRankLinear(coded.in_features, coded.out_features, rank, bias=False)
        self.adapter = pair.to(coded.matrix.codes.device)

    @property
    def in_features(self) -> int:
        """Return K."""
        return self.coded.in_features

    @property
    def out_features(self) -> int:
        """Return N."""
        return self.coded.out_features

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., K] to [..., N]."""
        out: Tensor = self.coded(x) + self.adapter(x)
        return out


def with_low_rank_correction(quantized: QuantizedLinear, up: Tensor, down: Tensor) -> LowRankCorrectedLinear:
    """Return `quantized` with the correction `up`, float [N, r], and `down`, float [r, K], in its mode."""
    new = LowRankCorrectedLinear(quantized, len(down))
    new.adapter.up.weight.data, new.adapter.down.weight.data = up.detach().clone(), down.detach().clone()
    return new.train(quantized.training)
