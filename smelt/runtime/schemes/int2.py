"""Scheme int2: 2-bit weights, one scale (and zero point) for each group of a row's weights.

Quantization and storage: common/affine_groupwise.py; four per byte. They are exported to 2-bit MatMulNBits
where activations are rounded (accuracy level 4). For float32 activations (level 0) ONNX Runtime 1.31 unpacks
2-bit codes at every call; there they become 4-bit ones when the graph is loaded, and the file stores the
small ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from smelt.runtime.schemes.common import groupwise as parts
from smelt.runtime.schemes.common import int4_expansion
from smelt.runtime.schemes.common.affine_groupwise import SYMMETRIC, AffineGroupwise
from smelt.runtime.schemes.int4 import Int4
from smelt.runtime.schemes.scheme import PackedMatrix, SchemeOption, SchemeOptions

if TYPE_CHECKING:
    from torch import Tensor

_TABLE = "NibblesOfTwoBits"


class Int2(AffineGroupwise):
    """codes: uint8 [N, G, g / 4]; scales: float32 [N, G], each a float16; zeros: uint8 [N, ceil(G / 4)]."""

    bits: ClassVar[int] = 2
    name: ClassVar[str] = "int2"
    summary: ClassVar[str] = "2-bit weights, one scale per group of inputs"
    recommended_for: ClassVar[str] = "small files"
    option_specs: ClassVar[tuple[SchemeOption, ...]] = (
        parts.two_bit_group_size(name),
        SYMMETRIC,
        parts.ACCURACY_LEVEL,
    )
    embedding_scheme: ClassVar[str] = Int4.name
    exported_as: ClassVar[str] = f"{name} weights (MatMulNBits)"
    tolerance: ClassVar[float] = 0.04
    embedding_tolerance: ClassVar[float] = 0.04

    def expands_to_int4(self, options: SchemeOptions) -> bool:
        """Return whether activations stay float32."""
        return not parts.quantizes_activation_blocks(options)

    def emit_int4(self, matrix: PackedMatrix) -> Tensor:
        """Emit two bytes of 4-bit codes for each byte."""
        from smelt.runtime.layers import emit

        return emit.expand_by_table(_TABLE, matrix.tensor("codes"), 2)

    def unpacking_tables(self) -> dict[str, Any]:
        """Return for each byte of four codes the two bytes of the same as 4-bit ones."""
        first = int4_expansion.INT4_ZERO_POINT - self.zero_point
        return super().unpacking_tables() | {
            _TABLE: int4_expansion.int4_expansion_table(range(first, first + 4))
        }
