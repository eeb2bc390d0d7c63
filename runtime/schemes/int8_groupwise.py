"""Scheme int8-groupwise: 8-bit codes, one scale (and zero point) for each group of a row's weights.

How codes are chosen and stored: parts/affine.py; one lies in a byte. Activations are rounded block by block,
as in every product of MatMulNBits (parts/groups.py), so that a row does not depend on what else is in its
batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from smelt.runtime.schemes.parts.affine import AffineGroups
from smelt.runtime.schemes.parts.groups import OLDEST_WHERE_BLOCKED, REFUSED_WHERE_BLOCKED


class Int8Groupwise(AffineGroups):
    """codes: uint8 [N, G, g]; scales: float32 [N, G], each a float16; zeros: uint8 [N, G]."""

    bits: ClassVar[int] = 8
    name: ClassVar[str] = "int8-groupwise"
    summary: ClassVar[str] = "8-bit weights, one scale per group of inputs"
    pays: ClassVar[str] = "models that write, one text at a time; OpenVINO"
    refused: ClassVar[Mapping[str, str]] = REFUSED_WHERE_BLOCKED
    oldest_opset: ClassVar[Mapping[str, int]] = OLDEST_WHERE_BLOCKED
    leaves_as: ClassVar[str] = f"{name} codes (MatMulNBits)"
    # 0.0061 was measured on a 4 + 3 layer Marian, at most 0.0019 on tiny models of seven other families
    # on processors without VNNI OpenVINO leaves activations whole, where the model rounds them: 0.03 was seen
    drift: ClassVar[float] = 0.06
    vector_drift: ClassVar[float] = 0.04
