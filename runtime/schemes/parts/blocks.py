"""int8 codes with one scale a row in the form of MatMulNBits: the same weights, another product.

The codes get 128 added, so that they are unsigned as the operator wants them, and the scale of a row is
repeated for each of its blocks: the weights stay the same numbers, bit for bit. Activations become int8 block
by block (parts/groups.py), not by one range for the tensor of the whole batch.

Shapes: N = outputs (rows), K = inputs (columns), g = inputs of a block, G = ceil(K / g).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from smelt.runtime.schemes.parts import groups
from smelt.runtime.schemes.scheme import Coded, Use

if TYPE_CHECKING:
    from torch import Tensor

FORM = "MatMulNBits"
_ZERO = 128
# the largest is the fastest: docs/measurements/int8-groupwise.md
_SIZES = (128, 64, 32)
# of the operator's accuracy levels that which multiplies int8 blocks
_LEVEL = 4


def block_size(width: int) -> int:
    """Return g for K = `width` inputs: the largest block that they fill, else the smallest one."""
    return next((size for size in _SIZES if size <= width), _SIZES[-1])


def graph_tensors(matrix: Coded, use: Use) -> dict[str, Tensor]:
    """Return `blocks`, uint8 [N, G, g], and `block_scales`, float32 [N, G]; for lookups scales as [N, 1]."""
    codes, size = matrix.tensor("codes").detach(), block_size(matrix.width)
    blocks = groups.groups_of(codes.short(), size).add(_ZERO).byte()
    scales = matrix.tensor("scales").detach()[:, None]
    if use == "lookup":
        return {"blocks": blocks, "lookup": scales.clone()}
    return {"blocks": blocks, "block_scales": scales.repeat(1, blocks.shape[1])}


def product(matrix: Coded, x: Tensor, bias: Tensor | None) -> Tensor:
    """Return what the operator computes, float32 [..., N]."""
    from torch.nn import functional as F

    return F.linear(groups.blocks_as_int8(x, block_size(matrix.width)), matrix.values(), bias)


def emit_product(matrix: Coded, x: Tensor, bias: Tensor | None) -> Tensor:
    """Emit MatMulNBits with 8 bits."""
    from smelt.runtime.layers import emit

    blocks = matrix.tensor("blocks")
    layout = emit.Layout(matrix.width, blocks.shape[0], 8, blocks.shape[2])
    return emit.matmul_nbits(x, blocks, matrix.tensor("block_scales"), None, bias, layout, _LEVEL)


def emit_lookup(matrix: Coded, ids: Tensor) -> Tensor:
    """Emit a lookup in the blocks, so that head and embedding are one constant; a row of zeros stays one."""
    flat = ids.flatten()
    rows = matrix.tensor("blocks").index_select(0, flat).float() - float(_ZERO)
    scaled = rows.flatten(1)[:, : matrix.width] * matrix.tensor("lookup").index_select(0, flat)
    return scaled.reshape(*ids.shape, matrix.width)
