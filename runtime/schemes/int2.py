"""Scheme int2: 2-bit codes, one scale (and zero point) for each group of a row's weights.

How codes are chosen and stored: parts/affine.py; four lie in a byte. They leave as 2-bit MatMulNBits where
activations are rounded (accuracy level 4). For float32 activations (level 0) ONNX Runtime 1.31 unpacks 2-bit
codes at every call; there they become 4-bit ones when the graph is loaded, and the file keeps the small ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from smelt.runtime.schemes.int4 import Int4
from smelt.runtime.schemes.parts import groups as parts
from smelt.runtime.schemes.parts import nibbles
from smelt.runtime.schemes.parts.affine import SYMMETRIC, AffineGroups
from smelt.runtime.schemes.scheme import Coded, Option, Options

if TYPE_CHECKING:
    from torch import Tensor

_TABLE = "NibblesOfTwoBits"


class Int2(AffineGroups):
    """codes: uint8 [N, G, g / 4]; scales: float32 [N, G], each a float16; zeros: uint8 [N, ceil(G / 4)]."""

    bits: ClassVar[int] = 2
    name: ClassVar[str] = "int2"
    summary: ClassVar[str] = "2-bit weights, one scale per group of inputs"
    pays: ClassVar[str] = "small files"
    settings: ClassVar[tuple[Option, ...]] = (
        parts.two_bit_group_size(name),
        SYMMETRIC,
        parts.ACCURACY_LEVEL,
    )
    vocabulary: ClassVar[str] = Int4.name
    leaves_as: ClassVar[str] = f"{name} codes (MatMulNBits)"
    drift: ClassVar[float] = 0.04
    vector_drift: ClassVar[float] = 0.04

    def spreads(self, options: Options) -> bool:
        """Say whether activations stay float32."""
        return not parts.rounds_activations(options)

    def nibbles(self, matrix: Coded) -> Tensor:
        """Emit two bytes of 4-bit codes for each byte."""
        from smelt.runtime.layers import emit

        return emit.spread(_TABLE, matrix.tensor("codes"), 2)

    def load_tables(self) -> dict[str, Any]:
        """Return for each byte of four codes the two bytes of the same as 4-bit ones."""
        first = nibbles.MIDDLE - self.middle
        return super().load_tables() | {_TABLE: nibbles.table(range(first, first + 4))}
