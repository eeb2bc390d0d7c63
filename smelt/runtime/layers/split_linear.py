"""A linear layer that is the sum of two: one quantized matrix becomes two of fewer bits."""

from __future__ import annotations

from torch import Tensor, nn


class SplitLinear(nn.Module):
    """y = first(x) + second(x), both [..., K] -> [..., N]; the bias is that of `first`."""

    weight = None  # T5 reads the type of its layers' weight, and skips layers without one

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    @property
    def in_features(self) -> int:
        """Return K."""
        return int(self.first.in_features)  # type: ignore[arg-type]

    @property
    def out_features(self) -> int:
        """Return N."""
        return int(self.first.out_features)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., K] to [..., N]."""
        out: Tensor = self.first(x) + self.second(x)
        return out


def make_split_linear(layer: nn.Linear) -> SplitLinear:
    """Return two Linears of the size of `layer`, the first with its bias if any; values are not copied."""
    kind = {"device": layer.weight.device, "dtype": layer.weight.dtype}
    first = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, **kind)
    return SplitLinear(first, nn.Linear(layer.in_features, layer.out_features, bias=False, **kind))
