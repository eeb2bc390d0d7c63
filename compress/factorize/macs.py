"""Count the multiply-accumulates of an image model: of its convolutions and linear layers, for one image.

Shapes: h, w = height and width of an image.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn


@torch.inference_mode()
def count_macs(model: Any, size: tuple[int, int]) -> int:
    """Return the multiply-accumulates of one image of `size` (h, w).

    Attention scores, norms and activations are not counted.

    Args:
        model: in eval mode, on the CPU.
        size: output size of its image processor.
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


def tucker2_macs(conv: nn.Conv2d, inner: int | None, outer: int) -> int:
    """Return the multiply-accumulates of Tucker-2 for each output position.

    The first 1 x 1 convolution is computed at each input position; their number follows from the stride.
    """
    taps = math.prod(conv.kernel_size)
    first = 0 if inner is None else math.prod(conv.stride) * conv.in_channels * inner
    return first + taps * (inner or conv.in_channels) * outer + outer * conv.out_channels


def cp_macs(conv: nn.Conv2d, rank: int) -> int:
    """Return the multiply-accumulates of CP for each output position."""
    high, wide = conv.kernel_size
    down, across = conv.stride
    return rank * (down * across * conv.in_channels + across * high + wide + conv.out_channels)


def convolution_macs(conv: nn.Conv2d) -> int:
    """Return the multiply-accumulates of a convolution for each output position."""
    return math.prod(conv.kernel_size) * conv.in_channels * conv.out_channels


def count_factorized_weights(conv: nn.Conv2d, method: str, ranks: tuple[int, ...]) -> int:
    """Return the number of weights of the factors of `conv`, without its bias."""
    taps, (into, out) = math.prod(conv.kernel_size), (conv.in_channels, conv.out_channels)
    if method == "cp":
        return ranks[0] * (into + sum(conv.kernel_size) + out)
    inner = ranks[0] if len(ranks) == 2 else None
    first = 0 if inner is None else into * inner
    return first + taps * (inner or into) * ranks[-1] + ranks[-1] * out
