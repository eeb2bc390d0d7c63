"""Scheme int3: 3-bit weights, one scale (and zero point) for each group of a row's weights.

Quantization: common/affine_groupwise.py. A file stores three bits per weight: four codes' two low bits in a
byte, and the high bits of eight in another one. ONNX Runtime's MatMulNBits supports 2, 4 and 8 bits (1.31:
"additional bits support is planned"), so that the codes become 4-bit ones when the graph is loaded: a small
file, with the memory and speed of int4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from smelt.runtime.schemes.common import int4_expansion
from smelt.runtime.schemes.common.affine_groupwise import AffineGroupwise
from smelt.runtime.schemes.int4 import Int4
from smelt.runtime.schemes.scheme import PackedMatrix, SchemeOptions

if TYPE_CHECKING:
    from torch import Tensor

_LOW, _HIGH = "NibblesOfLowBits", "NibblesOfHighBits"


class Int3(AffineGroupwise):
    """codes: uint8 [N, G, g / 4]; highs: uint8 [N, G, g / 8]; scales: float32 [N, G], each a float16.

    zeros: uint8 [N, ceil(G / 2)], a zero point in four bits.
    """

    bits: ClassVar[int] = 3
    name: ClassVar[str] = "int3"
    summary: ClassVar[str] = "3-bit weights, one scale per group of inputs"
    recommended_for: ClassVar[str] = "small files; as fast as 4 bits"
    # three bits in embeddings and output layer cost a translator and a language model more than in all the
    # rest
    embedding_scheme: ClassVar[str] = Int4.name
    exported_as: ClassVar[str] = f"{name} weights (MatMulNBits)"
    tolerance: ClassVar[float] = 0.04
    embedding_tolerance: ClassVar[float] = 0.04

    def expands_to_int4(self, options: SchemeOptions) -> bool:
        """Return True: there is no 3-bit operator."""
        return True

    def emit_int4(self, matrix: PackedMatrix) -> Tensor:
        """Emit 4-bit codes from the low bits and the high bit of each."""
        from smelt.runtime.layers import emit

        low = emit.expand_by_table(_LOW, matrix.tensor("codes"), 2)
        return emit.bitwise_or(low, emit.expand_by_table(_HIGH, matrix.tensor("highs"), 4))

    def unpacking_tables(self) -> dict[str, Any]:
        """Return the nibbles of four low parts, and of eight high ones with the shift of the middle."""
        return super().unpacking_tables() | {
            _LOW: int4_expansion.int4_expansion_table(range(4)),
            _HIGH: int4_expansion.int4_expansion_table(
                [int4_expansion.INT4_ZERO_POINT - self.zero_point, int4_expansion.INT4_ZERO_POINT]
            ),
        }
