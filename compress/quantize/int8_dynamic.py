"""Which int8 codes and scales stand for a matrix: scheme int8-dynamic.

One scale for each row (output channel), symmetric: scale = amax / 127. Activations become uint8 while
the model runs, one scale and zero point for the tensor of the whole batch, as the ONNX operator
DynamicQuantizeLinear-11 defines it (runtime/layers/quantized.py).

Shapes: N = outputs (rows), K = inputs (columns).
"""

from __future__ import annotations

import torch
from torch import Tensor

from smelt.compress.quantize.straight_through import straight_through
from smelt.runtime.layers.quantized import Int8Matrix


def decide(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes (int8 [N, K]) and scales (float32 [N]) for `weight`; rows of zeros get scale 1."""
    weight = weight.detach().float()
    amax = weight.abs().amax(dim=1)
    scales = torch.where(amax > 0, amax / 127, torch.ones_like(amax))
    codes = torch.round(weight / scales[:, None]).clamp_(-127, 127)
    return codes.to(torch.int8), scales


def fill_(matrix: Int8Matrix, weight: Tensor) -> None:
    """Put the codes and scales of `weight` into `matrix`."""
    matrix.set_(*decide(weight))


def fake(weight: Tensor) -> Tensor:
    """Return what codes of `weight` would stand for, [N, K]; gradients pass straight through."""
    with torch.no_grad():
        codes, scales = decide(weight)
        values = codes.float() * scales[:, None]
    return straight_through(weight, values)


def fake_activations(x: Tensor) -> Tensor:
    """Return what is left of float `x` after DynamicQuantizeLinear; gradients pass straight through.

    The range holds every value, so none is cut off.
    """
    with torch.no_grad():
        wide = x.float()
        low, high = wide.amin().clamp(max=0), wide.amax().clamp(min=0)
        scale = torch.where(high > low, (high - low) / 255, 1.0)
        zero = torch.round(-low / scale).clamp_(0, 255)
        codes = torch.round(wide / scale).add_(zero).clamp_(0, 255)
        values = ((codes - zero) * scale).to(x.dtype)
    return straight_through(x, values)
