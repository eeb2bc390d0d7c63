"""A convolution as the product of thinner ones.

Shapes: B = batch, S = channels in, T = channels out, h, w = height and width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn


class LowRankConv(nn.Module):
    """Convolutions one behind the other, in the place of one: the last has its bias.

    `steps` are plain `nn.Conv2d`. Tucker-2 has three (1 x 1, D x D, 1 x 1; the first layer of a model two),
    CP has four (1 x 1, D x 1 and 1 x D channel by channel, 1 x 1).
    """

    def __init__(self, steps: Sequence[nn.Conv2d]) -> None:
        super().__init__()
        self.steps = nn.ModuleList(steps)

    @property
    def weight(self) -> Tensor:
        """That of the first, which says the type: ViT asks its patches' convolution for it."""
        found: Tensor = self.steps[0].get_parameter("weight")
        return found

    def forward(self, x: Tensor) -> Tensor:
        """Map float [B, S, h, w] to [B, T, h', w']."""
        for step in self.steps:
            x = step(x)
        return x


def ends_of(model: nn.Module, name: str) -> tuple[str, str]:
    """Return the names of what reads the inputs and gives the outputs of the convolution `name`.

    They are its own, or those of the first and the last of the thinner ones that stand for it.
    """
    module = model.get_submodule(name)
    if not isinstance(module, LowRankConv):
        return name, name
    return f"{name}.steps.0", f"{name}.steps.{len(module.steps) - 1}"


def steps_of(kind: str, conv: nn.Conv2d, ranks: Sequence[int]) -> list[nn.Conv2d]:
    """Return the empty convolutions that stand for `conv`, with its stride, padding, dilation and bias.

    Args:
        kind: tucker, with ranks (of the channels in, of those out), or (of those out) alone where the
            channels in stay; cp, with one rank.
        conv: of one group, with zeros around its input.
        ranks: 1 or more.

    Raises:
        ValueError: the convolution or the ranks are of another kind.
    """
    if conv.groups != 1 or conv.padding_mode != "zeros" or isinstance(conv.padding, str):
        raise ValueError(
            "only convolutions of one group that are padded with zeros by numbers can be divided"
        )
    if min(ranks, default=0) < 1 or max(ranks) > max(conv.in_channels, conv.out_channels) * _taps(conv):
        raise ValueError(f"ranks {list(ranks)} are none of a {tuple(conv.weight.shape)} convolution")
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
    raise ValueError(f"no kind of convolution '{kind[:40]}' with {len(ranks)} ranks")


def resized(old: nn.Conv2d, into: int, out: int) -> nn.Conv2d:
    """Return an empty convolution like `old`, of one group, with other channels in and out."""
    where: dict[str, Any] = {"device": old.weight.device, "dtype": old.weight.dtype}
    shape: dict[str, Any] = {"stride": old.stride, "padding": old.padding, "dilation": old.dilation}
    size: Any = old.kernel_size
    bias = old.bias is not None
    return nn.Conv2d(into, out, size, bias=bias, padding_mode=old.padding_mode, **shape, **where)


def _taps(conv: nn.Conv2d) -> int:
    return conv.kernel_size[0] * conv.kernel_size[1]
