"""A convolution factorized into smaller ones.

Shapes: B = batch, S = input channels, T = output channels, h, w = height and width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn


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
