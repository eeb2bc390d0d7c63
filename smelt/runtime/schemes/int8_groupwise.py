"""Scheme int8-groupwise: 8-bit weights, one scale (and zero point) for each group of a row's weights.

Quantization and storage: common/affine_groupwise.py; one per byte. Activations are rounded block by block,
as in every MatMulNBits (common/groupwise.py), so that a row does not depend on the other rows of its
batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from smelt.runtime.schemes.common.affine_groupwise import AffineGroupwise
from smelt.runtime.schemes.common.groupwise import BLOCKWISE_MIN_OPSET, BLOCKWISE_UNSUPPORTED_TARGETS


class Int8Groupwise(AffineGroupwise):
    """codes: uint8 [N, G, g]; scales: float32 [N, G], each a float16; zeros: uint8 [N, G]."""

    bits: ClassVar[int] = 8
    name: ClassVar[str] = "int8-groupwise"
    summary: ClassVar[str] = "8-bit weights, one scale per group of inputs"
    recommended_for: ClassVar[str] = "generating models, one text at a time; OpenVINO"
    unsupported_targets: ClassVar[Mapping[str, str]] = BLOCKWISE_UNSUPPORTED_TARGETS
    min_opset: ClassVar[Mapping[str, int]] = BLOCKWISE_MIN_OPSET
    exported_as: ClassVar[str] = f"{name} weights (MatMulNBits)"
    # 0.0061 was measured on a 4 + 3 layer Marian, at most 0.0019 on tiny models of seven other families
    # on processors without VNNI OpenVINO does not round activations, but the model does: 0.03 was measured
    tolerance: ClassVar[float] = 0.06
    embedding_tolerance: ClassVar[float] = 0.04
