"""Scheme mxfp4: OCP MXFP4, 4-bit floats (E2M1) with one power of two (E8M0) per 32 inputs of a row.

    value = e2m1 * scale        e2m1: 0, 0.5, 1, 1.5, 2, 3, 4 or 6, with a sign
    scale = 2^(floor(log2(max |x|)) - 2)        2: as 4 is the largest power of two of e2m1

Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3.3 and 6.3. Values are rounded to the
nearest, ties to the even code, those beyond 6 become 6 (a group whose largest magnitude is 7 scales has an
error there). A group of zeros has scale 1. Negative zero (code 8) is read, and never chosen. Only weights are
quantized.

A file stores the codes, the first of two in the low bits, and a byte for each scale. When a graph is loaded
codes become 128 + 2 * e2m1, 8-bit codes of MatMulNBits in units of scale / 2, which are the same values: a
small file, with the memory and speed of int8-groupwise. A graph stores scales as float16 if these are exact,
which they are from 2^-24 to 2^15, else as float32.

Shapes: N = outputs (rows), K = inputs (columns), g = 32, G = ceil(K / g).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.quantization import groupwise as parts
from smelt.quantization.scheme import (
    MatrixUse,
    PackedMatrix,
    QuantParams,
    Scheme,
    SchemeOption,
    SchemeOptions,
    StoredTensor,
    UnpackedWeights,
)
from smelt.quantization.schemes.affine import Int8Groupwise

if TYPE_CHECKING:
    from torch import Tensor

MX_GROUP_SIZE = 32
_MAX_EXPONENT = 2  # of E2M1: 6 = 1.5 * 2^2
_SIGN = 8
# Magnitudes by code, in halves.
_HALVES = (0, 1, 2, 3, 4, 6, 8, 12)
# E8M0: 2^-127 to 2^127; float32 holds 2^-127 and its half without a full mantissa, which a power needs not.
_MIN_SCALE, _MAX_SCALE = 2.0**-127, 2.0**127
_TABLE = "BytesOfE2M1"


class Mxfp4(Scheme):
    """codes: uint8 [N, G, g / 2]; scales: float32 [N, G], each a power of two, in files E8M0."""

    name: ClassVar[str] = "mxfp4"
    summary: ClassVar[str] = "4-bit float weights (E2M1), one power-of-two scale per 32 inputs"
    recommended_for: ClassVar[str] = (
        f"comparison with hardware that multiplies MXFP4; here as fast as {Int8Groupwise.name}"
    )
    source: ClassVar[str] = "OCP Microscaling Formats (MX) Specification 1.0 (MXFP4)"
    option_specs: ClassVar[tuple[SchemeOption, ...]] = (
        replace(
            parts.GROUP_SIZE,
            default=MX_GROUP_SIZE,
            allowed=(MX_GROUP_SIZE,),
            rejection=f"{name} has groups of {MX_GROUP_SIZE} weights, as its specification says",
        ),
        parts.ACCURACY_LEVEL,
    )
    unsupported_targets: ClassVar[Mapping[str, str]] = parts.NBITS_UNSUPPORTED_TARGETS
    exported_as: ClassVar[str] = f"{name} weights (MatMulNBits)"
    operators: ClassVar[Mapping[str, tuple[int, ...]]] = parts.MATMUL_NBITS
    # activations are rounded as in int4
    tolerance: ClassVar[float] = 0.04
    embedding_tolerance: ClassVar[float] = 0.04
    learnable_scales: ClassVar[bool] = False

    def group_size(self, width: int, options: SchemeOptions) -> int:
        """Return g."""
        return parts.group_size(options)

    def compute_qparams(self, groups: Tensor, width: int, options: SchemeOptions) -> QuantParams:
        """Return the powers of two, 1 for a group of zeros."""
        import torch

        largest = groups.abs().amax(dim=-1)
        # frexp: largest = m * 2^e with m from 0.5 to 1, exact where a logarithm is not
        exponents = torch.frexp(largest).exponent - 1 - _MAX_EXPONENT
        scales = torch.ldexp(torch.ones_like(largest), exponents).clamp_(_MIN_SCALE, _MAX_SCALE)
        return {"scales": scales.where(largest > 0, 1.0)}

    def quantize(self, groups: Tensor, grid: QuantParams, options: SchemeOptions) -> Tensor:
        """Return codes, uint8: the nearest magnitude, ties to the even code, and 8 more if negative."""
        import torch

        shares = groups / grid["scales"][..., None]
        codes = torch.bucketize(shares.abs(), _borders().to(groups.device), out_int32=True)
        return (codes + _SIGN * ((shares < 0) & (codes > 0))).byte()

    def dequantize(self, codes: Tensor, grid: QuantParams, options: SchemeOptions) -> Tensor:
        """Return e2m1 * scale."""
        import torch

        table = torch.from_numpy(_code_halves()).float().to(codes.device) / 2
        found: Tensor = table[codes.int()] * grid["scales"][..., None]
        return found

    def stored_tensors(self, rows: int, width: int, options: SchemeOptions) -> dict[str, StoredTensor]:
        """Return the specs of two codes per byte, and scales of one byte."""
        count = parts.num_groups(width, MX_GROUP_SIZE)
        return {
            "codes": StoredTensor((rows, count, MX_GROUP_SIZE // 2), "uint8"),
            "scales": StoredTensor((rows, count), "float32", file_dtype="float8_e8m0fnu"),
        }

    def pack(self, decided: UnpackedWeights, options: SchemeOptions) -> dict[str, Tensor]:
        """Return the tensors of `stored_tensors`."""
        import torch

        from smelt.quantization.packing import pack_nibbles

        scales = decided.qparams["scales"].to(torch.float8_e8m0fnu).float()
        return {"codes": pack_nibbles(decided.q_weight), "scales": scales}

    def unpack(self, matrix: PackedMatrix) -> UnpackedWeights:
        """Return the codes as uint8."""
        from smelt.quantization.packing import unpack_nibbles

        return UnpackedWeights(unpack_nibbles(matrix.tensor("codes")), {"scales": matrix.tensor("scales")})

    def linear(self, matrix: PackedMatrix, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply by the values; activations are float32, or int8 per block (accuracy level 4)."""
        return parts.groupwise_linear(matrix, x, bias)

    def lookup(self, matrix: PackedMatrix, ids: Tensor) -> Tensor:
        """Return some rows, with operators that can be exported; a row of zeros stays zero."""
        import torch

        from smelt.quantization.packing import unpack_nibbles_float

        flat = ids.flatten()
        codes = unpack_nibbles_float(matrix.tensor("codes").index_select(0, flat)).int()
        table = (
            matrix.tensor("table") if matrix.has("table") else torch.from_numpy(_code_halves()).to(ids.device)
        )
        steps = table.index_select(0, codes.flatten()).reshape(codes.shape).float() / 2
        stored = matrix.tensor(parts.FLOAT16_SCALES if matrix.has(parts.FLOAT16_SCALES) else "scales")
        scales = stored.index_select(0, flat).float()[..., None]
        rows: Tensor = (steps * scales).flatten(1)[:, : matrix.width]
        return rows.reshape(*ids.shape, matrix.width)

    def quantizes_activations(self, options: SchemeOptions) -> bool:
        """Return whether the accuracy level is 4."""
        return parts.quantizes_activation_blocks(options)

    def export_constants(self, matrix: PackedMatrix, use: MatrixUse) -> dict[str, Tensor]:
        """Return the scales in 16 bits, if these are exact; for lookups also the table."""
        import torch

        found = parts.groupwise_constants(matrix)
        if not found[parts.FLOAT16_SCALES].float().equal(matrix.tensor("scales")):
            found = {}
        return found | ({"table": torch.from_numpy(_code_halves())} if use == "lookup" else {})

    def emit_linear(self, matrix: PackedMatrix, x: Tensor, bias: Tensor | None, target: str) -> Tensor:
        """Emit MatMulNBits with 8 bits, expanded from the stored codes when the graph is loaded."""
        from smelt.quantization import emit

        codes = emit.expand_by_table(_TABLE, matrix.tensor("codes"), 2)
        exact = matrix.has(parts.FLOAT16_SCALES)
        scales = emit.widen_scales(matrix.tensor(parts.FLOAT16_SCALES)) if exact else matrix.tensor("scales")
        # float16 could not represent half of its least number: it is divided after the conversion
        return parts.emit_matmul_nbits(matrix, x, bias, 8, codes, scales=scales / 2)

    def float_activation_nodes(self, node: Any) -> list[Any]:
        """Return the same operator at accuracy level 0."""
        return parts.nbits_float_activation_nodes(node)

    def unpacking_tables(self) -> dict[str, Any]:
        """Return for each byte of two codes their 8-bit codes, the low one first, uint8 [256, 2]."""
        import numpy as np

        bytes_of = (_code_halves() + 128).astype(np.uint8)
        both = np.arange(256)
        return {_TABLE: np.stack([bytes_of[both & 15], bytes_of[both >> 4]], axis=1)}


def _code_halves() -> Any:
    """Return the value of each code in units of scale / 2, int32 [16]."""
    import numpy as np

    halves = np.array(_HALVES, dtype=np.int32)
    return np.concatenate([halves, -halves])


def _borders() -> Tensor:
    """Return the largest magnitude that becomes each code but the last, float32 [7].

    It is the middle of two magnitudes where the lower code is even, else the number before the middle.
    """
    import torch

    magnitudes = torch.tensor(_HALVES, dtype=torch.float32) / 2
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    even = torch.arange(len(middles)) % 2 == 0
    return middles.where(even, torch.nextafter(middles, torch.zeros(())))
