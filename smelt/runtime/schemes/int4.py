"""Scheme int4: 4-bit weights, one scale (and zero point) for each group of a row's weights.

Quantization and storage: common/affine_groupwise.py; two per byte. Clipping one end of a symmetric range is
better: a scale of amax / 7, which clips nothing, has a mean squared error that is 28 % larger (groups of 64,
normal or trained weights). `symmetric: positive` has no negative scales: a largest value that is positive is
clipped by one step. Export to TensorRT, which requires that: common/tensorrt_int4.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from smelt.runtime.schemes.common import groupwise as parts
from smelt.runtime.schemes.common import tensorrt_int4
from smelt.runtime.schemes.common.affine_groupwise import POSITIVE_SCALES, SYMMETRIC, AffineGroupwise
from smelt.runtime.schemes.common.groupwise import BLOCKWISE_MIN_OPSET, BLOCKWISE_UNSUPPORTED_TARGETS
from smelt.runtime.schemes.scheme import MatrixUse, OptionValue, PackedMatrix, SchemeOption

if TYPE_CHECKING:
    from torch import Tensor


class Int4(AffineGroupwise):
    """codes: uint8 [N, G, g / 2]; scales: float32 [N, G], each a float16; zeros: uint8 [N, ceil(G / 2)]."""

    bits: ClassVar[int] = 4
    name: ClassVar[str] = "int4"
    summary: ClassVar[str] = "4-bit weights, one scale per group of inputs"
    recommended_for: ClassVar[str] = "generating models, one text at a time; OpenVINO; small files"
    option_specs: ClassVar[tuple[SchemeOption, ...]] = (
        parts.GROUP_SIZE,
        replace(SYMMETRIC, allowed=(*SYMMETRIC.allowed, POSITIVE_SCALES)),
        parts.ACCURACY_LEVEL,
    )
    unsupported_targets: ClassVar[Mapping[str, str]] = {
        **{
            target: why
            for target, why in BLOCKWISE_UNSUPPORTED_TARGETS.items()
            if target != tensorrt_int4.SIGNED_INT4_TARGET
        },
        # its networks are weakly typed, where each type needs an option
        "ort-tensorrt": "ONNX Runtime 1.31 has no option to enable 4-bit weights in TensorRT 10",
    }
    required_options: ClassVar[Mapping[str, Mapping[str, tuple[OptionValue, ...]]]] = {
        tensorrt_int4.SIGNED_INT4_TARGET: tensorrt_int4.SIGNED_INT4_OPTIONS
    }
    supported_dtypes: ClassVar[Mapping[str, tuple[str, ...]]] = {tensorrt_int4.SIGNED_INT4_TARGET: ("fp16",)}
    min_opset: ClassVar[Mapping[str, int]] = {**BLOCKWISE_MIN_OPSET, tensorrt_int4.SIGNED_INT4_TARGET: 21}
    exported_as: ClassVar[str] = f"{name} weights (MatMulNBits)"
    # 0.006 to 0.018 was measured on four families
    tolerance: ClassVar[float] = 0.04
    embedding_tolerance: ClassVar[float] = 0.04

    def target_constants(self, target: str, matrix: PackedMatrix, use: MatrixUse) -> dict[str, Tensor]:
        """Return signed codes for TensorRT."""
        return (
            tensorrt_int4.signed_int4_constants(matrix, use)
            if target == tensorrt_int4.SIGNED_INT4_TARGET
            else {}
        )

    def emit_linear(self, matrix: PackedMatrix, x: Tensor, bias: Tensor | None, target: str) -> Tensor:
        """Emit MatMulNBits; for OpenVINO and TensorRT MatMul with a DequantizeLinear."""
        if target == tensorrt_int4.SIGNED_INT4_TARGET:
            return tensorrt_int4.emit_signed_int4_linear(matrix, x, bias)
        return super().emit_linear(matrix, x, bias, target)

    def emit_lookup(self, matrix: PackedMatrix, ids: Tensor, target: str) -> Tensor:
        """Emit Gather, Cast and Mul; for TensorRT Gather in a table that is dequantized like weights."""
        return (
            tensorrt_int4.emit_signed_int4_lookup(matrix, ids)
            if target == tensorrt_int4.SIGNED_INT4_TARGET
            else self.lookup(matrix, ids)
        )
