"""A linear layer of a matrix shared by several layers, and a low-rank difference of its own."""

from __future__ import annotations

from torch import Tensor, nn

from smelt.runtime.layers.low_rank_linear import LowRankLinear


class SharedLinear(nn.Module):
    """y = shared(x) + difference(x), both [..., K] -> [..., N].

    `shared` is one module in several layers, without bias; the difference is a low-rank product with the
    layer's bias. So each layer multiplies with a matrix of its own, W_shared + B A, at a small storage cost
    (Bae et al. 2024, Relaxed Recursive Transformers, arXiv:2410.20672, equation 3).
    """

    weight = None  # T5 reads the type of its layers' weight, and skips layers without one

    def __init__(self, in_features: int, out_features: int, rank: int, bias: bool = True) -> None:
        super().__init__()
        self.shared: nn.Module = nn.Linear(in_features, out_features, bias=False)
        self.difference = LowRankLinear(in_features, out_features, rank, bias)

    @property
    def in_features(self) -> int:
        """Return K."""
        return self.difference.in_features

    @property
    def out_features(self) -> int:
        """Return N."""
        return self.difference.out_features

    @property
    def rank(self) -> int:
        """Return the rank of the difference."""
        return self.difference.rank

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., K] to [..., N]."""
        out: Tensor = self.shared(x) + self.difference(x)
        return out


def component_layers(module: nn.Module, name: str = "") -> dict[str, nn.Module]:
    """Return the layers that `module`, called `name`, consists of, by their names; a plain one is its own."""
    if isinstance(module, SharedLinear):
        inner = f"{name}.difference".removeprefix(".")
        return component_layers(module.shared, f"{name}.shared".removeprefix(".")) | component_layers(
            module.difference, inner
        )
    if isinstance(module, LowRankLinear):
        return {f"{name}.{half}".removeprefix("."): getattr(module, half) for half in ("down", "up")}
    return {name: module}
