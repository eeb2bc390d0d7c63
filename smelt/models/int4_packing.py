"""Pack and unpack matrices of 4-bit weights in the layouts of GPTQ and AWQ checkpoints.

Both store eight 4-bit weights in an int32, with value = (code - zero point) * scale.

GPTQ (AutoGPTQ and GPTQModel, QuantLinear.pack): inputs K are packed together, the first in the lowest bits;
zero points are packed along the outputs, in the first layout (`gptq`) less one, in the second (`gptq_v2`) as
they are.

    qweight int32 [K / 8, N]     qzeros int32 [G, N / 8]     scales float [G, N]     g_idx int32 [K]

AWQ (AutoAWQ, WQLinear_GEMM.from_linear): outputs are packed together, in the order 0 2 4 6 1 3 5 7; zero
points too.

    qweight int32 [K, N / 8]     qzeros int32 [G, N / 8]     scales float [G, N]

Shapes: N = outputs, K = inputs, G = groups of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

VALUES_PER_INT32 = 8
_IN_ORDER = tuple(range(VALUES_PER_INT32))
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class UnpackedInt4(NamedTuple):
    """Weights uint8 [N, K], zero points int16 [N, G] and scales [N, G] of a matrix, in the file's groups."""

    codes: Tensor
    zeros: Tensor
    scales: Tensor


def unpack_gptq(qweight: Tensor, qzeros: Tensor, scales: Tensor, offset: int) -> UnpackedInt4:
    """Return an unpacked GPTQ matrix; `offset` is added to the stored zero points."""
    q_weight = _split_nibbles(qweight).permute(0, 2, 1).reshape(-1, qweight.shape[1])
    zeros = _split_nibbles(qzeros).flatten(1).to(torch.int16) + offset
    return UnpackedInt4(q_weight.t(), zeros.t(), scales.t())


def unpack_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> UnpackedInt4:
    """Return an unpacked AWQ matrix."""
    q_weight, zeros = (_split_nibbles(packed, _AWQ_ORDER).flatten(1) for packed in (qweight, qzeros))
    return UnpackedInt4(q_weight.t(), zeros.t().to(torch.int16), scales.t())


def pack_gptq(matrix: UnpackedInt4, offset: int) -> dict[str, Tensor]:
    """Return the tensors of a GPTQ matrix, whose K and N are multiples of 8, in order of the inputs.

    Args:
        matrix: its scales become float16; zero points from `offset` to 15.
        offset: subtracted from the zero points.
    """
    width, groups = matrix.codes.shape[1], matrix.scales.shape[1]
    columns = matrix.codes.t().unflatten(0, (-1, VALUES_PER_INT32)).permute(0, 2, 1)
    return {
        "qweight": _join_nibbles(columns),
        "qzeros": _join_nibbles((matrix.zeros - offset).t().unflatten(1, (-1, VALUES_PER_INT32))),
        "scales": matrix.scales.t().half().contiguous(),
        "g_idx": torch.arange(width, dtype=torch.int32) // -(-width // groups),
    }


def pack_awq(matrix: UnpackedInt4) -> dict[str, Tensor]:
    """Return the tensors of an AWQ matrix, whose N is a multiple of 8; its scales become float16."""
    codes, zeros = (
        _join_nibbles(values.t().unflatten(1, (-1, VALUES_PER_INT32)), _AWQ_ORDER)
        for values in (matrix.codes, matrix.zeros)
    )
    return {"qweight": codes, "qzeros": zeros, "scales": matrix.scales.t().half().contiguous()}


def _split_nibbles(packed: Tensor, order: Sequence[int] = _IN_ORDER) -> Tensor:
    """Return int32 [A, B] as uint8 [A, B, 8]; `order` is the index of each four bits."""
    parts = [(packed >> (4 * position)).bitwise_and_(15).to(torch.uint8) for position in _IN_ORDER]
    return torch.stack([parts[order.index(index)] for index in _IN_ORDER], dim=-1)


def _join_nibbles(values: Tensor, order: Sequence[int] = _IN_ORDER) -> Tensor:
    """Return the int32 [A, B] that `_split_nibbles` makes integers [A, B, 8] from 0 to 15 of."""
    packed = torch.zeros(values.shape[:-1], dtype=torch.int32)
    for position, index in enumerate(order):
        packed |= values[..., index].to(torch.int32) << (4 * position)
    return packed
