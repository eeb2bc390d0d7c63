"""4-bit codes as TensorRT reads them: signed, a scale for each block of inputs, without zero points.

The code c from 0 to 15 stands for c - 8, which the bytes hold in two's complement: each code with its highest
bit turned. A product reads columns, so that the blocks lie along the axis that is summed over and the matrix
comes right before the MatMul; a lookup reads rows. Scales are positive: the parser of TensorRT refuses others
("Scale coefficients must all be positive"; that of TensorRT for RTX lets them be).

What TensorRT takes: NVIDIA's TensorRT documentation, "Quantization Schemes": INT4 for weights alone, blocks
of 64 or 128 along one of the last two axes, scales of 16 or 32 bits.

Shapes: N = outputs (rows of a matrix), K = inputs, g = group size, G = ceil(K / g).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from smelt.runtime.schemes.parts import groups as parts
from smelt.runtime.schemes.scheme import Coded, Use, Value

if TYPE_CHECKING:
    from torch import Tensor

TARGET = "tensorrt"
# activations are multiplied as floats: nobody rounds them
RUNS_ONLY: Mapping[str, tuple[Value, ...]] = {
    parts.GROUP_SIZE.name: (64, 128),
    "symmetric": ("positive",),
    parts.ACCURACY_LEVEL.name: (0,),
}
_COLUMNS, _COLUMN_SCALES, _ROWS = "signed_columns", "column_scales", "signed_rows"
_HIGHEST = 0x88  # the highest bits of two codes


def constants(matrix: Coded, use: Use) -> dict[str, Tensor]:
    """Return codes [G g, N], all in a row, and scales float32 [G, N] of a product; codes of a lookup.

    Codes are uint8, two in a byte, the first one in the lowest bits; those of a lookup [N, G, g / 2].
    """
    from smelt.runtime.schemes.parts.packing import pack_nibbles, unpack_nibbles

    codes = matrix.tensor("codes").detach() ^ _HIGHEST
    if use == "lookup":
        return {_ROWS: codes}
    columns = unpack_nibbles(codes).flatten(1).t()
    scales = matrix.tensor("scales").detach().t().contiguous()
    return {_COLUMNS: pack_nibbles(columns.flatten()), _COLUMN_SCALES: scales}


def emit_product(matrix: Coded, x: Tensor, bias: Tensor | None) -> Tensor:
    """Emit MatMul with a DequantizeLinear of [G g, N]."""
    from smelt.runtime.layers.emit_blocks import signed_product

    size = parts.group_size(matrix.options)
    return signed_product(x, matrix.tensor(_COLUMNS), matrix.tensor(_COLUMN_SCALES), bias, size)


def emit_lookup(matrix: Coded, ids: Tensor) -> Tensor:
    """Emit Gather in a DequantizeLinear of [N, G g]."""
    from torch.nn import functional as F

    from smelt.runtime.layers.emit_blocks import signed_rows

    size = parts.group_size(matrix.options)
    rows = F.embedding(ids, signed_rows(matrix.tensor(_ROWS), matrix.tensor("scales"), size))
    return rows[..., : matrix.width]
