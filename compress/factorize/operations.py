"""Operations of a model of images: multiply-accumulates of its convolutions and linear layers for one image.

Shapes: h, w = height and width of an image.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn


@torch.inference_mode()
def operations_of(model: Any, size: tuple[int, int]) -> int:
    """Return the multiply-accumulates of one image of `size` (h, w).

    Products of attention scores, norms and activations are not counted.

    Args:
        model: in eval mode, on the CPU.
        size: what its processor gives.
    """
    total = 0

    def count(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal total
        weights = module.weight[0].numel()  # of one output
        total += weights * output.numel()

    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    handles = [layer.register_forward_hook(count) for layer in layers]
    try:
        model(pixel_values=torch.zeros(1, 3, *size))
    finally:
        for handle in handles:
            handle.remove()
    return total


def of_tucker(conv: nn.Conv2d, inner: int | None, outer: int) -> int:
    """Return the multiply-accumulates of Tucker-2 for each place of the output.

    The change of the channels in is computed at each place of the input, of which there are as many as the
    stride says.
    """
    taps = math.prod(conv.kernel_size)
    first = 0 if inner is None else math.prod(conv.stride) * conv.in_channels * inner
    return first + taps * (inner or conv.in_channels) * outer + outer * conv.out_channels


def of_cp(conv: nn.Conv2d, rank: int) -> int:
    """Return the multiply-accumulates of CP for each place of the output."""
    high, wide = conv.kernel_size
    down, across = conv.stride
    return rank * (down * across * conv.in_channels + across * high + wide + conv.out_channels)


def of_whole(conv: nn.Conv2d) -> int:
    """Return the multiply-accumulates of a convolution for each place of its output."""
    return math.prod(conv.kernel_size) * conv.in_channels * conv.out_channels


def weights_of(conv: nn.Conv2d, kind: str, ranks: tuple[int, ...]) -> int:
    """Return how many weights the convolutions have that stand for `conv`, without its bias."""
    taps, (into, out) = math.prod(conv.kernel_size), (conv.in_channels, conv.out_channels)
    if kind == "cp":
        return ranks[0] * (into + sum(conv.kernel_size) + out)
    inner = ranks[0] if len(ranks) == 2 else None
    first = 0 if inner is None else into * inner
    return first + taps * (inner or into) * ranks[-1] + ranks[-1] * out
