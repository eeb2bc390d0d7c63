"""The 4-bit layouts of GPTQ's and AWQ's tools: eight codes in an int32, taken apart.

GPTQ (AutoGPTQ and GPTQModel, QuantLinear.pack): inputs K lie together, the first in the lowest bits; zero
points are packed along the outputs, in the first layout less one.

    qweight int32 [K / 8, N]     qzeros int32 [G, N / 8]     scales float [G, N]     g_idx int32 [K]

AWQ (AutoAWQ, WQLinear_GEMM.from_linear): outputs lie together, in the order 0 2 4 6 1 3 5 7; zero points
too.

    qweight int32 [K, N / 8]     qzeros int32 [G, N / 8]     scales float [G, N]

In both, value = (code - zero point) * scale.

Shapes: N = outputs, K = inputs, G = groups of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_IN_ONE = 8
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Taken(NamedTuple):
    """Codes uint8 [N, K], zero points int16 [N, G] and scales [N, G] of a matrix, in the file's groups."""

    codes: Tensor
    zeros: Tensor
    scales: Tensor


def unpack_gptq(qweight: Tensor, qzeros: Tensor, scales: Tensor, offset: int) -> Taken:
    """Take a GPTQ matrix apart; `offset` is added to the stored zero points."""
    codes = _parts(qweight).permute(0, 2, 1).reshape(-1, qweight.shape[1])
    zeros = _parts(qzeros).flatten(1).to(torch.int16) + offset
    return Taken(codes.t(), zeros.t(), scales.t())


def unpack_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Taken:
    """Take an AWQ matrix apart."""
    codes, zeros = (_parts(packed, _ORDER).flatten(1) for packed in (qweight, qzeros))
    return Taken(codes.t(), zeros.t().to(torch.int16), scales.t())


def _parts(packed: Tensor, order: Sequence[int] = tuple(range(_IN_ONE))) -> Tensor:
    """Return what lies in int32 [A, B], uint8 [A, B, 8]; `order` says whose place each four bits are."""
    parts = [(packed >> (4 * at)).bitwise_and_(15).to(torch.uint8) for at in range(_IN_ONE)]
    return torch.stack([parts[order.index(place)] for place in range(_IN_ONE)], dim=-1)
