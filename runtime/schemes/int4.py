"""Scheme int4: 4-bit codes, one scale (and zero point) for each group of a row's weights.

How codes are chosen and stored: parts/affine.py; two lie in a byte. Cutting one end of a symmetric range is
worth it: a scale of amax / 7, which cuts nothing, has a mean squared error that is 28 % larger (groups of 64,
normal or trained weights). `symmetric: positive` has no negative scales: a largest value that is positive is
cut by a step. How codes leave for TensorRT, which wants that: parts/signed.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from smelt.runtime.schemes.parts import groups as parts
from smelt.runtime.schemes.parts import signed
from smelt.runtime.schemes.parts.affine import POSITIVE, SYMMETRIC, AffineGroups
from smelt.runtime.schemes.parts.groups import OLDEST_WHERE_BLOCKED, REFUSED_WHERE_BLOCKED
from smelt.runtime.schemes.scheme import Coded, Option, Use, Value

if TYPE_CHECKING:
    from torch import Tensor


class Int4(AffineGroups):
    """codes: uint8 [N, G, g / 2]; scales: float32 [N, G], each a float16; zeros: uint8 [N, ceil(G / 2)]."""

    bits: ClassVar[int] = 4
    name: ClassVar[str] = "int4"
    summary: ClassVar[str] = "4-bit weights, one scale per group of inputs"
    pays: ClassVar[str] = "models that write, one text at a time; OpenVINO; small files"
    settings: ClassVar[tuple[Option, ...]] = (
        parts.GROUP_SIZE,
        replace(SYMMETRIC, allowed=(*SYMMETRIC.allowed, POSITIVE)),
        parts.ACCURACY_LEVEL,
    )
    refused: ClassVar[Mapping[str, str]] = {
        **{target: why for target, why in REFUSED_WHERE_BLOCKED.items() if target != signed.TARGET},
        # the networks that it builds are weakly typed, in which each type wants an option
        "ort-tensorrt": "ONNX Runtime 1.31 has no option that lets TensorRT 10 take 4-bit weights",
    }
    runs_only: ClassVar[Mapping[str, Mapping[str, tuple[Value, ...]]]] = {signed.TARGET: signed.RUNS_ONLY}
    dtypes: ClassVar[Mapping[str, tuple[str, ...]]] = {signed.TARGET: ("fp16",)}
    oldest_opset: ClassVar[Mapping[str, int]] = {**OLDEST_WHERE_BLOCKED, signed.TARGET: 21}
    leaves_as: ClassVar[str] = f"{name} codes (MatMulNBits)"
    # 0.006 to 0.018 was measured on four families
    drift: ClassVar[float] = 0.04
    vector_drift: ClassVar[float] = 0.04

    def tensors_for(self, target: str, matrix: Coded, use: Use) -> dict[str, Tensor]:
        """Return signed codes for TensorRT."""
        return signed.constants(matrix, use) if target == signed.TARGET else {}

    def emit_product(self, matrix: Coded, x: Tensor, bias: Tensor | None, target: str) -> Tensor:
        """Emit MatMulNBits; for OpenVINO and TensorRT MatMul with a DequantizeLinear."""
        if target == signed.TARGET:
            return signed.emit_product(matrix, x, bias)
        return super().emit_product(matrix, x, bias, target)

    def emit_lookup(self, matrix: Coded, ids: Tensor, target: str) -> Tensor:
        """Emit Gather, Cast and Mul; for TensorRT Gather in a table that is dequantized as weights are."""
        return signed.emit_lookup(matrix, ids) if target == signed.TARGET else self.lookup(matrix, ids)
