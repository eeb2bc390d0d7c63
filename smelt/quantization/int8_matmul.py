"""int8 matrix multiplication, with activations quantized to uint8 at run time.

As the ONNX operator DynamicQuantizeLinear (opset 11) defines them, for the tensor of a whole batch:

    scale = (max(0, max x) - min(0, min x)) / 255
    zero  = clamp(round(0 - min(0, min x) / scale), 0, 255)
    x_q   = clamp(round(x / scale) + zero, 0, 255)                       round half to even

Shapes: K = inputs, N = outputs.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

# products of two int8 numbers that float32 adds up without rounding: 1024 * 128 * 128 is 2^24
_EXACT_TERMS = 1024


def int8_matmul(x: Tensor, codes: Tensor) -> Tensor:
    """Return x W^T exactly, int32 [rows, N], for int8 x [rows, K] and codes W [N, K]."""
    if is_int8_matmul_exact():
        return torch._int_mm(x, codes.t())
    sums = torch.zeros(x.shape[0], codes.shape[0], dtype=torch.int32)
    for at in range(0, x.shape[1], _EXACT_TERMS):
        part = slice(at, at + _EXACT_TERMS)
        sums += F.linear(x[:, part].float(), codes[:, part].float()).to(torch.int32)
    return sums


@cache
def is_int8_matmul_exact() -> bool:
    """Return whether torch sums int8 products in 32 bits on this machine.

    On x86 processors without VNNI instructions its library adds pairs of them in 16 bits first, where large
    ones overflow: for random codes 99 % of the sums were wrong.
    """
    exact = True
    for rows in (1, 32):  # single rows use other kernels
        ones = torch.full((rows, 64), 127, dtype=torch.int8)
        found = torch._int_mm(ones, torch.full((64, 32), 127, dtype=torch.int8))
        exact = exact and bool((found == 64 * 127 * 127).all())
    return exact


def dynamic_scale_zero_point(x: Tensor) -> tuple[float, int]:
    """Return the scale (a float32 number) and the zero point of DynamicQuantizeLinear for `x`."""
    low, high = (np.float32(t.item()) for t in torch.aminmax(x))
    low, high = min(low, np.float32(0)), max(high, np.float32(0))
    scale = (high - low) / np.float32(255) or np.float32(1)
    return float(scale), int(np.clip(np.rint(-low / scale), 0, 255))


def fake_quantize_dynamic(x: Tensor) -> Tensor:
    """Return float `x` after DynamicQuantizeLinear and dequantizing, on any device, in the type of `x`."""
    wide = x.float()
    low, high = wide.amin().clamp(max=0), wide.amax().clamp(min=0)
    scale = torch.where(high > low, (high - low) / 255, 1.0)
    zero = torch.round(-low / scale).clamp_(0, 255)
    codes = torch.round(wide / scale).add_(zero).clamp_(0, 255)
    return ((codes - zero) * scale).to(x.dtype)
