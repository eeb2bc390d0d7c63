"""Scheme int3: 3-bit codes, one scale (and zero point) for each group of a row's weights.

How codes are chosen: parts/affine.py. A file holds three bits a weight: four codes' two low bits in a byte,
and the high bits of eight in another one. ONNX Runtime's MatMulNBits takes 2, 4 and 8 bits (1.31: "additional
bits support is planned"), so that the codes become 4-bit ones when the graph is loaded: a small file, and in
memory and time int4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from smelt.runtime.schemes.int4 import Int4
from smelt.runtime.schemes.parts import nibbles
from smelt.runtime.schemes.parts.affine import AffineGroups
from smelt.runtime.schemes.scheme import Coded, Options

if TYPE_CHECKING:
    from torch import Tensor

_LOW, _HIGH = "NibblesOfLowBits", "NibblesOfHighBits"


class Int3(AffineGroups):
    """codes: uint8 [N, G, g / 4]; highs: uint8 [N, G, g / 8]; scales: float32 [N, G], each a float16.

    zeros: uint8 [N, ceil(G / 2)], a zero point in four bits.
    """

    bits: ClassVar[int] = 3
    name: ClassVar[str] = "int3"
    summary: ClassVar[str] = "3-bit weights, one scale per group of inputs"
    pays: ClassVar[str] = "small files; as fast as 4 bits"
    # three bits in embeddings and head cost a translator and a language model more than in all the rest
    vocabulary: ClassVar[str] = Int4.name
    leaves_as: ClassVar[str] = f"{name} codes (MatMulNBits)"
    drift: ClassVar[float] = 0.04
    vector_drift: ClassVar[float] = 0.04

    def spreads(self, options: Options) -> bool:
        """Return true: there is no 3-bit product."""
        return True

    def nibbles(self, matrix: Coded) -> Tensor:
        """Emit 4-bit codes: the low bits of each, and its high one."""
        from smelt.runtime.layers import emit

        low = emit.spread(_LOW, matrix.tensor("codes"), 2)
        return emit.both(low, emit.spread(_HIGH, matrix.tensor("highs"), 4))

    def load_tables(self) -> dict[str, Any]:
        """Return the nibbles of four low parts, and of eight high ones with what shifts the middle."""
        return super().load_tables() | {
            _LOW: nibbles.table(range(4)),
            _HIGH: nibbles.table([nibbles.MIDDLE - self.middle, nibbles.MIDDLE]),
        }
