"""Codes of fewer bits that become 4-bit ones when a graph is loaded, for kernels that take no others.

ONNX Runtime 1.31 has no 3-bit MatMulNBits, and none of 2 bits that multiplies float32 activations fast. The
file holds the small codes; a table (`Scheme.load_tables`) spreads each byte of them, once. Codes are shifted
so that a zero point in the middle of the small ones comes to lie at 8, where the operator has it by default.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

MIDDLE = 8


def table(values: Sequence[int]) -> Any:
    """Return for each byte of codes the bytes of as many 4-bit ones, uint8 [256, n].

    Args:
        values: what each code becomes: 2 of them where a byte holds eight bits, 4 where it holds four codes.
    """
    import numpy as np

    bits = len(values).bit_length() - 1
    codes = np.arange(256)[:, None] >> np.arange(0, 8, bits) & (len(values) - 1)
    wide = np.array(values, dtype=np.uint8)[codes]
    return wide[:, ::2] | wide[:, 1::2] << 4


def shifted_zeros(zeros: Tensor, by: int) -> Tensor:
    """Return zero points uint8 [N, G] of small codes as those of 4-bit ones, two in a byte."""
    from smelt.runtime.schemes.parts.packing import pack_nibbles

    return pack_nibbles(zeros + by)
