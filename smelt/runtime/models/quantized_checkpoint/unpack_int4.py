"""Unpacks the 4-bit layouts of GPTQ's and AWQ's tools: eight weights in an int32.

GPTQ (AutoGPTQ and GPTQModel, QuantLinear.pack): inputs K are packed together, the first in the lowest bits;
zero points are packed along the outputs, in the first layout less one.

    qweight int32 [K / 8, N]     qzeros int32 [G, N / 8]     scales float [G, N]     g_idx int32 [K]

AWQ (AutoAWQ, WQLinear_GEMM.from_linear): outputs are packed together, in the order 0 2 4 6 1 3 5 7; zero
points too.

    qweight int32 [K, N / 8]     qzeros int32 [G, N / 8]     scales float [G, N]

In both, value = (code - zero point) * scale.

Shapes: N = outputs, K = inputs, G = groups of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_VALUES_PER_INT32 = 8
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class UnpackedInt4(NamedTuple):
    """Weights uint8 [N, K], zero points int16 [N, G] and scales [N, G] of a matrix, in the file's groups."""

    codes: Tensor
    zeros: Tensor
    scales: Tensor


def unpack_gptq(qweight: Tensor, qzeros: Tensor, scales: Tensor, offset: int) -> UnpackedInt4:
    """Return an unpacked GPTQ matrix; `offset` is added to the stored zero points."""
    codes = _split_nibbles(qweight).permute(0, 2, 1).reshape(-1, qweight.shape[1])
    zeros = _split_nibbles(qzeros).flatten(1).to(torch.int16) + offset
    return UnpackedInt4(codes.t(), zeros.t(), scales.t())


def unpack_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> UnpackedInt4:
    """Return an unpacked AWQ matrix."""
    codes, zeros = (_split_nibbles(packed, _AWQ_ORDER).flatten(1) for packed in (qweight, qzeros))
    return UnpackedInt4(codes.t(), zeros.t().to(torch.int16), scales.t())


def _split_nibbles(packed: Tensor, order: Sequence[int] = tuple(range(_VALUES_PER_INT32))) -> Tensor:
    """Return int32 [A, B] as uint8 [A, B, 8]; `order` is the index of each four bits."""
    parts = [(packed >> (4 * at)).bitwise_and_(15).to(torch.uint8) for at in range(_VALUES_PER_INT32)]
    return torch.stack([parts[order.index(place)] for place in range(_VALUES_PER_INT32)], dim=-1)
