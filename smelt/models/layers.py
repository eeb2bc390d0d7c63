"""A linear layer, or an embedding, as the product of two smaller ones.

A convolution factorized into smaller ones.

Shapes: B = batch, S = input channels, T = output channels, h, w = height and width.

A linear layer whose inputs are multiplied by one factor each.

Where no preceding layer can absorb a scale (a residual sum also reads the norm, or a function that
is not linear is between), the layer holds it itself, as in AWQ's published code (qmodule.py,
ScaledActivation).

A linear layer of a matrix shared by several layers, and a low-rank difference of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class LowRankLinear(nn.Module):
    """y = up(down(x)): [in -> rank] without bias, then [rank -> out] with the layer's bias.

    Both halves are plain `nn.Linear` (named `down` and `up`), so that quantization finds them.
    """

    weight = None  # T5 reads the type of its layers' weight, and skips layers without one

    def __init__(self, in_features: int, out_features: int, rank: int, bias: bool = True) -> None:
        super().__init__()
        self.down = nn.Linear(in_features, rank, bias=False)
        self.up = nn.Linear(rank, out_features, bias=bias)

    @property
    def in_features(self) -> int:
        """Return the width of the input; pruning may have changed it."""
        return self.down.in_features

    @property
    def out_features(self) -> int:
        """Return the width of the output; pruning may have changed it."""
        return self.up.out_features

    @property
    def rank(self) -> int:
        """Return the width between the two factors."""
        return self.down.out_features

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features]."""
        out: Tensor = self.up(self.down(x))
        return out


class LowRankEmbedding(nn.Module):
    """A narrow embedding, [V -> rank], projected to the model's width, [rank -> D], without bias.

    Source: the factorized embedding of ALBERT, Lan et al. 2020, arXiv:1909.11942, section 3.1. Both parts are
    plain modules (`table` and `up`), so that quantization finds them.
    """

    weight = None  # see LowRankLinear

    def __init__(self, words: int, width: int, rank: int, padding_idx: int | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(words, rank, padding_idx)
        self.up = nn.Linear(rank, width, bias=False)

    @property
    def num_embeddings(self) -> int:
        """Return the number of rows."""
        return self.table.num_embeddings

    @property
    def embedding_dim(self) -> int:
        """Return the width of the output."""
        return self.up.out_features

    @property
    def padding_idx(self) -> int | None:
        """Return the row of padding."""
        return self.table.padding_idx

    @property
    def rank(self) -> int:
        """Return the width of the table."""
        return self.table.embedding_dim

    def forward(self, ids: Tensor) -> Tensor:
        """Map int64 [...] to float [..., D]."""
        out: Tensor = self.up(self.table(ids))
        return out


class LowRankConv(nn.Module):
    """Convolutions in sequence, in the place of one: the last has its bias.

    `steps` are plain `nn.Conv2d`. Tucker-2 has three (1 x 1, D x D, 1 x 1; the first layer of a model two),
    CP has four (1 x 1, D x 1 and 1 x D channel by channel, 1 x 1).
    """

    def __init__(self, steps: Sequence[nn.Conv2d]) -> None:
        super().__init__()
        self.steps = nn.ModuleList(steps)

    @property
    def weight(self) -> Tensor:
        """Return the first one's weight, for its type: ViT reads the type of its patches' convolution."""
        found: Tensor = self.steps[0].get_parameter("weight")
        return found

    def forward(self, x: Tensor) -> Tensor:
        """Map float [B, S, h, w] to [B, T, h', w']."""
        for step in self.steps:
            x = step(x)
        return x


def conv_end_names(model: nn.Module, name: str) -> tuple[str, str]:
    """Return the names of the modules that read the inputs and give the outputs of the convolution `name`.

    They are its own name, or those of the first and the last of its factors.
    """
    module = model.get_submodule(name)
    if not isinstance(module, LowRankConv):
        return name, name
    return f"{name}.steps.0", f"{name}.steps.{len(module.steps) - 1}"


def make_conv_steps(kind: str, conv: nn.Conv2d, ranks: Sequence[int]) -> list[nn.Conv2d]:
    """Return the empty convolutions that replace `conv`, with its stride, padding, dilation and bias.

    Args:
        kind: tucker, with ranks (of the input channels, of the output channels), or (of the output channels)
            where the input channels are not factorized; cp, with one rank.
        conv: of one group, with zero padding.
        ranks: 1 or more.

    Raises:
        ValueError: the convolution or the ranks are not supported.
    """
    if conv.groups != 1 or conv.padding_mode != "zeros" or isinstance(conv.padding, str):
        raise ValueError("only ungrouped convolutions with numeric zero padding can be factorized")
    if min(ranks, default=0) < 1 or max(ranks) > max(conv.in_channels, conv.out_channels) * _kernel_size(
        conv
    ):
        raise ValueError(f"ranks {list(ranks)} are not valid for a {tuple(conv.weight.shape)} convolution")
    where: dict[str, Any] = {"device": conv.weight.device, "dtype": conv.weight.dtype}
    shape: dict[str, Any] = {"stride": conv.stride, "padding": conv.padding, "dilation": conv.dilation}
    last: dict[str, Any] = {"bias": conv.bias is not None, **where}
    size: Any = conv.kernel_size
    if kind == "cp" and len(ranks) == 1:
        [rank] = ranks
        rest = {"stride": 1, "padding": 0, "dilation": 1}
        down: dict[str, Any] = {name: (value[0], rest[name]) for name, value in shape.items()}
        across: dict[str, Any] = {name: (rest[name], value[1]) for name, value in shape.items()}
        return [
            nn.Conv2d(conv.in_channels, rank, 1, bias=False, **where),
            nn.Conv2d(rank, rank, (size[0], 1), groups=rank, bias=False, **down, **where),
            nn.Conv2d(rank, rank, (1, size[1]), groups=rank, bias=False, **across, **where),
            nn.Conv2d(rank, conv.out_channels, 1, **last),
        ]
    if kind == "tucker" and len(ranks) == 2:
        inner, outer = ranks
        return [
            nn.Conv2d(conv.in_channels, inner, 1, bias=False, **where),
            nn.Conv2d(inner, outer, size, bias=False, **shape, **where),
            nn.Conv2d(outer, conv.out_channels, 1, **last),
        ]
    if kind == "tucker" and len(ranks) == 1:
        return [
            nn.Conv2d(conv.in_channels, ranks[0], size, bias=False, **shape, **where),
            nn.Conv2d(ranks[0], conv.out_channels, 1, **last),
        ]
    raise ValueError(f"unknown factorization '{kind[:40]}' with {len(ranks)} ranks")


def resize_conv(old: nn.Conv2d, in_channels: int, out_channels: int) -> nn.Conv2d:
    """Return an empty convolution like `old`, of one group, with other input and output channels."""
    where: dict[str, Any] = {"device": old.weight.device, "dtype": old.weight.dtype}
    shape: dict[str, Any] = {"stride": old.stride, "padding": old.padding, "dilation": old.dilation}
    size: Any = old.kernel_size
    bias = old.bias is not None
    return nn.Conv2d(
        in_channels, out_channels, size, bias=bias, padding_mode=old.padding_mode, **shape, **where
    )


def _kernel_size(conv: nn.Conv2d) -> int:
    return conv.kernel_size[0] * conv.kernel_size[1]


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
