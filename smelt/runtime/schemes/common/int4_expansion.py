"""Expands codes of fewer bits to 4-bit ones when a graph is loaded, for kernels that support no others.

ONNX Runtime 1.31 has no 3-bit MatMulNBits, and no fast 2-bit one for float32 activations. The
file stores the small codes; a table (`Scheme.unpacking_tables`) expands each byte of them, once. Codes are
shifted so that a zero point in the middle of the small ones becomes 8, the operator's default.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

INT4_ZERO_POINT = 8


def int4_expansion_table(values: Sequence[int]) -> Any:
    """Return for each byte of codes the bytes of as many 4-bit ones, uint8 [256, n].

    Args:
        values: the new value of each code: 2 of them where a byte has eight bits, 4 where it has four codes.
    """
    import numpy as np

    bits = len(values).bit_length() - 1
    codes = np.arange(256)[:, None] >> np.arange(0, 8, bits) & (len(values) - 1)
    wide = np.array(values, dtype=np.uint8)[codes]
    return wide[:, ::2] | wide[:, 1::2] << 4


def shift_zero_points(zeros: Tensor, by: int) -> Tensor:
    """Return zero points uint8 [N, G] of small codes as those of 4-bit ones, two in a byte."""
    from smelt.runtime.schemes.common.packing import pack_nibbles

    return pack_nibbles(zeros + by)
