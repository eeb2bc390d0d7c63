"""4-bit weights in TensorRT's format: signed, a scale for each block of inputs, without zero points.

The code c from 0 to 15 represents c - 8, which the bytes store in two's complement: each code with its
highest bit flipped. A multiplication reads columns, so that the blocks are along the summed axis and the
matrix is directly before the MatMul; a lookup reads rows. Scales are positive: the parser of TensorRT rejects
others ("Scale coefficients must all be positive"; that of TensorRT for RTX accepts them).

TensorRT's support: NVIDIA's TensorRT documentation, "Quantization Schemes": INT4 for weights only, blocks
of 64 or 128 along one of the last two axes, scales of 16 or 32 bits.

Shapes: N = outputs (rows of a matrix), K = inputs, g = group size, G = ceil(K / g).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from smelt.runtime.schemes.common import groupwise as parts
from smelt.runtime.schemes.scheme import MatrixUse, OptionValue, PackedMatrix

if TYPE_CHECKING:
    from torch import Tensor

SIGNED_INT4_TARGET = "tensorrt"
# activations are multiplied as floats, without rounding
SIGNED_INT4_OPTIONS: Mapping[str, tuple[OptionValue, ...]] = {
    parts.GROUP_SIZE.name: (64, 128),
    "symmetric": ("positive",),
    parts.ACCURACY_LEVEL.name: (0,),
}
_COLUMNS, _COLUMN_SCALES, _ROWS = "signed_columns", "column_scales", "signed_rows"
_SIGN_BITS = 0x88  # the highest bits of two codes


def signed_int4_constants(matrix: PackedMatrix, use: MatrixUse) -> dict[str, Tensor]:
    """Return codes [G g, N], flattened, and scales float32 [G, N] of a linear layer; or codes of a lookup.

    Codes are uint8, two per byte, the first one in the lowest bits; those of a lookup [N, G, g / 2].
    """
    from smelt.runtime.schemes.common.packing import pack_nibbles, unpack_nibbles

    codes = matrix.tensor("codes").detach() ^ _SIGN_BITS
    if use == "lookup":
        return {_ROWS: codes}
    columns = unpack_nibbles(codes).flatten(1).t()
    scales = matrix.tensor("scales").detach().t().contiguous()
    return {_COLUMNS: pack_nibbles(columns.flatten()), _COLUMN_SCALES: scales}


def emit_signed_int4_linear(matrix: PackedMatrix, x: Tensor, bias: Tensor | None) -> Tensor:
    """Emit MatMul with a DequantizeLinear of [G g, N]."""
    from smelt.runtime.layers.emit_blockwise import signed_block_linear

    size = parts.group_size(matrix.options)
    return signed_block_linear(x, matrix.tensor(_COLUMNS), matrix.tensor(_COLUMN_SCALES), bias, size)


def emit_signed_int4_lookup(matrix: PackedMatrix, ids: Tensor) -> Tensor:
    """Emit Gather in a DequantizeLinear of [N, G g]."""
    from torch.nn import functional as F

    from smelt.runtime.layers.emit_blockwise import signed_block_weight

    size = parts.group_size(matrix.options)
    rows = F.embedding(ids, signed_block_weight(matrix.tensor(_ROWS), matrix.tensor("scales"), size))
    return rows[..., : matrix.width]
