"""Schemes int2, int3, int4 and int8-groupwise: a scale (and zero point) for each group of a row's weights.

Quantization and storage are those of `smelt/quantization/affine_groupwise.py`.

int4 has a second form, for TensorRT: signed, a scale for each block of inputs, without zero points. The code
c from 0 to 15 represents c - 8, which the bytes store in two's complement: each code with its highest bit
flipped. A multiplication reads columns, so that the blocks are along the summed axis and the matrix is
directly before the MatMul; a lookup reads rows. Scales are positive: the parser of TensorRT rejects others
("Scale coefficients must all be positive"; that of TensorRT for RTX accepts them). TensorRT's support:
NVIDIA's TensorRT documentation, "Quantization Schemes": INT4 for weights only, blocks of 64 or 128 along one
of the last two axes, scales of 16 or 32 bits.

Shapes: N = outputs (rows of a matrix), K = inputs, g = group size, G = ceil(K / g).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.quantization import affine_groupwise
from smelt.quantization import groupwise as parts
from smelt.quantization.affine_groupwise import POSITIVE_SCALES, SYMMETRIC, AffineGroupwise
from smelt.quantization.groupwise import BLOCKWISE_MIN_OPSET, BLOCKWISE_UNSUPPORTED_TARGETS
from smelt.quantization.scheme import MatrixUse, OptionValue, PackedMatrix, SchemeOption, SchemeOptions

if TYPE_CHECKING:
    from torch import Tensor


SIGNED_INT4_TARGET = "tensorrt"
# activations are multiplied as floats, without rounding
SIGNED_INT4_OPTIONS: Mapping[str, tuple[OptionValue, ...]] = {
    parts.GROUP_SIZE.name: (64, 128),
    "symmetric": ("positive",),
    parts.ACCURACY_LEVEL.name: (0,),
}
_COLUMNS, _COLUMN_SCALES, _ROWS = "signed_columns", "column_scales", "signed_rows"
_SIGN_BITS = 0x88  # the highest bits of two codes


def signed_int4_constants(matrix: PackedMatrix, use: MatrixUse) -> dict[str, Tensor]:
    """Return codes [G g, N], flattened, and scales float32 [G, N] of a linear layer; or codes of a lookup.

    Codes are uint8, two per byte, the first one in the lowest bits; those of a lookup [N, G, g / 2].
    """
    codes = matrix.tensor("codes").detach() ^ _SIGN_BITS
    if use == "lookup":
        return {_ROWS: codes}
    columns = parts.unpack_nibbles(codes).flatten(1).t()
    scales = matrix.tensor("scales").detach().t().contiguous()
    return {_COLUMNS: parts.pack_nibbles(columns.flatten()), _COLUMN_SCALES: scales}


def emit_signed_int4_linear(matrix: PackedMatrix, x: Tensor, bias: Tensor | None) -> Tensor:
    """Emit MatMul with a DequantizeLinear of [G g, N]."""
    from smelt.quantization.emit import signed_block_linear

    size = parts.group_size(matrix.options)
    return signed_block_linear(x, matrix.tensor(_COLUMNS), matrix.tensor(_COLUMN_SCALES), bias, size)


def emit_signed_int4_lookup(matrix: PackedMatrix, ids: Tensor) -> Tensor:
    """Emit Gather in a DequantizeLinear of [N, G g]."""
    from torch.nn import functional as F

    from smelt.quantization.emit import signed_block_weight

    size = parts.group_size(matrix.options)
    rows = F.embedding(ids, signed_block_weight(matrix.tensor(_ROWS), matrix.tensor("scales"), size))
    return rows[..., : matrix.width]


class Int4(AffineGroupwise):
    """codes: uint8 [N, G, g / 2]; scales: float32 [N, G], each a float16; zeros: uint8 [N, ceil(G / 2)].

    Two codes per byte. Clipping one end of a symmetric range is better: a scale of amax / 7, which clips
    nothing, has a mean squared error that is 28 % larger (groups of 64, normal or trained weights).
    `symmetric: positive` has no negative scales, as TensorRT requires: a largest value that is positive is
    clipped by one step.
    """

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
            if target != SIGNED_INT4_TARGET
        },
        # its networks are weakly typed, where each type needs an option
        "ort-tensorrt": "ONNX Runtime 1.31 has no option to enable 4-bit weights in TensorRT 10",
    }
    required_options: ClassVar[Mapping[str, Mapping[str, tuple[OptionValue, ...]]]] = {
        SIGNED_INT4_TARGET: SIGNED_INT4_OPTIONS
    }
    supported_dtypes: ClassVar[Mapping[str, tuple[str, ...]]] = {SIGNED_INT4_TARGET: ("fp16",)}
    min_opset: ClassVar[Mapping[str, int]] = {**BLOCKWISE_MIN_OPSET, SIGNED_INT4_TARGET: 21}
    exported_as: ClassVar[str] = f"{name} weights (MatMulNBits)"
    # 0.006 to 0.018 was measured on four families
    tolerance: ClassVar[float] = 0.04
    embedding_tolerance: ClassVar[float] = 0.04

    def target_constants(self, target: str, matrix: PackedMatrix, use: MatrixUse) -> dict[str, Tensor]:
        """Return signed codes for TensorRT."""
        return signed_int4_constants(matrix, use) if target == SIGNED_INT4_TARGET else {}

    def emit_linear(self, matrix: PackedMatrix, x: Tensor, bias: Tensor | None, target: str) -> Tensor:
        """Emit MatMulNBits; for OpenVINO and TensorRT MatMul with a DequantizeLinear."""
        if target == SIGNED_INT4_TARGET:
            return emit_signed_int4_linear(matrix, x, bias)
        return super().emit_linear(matrix, x, bias, target)

    def emit_lookup(self, matrix: PackedMatrix, ids: Tensor, target: str) -> Tensor:
        """Emit Gather, Cast and Mul; for TensorRT Gather in a table that is dequantized like weights."""
        return (
            emit_signed_int4_lookup(matrix, ids) if target == SIGNED_INT4_TARGET else self.lookup(matrix, ids)
        )


_TABLE = "NibblesOfTwoBits"


class Int2(AffineGroupwise):
    """codes: uint8 [N, G, g / 4]; scales: float32 [N, G], each a float16; zeros: uint8 [N, ceil(G / 4)].

    Four codes per byte. They are exported to 2-bit MatMulNBits where activations are rounded (accuracy level
    4). For float32 activations (level 0) ONNX Runtime 1.31 unpacks 2-bit codes at every call; there they
    become 4-bit ones when the graph is loaded, and the file stores the small ones.
    """

    bits: ClassVar[int] = 2
    name: ClassVar[str] = "int2"
    summary: ClassVar[str] = "2-bit weights, one scale per group of inputs"
    recommended_for: ClassVar[str] = "small files"
    option_specs: ClassVar[tuple[SchemeOption, ...]] = (
        parts.two_bit_group_size(name),
        SYMMETRIC,
        parts.ACCURACY_LEVEL,
    )
    embedding_scheme: ClassVar[str] = Int4.name
    exported_as: ClassVar[str] = f"{name} weights (MatMulNBits)"
    tolerance: ClassVar[float] = 0.04
    embedding_tolerance: ClassVar[float] = 0.04

    def expands_to_int4(self, options: SchemeOptions) -> bool:
        """Return whether activations stay float32."""
        return not parts.quantizes_activation_blocks(options)

    def emit_int4(self, matrix: PackedMatrix) -> Tensor:
        """Emit two bytes of 4-bit codes for each byte."""
        from smelt.quantization import emit

        return emit.expand_by_table(_TABLE, matrix.tensor("codes"), 2)

    def unpacking_tables(self) -> dict[str, Any]:
        """Return for each byte of four codes the two bytes of the same as 4-bit ones."""
        first = affine_groupwise.INT4_ZERO_POINT - self.zero_point
        return super().unpacking_tables() | {
            _TABLE: affine_groupwise.int4_expansion_table(range(first, first + 4))
        }


_LOW, _HIGH = "NibblesOfLowBits", "NibblesOfHighBits"


class Int3(AffineGroupwise):
    """codes: uint8 [N, G, g / 4]; highs: uint8 [N, G, g / 8]; scales: float32 [N, G], each a float16.

    zeros: uint8 [N, ceil(G / 2)], a zero point in four bits.

    A file stores three bits per weight: four codes' two low bits in a byte, and the high bits of eight in
    another one. ONNX Runtime's MatMulNBits supports 2, 4 and 8 bits (1.31: "additional bits support is
    planned"), so that the codes become 4-bit ones when the graph is loaded: a small file, with the memory and
    speed of int4.
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
        from smelt.quantization import emit

        low = emit.expand_by_table(_LOW, matrix.tensor("codes"), 2)
        return emit.bitwise_or(low, emit.expand_by_table(_HIGH, matrix.tensor("highs"), 4))

    def unpacking_tables(self) -> dict[str, Any]:
        """Return the nibbles of four low parts, and of eight high ones with the shift of the middle."""
        return super().unpacking_tables() | {
            _LOW: affine_groupwise.int4_expansion_table(range(4)),
            _HIGH: affine_groupwise.int4_expansion_table(
                [affine_groupwise.INT4_ZERO_POINT - self.zero_point, affine_groupwise.INT4_ZERO_POINT]
            ),
        }


class Int8Groupwise(AffineGroupwise):
    """codes: uint8 [N, G, g]; scales: float32 [N, G], each a float16; zeros: uint8 [N, G].

    One code per byte. Activations are rounded block by block, as in every MatMulNBits
    (`smelt/quantization/groupwise.py`), so that a row does not depend on the other rows of its batch.
    """

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
