"""int8 weights with one scale per row in the form of MatMulNBits: the same weights, another operator.

128 is added to the codes, because the operator needs unsigned ones, and the scale of a row is
repeated for each of its blocks: the weights stay the same numbers, bit for bit. Activations become int8 block
by block (common/groupwise.py), not by one range for the tensor of the whole batch.

Shapes: N = outputs (rows), K = inputs (columns), g = inputs of a block, G = ceil(K / g).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from smelt.runtime.schemes.common import groupwise
from smelt.runtime.schemes.scheme import MatrixUse, PackedMatrix

if TYPE_CHECKING:
    from torch import Tensor

BLOCK_VARIANT = "MatMulNBits"
_ZERO_POINT = 128
# the largest is the fastest: docs/measurements/int8-groupwise.md
_SIZES = (128, 64, 32)
# the operator's accuracy level that multiplies int8 blocks
_ACCURACY_LEVEL = 4


def block_size(width: int) -> int:
    """Return g for K = `width` inputs: the largest block that divides them, else the smallest one."""
    return next((size for size in _SIZES if size <= width), _SIZES[-1])


def block_constants(matrix: PackedMatrix, use: MatrixUse) -> dict[str, Tensor]:
    """Return `blocks`, uint8 [N, G, g], and `block_scales`, float32 [N, G]; for lookups scales as [N, 1]."""
    codes, size = matrix.tensor("codes").detach(), block_size(matrix.width)
    blocks = groupwise.split_into_groups(codes.short(), size).add(_ZERO_POINT).byte()
    scales = matrix.tensor("scales").detach()[:, None]
    if use == "lookup":
        return {"blocks": blocks, "lookup": scales.clone()}
    return {"blocks": blocks, "block_scales": scales.repeat(1, blocks.shape[1])}


def block_linear(matrix: PackedMatrix, x: Tensor, bias: Tensor | None) -> Tensor:
    """Return the operator's result, float32 [..., N]."""
    from torch.nn import functional as F

    return F.linear(groupwise.fake_quantize_blocks(x, block_size(matrix.width)), matrix.dequantized(), bias)


def emit_block_linear(matrix: PackedMatrix, x: Tensor, bias: Tensor | None) -> Tensor:
    """Emit MatMulNBits with 8 bits."""
    from smelt.runtime.layers import emit

    blocks = matrix.tensor("blocks")
    layout = emit.NBitsLayout(matrix.width, blocks.shape[0], 8, blocks.shape[2])
    return emit.matmul_nbits(x, blocks, matrix.tensor("block_scales"), None, bias, layout, _ACCURACY_LEVEL)


def emit_block_lookup(matrix: PackedMatrix, ids: Tensor) -> Tensor:
    """Emit a lookup in the blocks: output layer and embedding share a constant; zero rows stay zero."""
    flat = ids.flatten()
    rows = matrix.tensor("blocks").index_select(0, flat).float() - float(_ZERO_POINT)
    scaled = rows.flatten(1)[:, : matrix.width] * matrix.tensor("lookup").index_select(0, flat)
    return scaled.reshape(*ids.shape, matrix.width)
