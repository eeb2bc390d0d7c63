"""A linear layer of a matrix that several layers share, and of a thin difference of its own."""

from __future__ import annotations

from torch import Tensor, nn

from smelt.runtime.layers.low_rank import LowRankLinear


class SharedLinear(nn.Module):
    """y = shared(x) + difference(x), both [..., K] -> [..., N].

    `shared` is one module in several layers, without bias; the difference is a low-rank pair with the
    layer's bias. So each layer multiplies with a matrix of its own, W_shared + B A, of which little is stored
    (Bae et al. 2024, Relaxed Recursive Transformers, arXiv:2410.20672, equation 3).
    """

    weight = None  # T5 asks its layers for the type of their weight, and goes on where there is none

    def __init__(self, in_features: int, out_features: int, rank: int, bias: bool = True) -> None:
        super().__init__()
        self.shared: nn.Module = nn.Linear(in_features, out_features, bias=False)
        self.difference = LowRankLinear(in_features, out_features, rank, bias)

    @property
    def in_features(self) -> int:
        """K."""
        return self.difference.in_features

    @property
    def out_features(self) -> int:
        """N."""
        return self.difference.out_features

    @property
    def rank(self) -> int:
        """Of the difference."""
        return self.difference.rank

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., K] to [..., N]."""
        out: Tensor = self.shared(x) + self.difference(x)
        return out


def parts_of(module: nn.Module, name: str = "") -> dict[str, nn.Module]:
    """Return the layers that `module`, called `name`, is made of, by their names; a plain one alone."""
    if isinstance(module, SharedLinear):
        inner = f"{name}.difference".removeprefix(".")
        return parts_of(module.shared, f"{name}.shared".removeprefix(".")) | parts_of(
            module.difference, inner
        )
    if isinstance(module, LowRankLinear):
        return {f"{name}.{half}".removeprefix("."): getattr(module, half) for half in ("down", "up")}
    return {name: module}
