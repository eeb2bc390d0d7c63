"""Schemes int2, int3, int4 and int8-groupwise: a scale (and zero point) for each group of a row's weights.

value = (code - zero) * scale, code and zero between 0 and 2^b - 1; in symmetric matrices zero is 2^(b - 1)
everywhere, and none is stored. Codes of 2, 4 and 8 bits are stored in the layout of ONNX Runtime's
MatMulNBits; of 3 bits the two low ones in this layout, and the high ones separately, eight per byte. Scales
are float16: the error of rounding them is far below the quantization error.

Symmetric: the value of largest magnitude in a group becomes code 0 (that is -2^(b - 1)), so that all codes
are used. A value of the other sign that is as large would be +2^(b - 1) and is clipped by one step at most;
the error of all others is half a step at most. Positive: the scale is the largest magnitude divided by
2^(b - 1) whatever its sign, and 1 for zeros. Asymmetric: smallest and largest value become 0 and 2^b - 1, and
zero itself stays exact. Symmetric and asymmetric are as in ONNX Runtime's own quantizer
(onnxruntime/core/mlas/lib/q4_dq.cpp, range2scale and range2scalezp); scales are rounded to float16 before
codes are computed. In training the range follows the weights, so that one step at most is clipped.

The operator can have more bits than the weights. ONNX Runtime 1.31 has no 3-bit MatMulNBits, and with float32
activations (accuracy level 0) a fast kernel for 4 bits only. Files store the small codes. A table
(`Scheme.unpacking_tables`) expands each byte of them once, when a graph is loaded. Results are the same:
codes are shifted so that a zero point in the middle of the small ones becomes the operator's default (8 of 4
bits), and activations are rounded alike. The kernels of more bits are mostly faster while a matrix is in a
cache, those of fewer bits where it must be read from memory, and processors differ
(docs/measurements/int8-groupwise.md); so `onnx: {autotune}` measures.

int4 has a second form, for TensorRT: signed, a scale for each block of inputs, without zero points. The code
c from 0 to 15 represents c - 8, which the bytes store in two's complement: each code with its highest bit
flipped. A multiplication reads columns, so that the blocks are along the summed axis and the matrix is
directly before the MatMul; a lookup reads rows. Scales are positive: the parser of TensorRT rejects others
("Scale coefficients must all be positive"; that of TensorRT for RTX accepts them). TensorRT's support:
NVIDIA's TensorRT documentation, "Quantization Schemes": INT4 for weights only, blocks of 64 or 128 along one
of the last two axes, scales of 16 or 32 bits.

Shapes: N = outputs (rows of a matrix), K = inputs (columns), g = group size, G = ceil(K / g), b = bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.quantization import groupwise as parts
from smelt.quantization.groupwise import (
    ACCURACY_LEVEL,
    BLOCKWISE_MIN_OPSET,
    BLOCKWISE_UNSUPPORTED_TARGETS,
    group_size,
    num_groups,
    quantizes_activation_blocks,
)
from smelt.quantization.scheme import (
    MatrixUse,
    OptionValue,
    PackedMatrix,
    QuantParams,
    SchemeOption,
    SchemeOptions,
    StoredTensor,
    UnpackedWeights,
)

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
    q_weight = np.arange(256)[:, None] >> np.arange(0, 8, bits) & (len(values) - 1)
    nibbles = np.array(values, dtype=np.uint8)[q_weight]
    return nibbles[:, ::2] | nibbles[:, 1::2] << 4


def shift_zero_points(zeros: Tensor, by: int) -> Tensor:
    """Return zero points uint8 [N, G] of small codes as those of 4-bit ones, two in a byte."""
    return parts.pack_nibbles(zeros + by)


_BITS = (2, 4, 8)
_BYTES = "BytesOfMiddledNibbles"
_SHIFT = 128 - INT4_ZERO_POINT


def nbits_variants(code_bits: int, options: SchemeOptions) -> tuple[str, ...]:
    """Return the operators for codes of `code_bits` bits, the default first."""
    bit_widths = _BITS if quantizes_activation_blocks(options) else (code_bits,)
    return tuple(f"MatMulNBits, {bits} bits" for bits in bit_widths if bits >= code_bits)


def variant_bits(matrix: PackedMatrix, default_bits: int) -> int:
    """Return the bits of the exported codes of `matrix`."""
    return next((bits for bits in _BITS if matrix.variant.endswith(f" {bits} bits")), default_bits)


def emit_int4_to_int8(nibbles: Tensor) -> Tensor:
    """Emit 8-bit codes, uint8 [..., 2 n], for pairs of 4-bit ones, uint8 [..., n]."""
    from smelt.quantization import emit

    return emit.expand_by_table(_BYTES, nibbles, 2)


def int4_to_int8_table() -> dict[str, Any]:
    """Return the bytes of each pair of 4-bit codes, the low one first, uint8 [256, 2]."""
    import numpy as np

    nibbles = np.arange(256)[:, None] >> np.array([0, 4]) & 15
    return {_BYTES: (nibbles + _SHIFT).astype(np.uint8)}


def int8_zero_points(zeros: Tensor, middle: int) -> Tensor:
    """Return zero points uint8 [N, G] of codes with the middle `middle` as those of 8-bit ones."""
    return zeros + (128 - middle)


def nbits_variant_node(matrix: PackedMatrix, variant: int, x: str, y: str) -> tuple[Any, dict[str, Tensor]]:
    """Return the operator of the variant of `matrix` with random codes, for timing, and its constants."""
    import torch
    from onnx import helper

    options, bits, out_features = (
        matrix.options,
        variant_bits(matrix, variant),
        matrix.tensor("codes").shape[0],
    )
    size = group_size(options)
    count = num_groups(matrix.width, size)
    numbers = torch.Generator().manual_seed(0)
    shape = (out_features, count, size * bits // 8)
    q_weight = torch.randint(0, 256, shape, generator=numbers, dtype=torch.uint8)
    tensors = {f"{y}.codes": q_weight, f"{y}.scales": torch.full((out_features, count), 0.01)}
    if matrix.has("zeros"):
        tensors[f"{y}.zeros"] = torch.full((out_features, -(-count * bits // 8)), 1, dtype=torch.uint8)
    layout: dict[str, Any] = {"K": matrix.width, "N": out_features, "bits": bits, "block_size": size}
    layout[ACCURACY_LEVEL.name] = parts.operator_level(options)
    node = helper.make_node("MatMulNBits", [x, *tensors], [y], domain="com.microsoft", **layout)
    return node, tensors


POSITIVE_SCALES = "positive"
SYMMETRIC = parts.SYMMETRIC

# the parts of a code that are packed separately: the tensor's name, the number of bits, the lowest bit
_PLANES = {
    2: (("codes", 2, 0),),
    3: (("codes", 2, 0), ("highs", 1, 2)),
    4: (("codes", 4, 0),),
    8: (("codes", 8, 0),),
}
# names of zero points that are not in their stored form, by the bits of the operator
_WIDE_ZEROS = {4: "wide_zeros", 8: "byte_zeros"}
_FLAT_ZEROS = "flat_zeros"
_BLOCKED = "openvino"


class AffineGroupwise(parts.GroupwiseScheme):
    """codes: uint8 [N, G, g b / 8]; scales: float32 [N, G], each a float16; zeros: uint8 [N, ceil(G b / 8)].

    Of 3 bits codes: uint8 [N, G, g / 4]; highs: uint8 [N, G, g / 8]; zeros: uint8 [N, ceil(G / 2)].

    bits: b, 2, 3, 4 or 8.
    """

    bits: ClassVar[int]
    source: ClassVar[str] = "ONNX Runtime, com.microsoft::MatMulNBits and its quantizer (mlas/lib/q4_dq.cpp)"
    option_specs: ClassVar[tuple[SchemeOption, ...]] = (parts.GROUP_SIZE, SYMMETRIC, parts.ACCURACY_LEVEL)

    @property
    def max_code(self) -> int:
        """Return the largest code."""
        return int(2**self.bits) - 1

    @property
    def zero_point(self) -> int:
        """Return the zero point of symmetric matrices."""
        return int(2 ** (self.bits - 1))

    def compute_qparams(self, groups: Tensor, width: int, options: SchemeOptions) -> QuantParams:
        """Return scales, each a float16, and zero points unless symmetric."""
        low, high = groups.amin(dim=-1).clamp_(max=0), groups.amax(dim=-1).clamp_(min=0)
        if options[SYMMETRIC.name] == POSITIVE_SCALES:
            scales = (high.maximum(-low) / self.zero_point).half().float()
            return {"scales": scales.where(scales > 0, 1.0)}
        if options[SYMMETRIC.name]:
            return {"scales": (high.where(high > -low, low) / -self.zero_point).half().float()}
        scales = ((high - low) / self.max_code).half().float()
        return {
            "scales": scales,
            "zeros": (-low * parts.safe_reciprocal(scales)).round_().clamp_(0, self.max_code).byte(),
        }

    def quantize(self, groups: Tensor, grid: QuantParams, options: SchemeOptions) -> Tensor:
        """Return codes from 0 to the largest one, uint8."""
        steps = (groups * parts.safe_reciprocal(grid["scales"])[..., None]).round_()
        return steps.add_(self._zero_points(grid)).clamp_(0, self.max_code).byte()

    def dequantize(self, codes: Tensor, grid: QuantParams, options: SchemeOptions) -> Tensor:
        """Return (code - zero) * scale."""
        return (codes.float() - self._zero_points(grid)) * grid["scales"][..., None]

    def code_range(
        self, grid: QuantParams, options: SchemeOptions
    ) -> tuple[Tensor | float, Tensor | float] | None:
        """Return 0 and the largest code minus the zero point."""
        zeros = self._zero_points(grid)
        return 0.0 - zeros, self.max_code - zeros

    def stored_tensors(self, rows: int, width: int, options: SchemeOptions) -> dict[str, StoredTensor]:
        """Return the specs of codes, as many per byte as fit, scales, and zero points likewise."""
        size = self.group_size(width, options)
        count = parts.num_groups(width, size)
        specs = {
            name: StoredTensor((rows, count, size * bits // 8), "uint8")
            for name, bits, _ in _PLANES[self.bits]
        }
        specs["scales"] = StoredTensor((rows, count), "float32", file_dtype="float16")
        if not options[SYMMETRIC.name]:
            specs["zeros"] = StoredTensor((rows, -(-count * self._zero_bits // 8)), "uint8")
        return specs

    def pack(self, decided: UnpackedWeights, options: SchemeOptions) -> dict[str, Tensor]:
        """Return the tensors of `stored_tensors`."""
        grid = decided.qparams
        tensors = {
            name: parts.pack_codes(decided.q_weight >> low & 2**bits - 1, bits)
            for name, bits, low in _PLANES[self.bits]
        }
        tensors["scales"] = grid["scales"].half().float()
        return tensors | (
            {"zeros": parts.pack_codes(grid["zeros"], self._zero_bits)} if "zeros" in grid else {}
        )

    def unpack(self, matrix: PackedMatrix) -> UnpackedWeights:
        """Return codes and zero points as uint8."""
        (first, bits, _), *further_planes = _PLANES[self.bits]
        q_weight, grid = parts.unpack_codes(matrix.tensor(first), bits), {"scales": matrix.tensor("scales")}
        for name, bits, low in further_planes:
            q_weight = q_weight | parts.unpack_codes(matrix.tensor(name), bits) << low
        if matrix.has("zeros"):
            grid["zeros"] = parts.unpack_codes(matrix.tensor("zeros"), self._zero_bits)[
                :, : q_weight.shape[1]
            ]
        return UnpackedWeights(q_weight, grid)

    def checkpoint_args(self, options: SchemeOptions) -> Mapping[str, Any] | None:
        """Return integers in groups, packed into int32."""
        weights = {
            "num_bits": self.bits,
            "type": "int",
            "strategy": "group",
            "group_size": group_size(options),
        }
        return {
            "format": "pack-quantized",
            "weights": weights | {"symmetric": bool(options[SYMMETRIC.name])},
        }

    def lookup(self, matrix: PackedMatrix, ids: Tensor) -> Tensor:
        """Return some rows, with operators that can be exported; a row of zeros stays zero."""
        flat = ids.flatten()
        (first, bits, _), *further_planes = _PLANES[self.bits]
        q_weight = _unpack_as_float(matrix.tensor(first).index_select(0, flat), bits)
        for name, plane_bits, low in further_planes:
            q_weight = q_weight + _unpack_as_float(
                matrix.tensor(name).index_select(0, flat), plane_bits
            ) * float(2**low)
        zeros: Tensor | float = float(self.zero_point)
        if matrix.has("zeros"):
            packed = matrix.tensor("zeros").index_select(0, flat)
            zeros = _unpack_as_float(packed, self._zero_bits)[:, : q_weight.shape[1], None]
        stored_scales = matrix.tensor(parts.FLOAT16_SCALES if matrix.has(parts.FLOAT16_SCALES) else "scales")
        scales = stored_scales.index_select(0, flat).float()[..., None]
        values = ((q_weight - zeros) * scales).flatten(1)[:, : matrix.width]
        return values.reshape(*ids.shape, matrix.width)

    def export_constants(self, matrix: PackedMatrix, use: MatrixUse) -> dict[str, Tensor]:
        """Return the scales in 16 bits, and the zero points of expanded codes."""
        constants = super().export_constants(matrix, use)
        bits = variant_bits(matrix, self._default_bits(matrix.options))
        if use == "product" and matrix.has("zeros") and bits != self.bits:
            zeros = self.unpack(matrix).qparams["zeros"]
            constants[_WIDE_ZEROS[bits]] = (
                int8_zero_points(zeros, self.zero_point)
                if bits == 8
                else shift_zero_points(zeros, INT4_ZERO_POINT - self.zero_point)
            )
        if use == "product" and self._has_odd_groups(matrix):
            constants[_FLAT_ZEROS] = parts.pack_codes(
                self.unpack(matrix).qparams["zeros"].flatten(), self.bits
            )
        return constants

    def emit_linear(self, matrix: PackedMatrix, x: Tensor, bias: Tensor | None, target: str) -> Tensor:
        """Emit MatMulNBits, of more bits for expanded codes; for OpenVINO a MatMul of blocks."""
        if target == _BLOCKED:
            return self._emit_blockwise(matrix, x, bias)
        bits = variant_bits(matrix, self._default_bits(matrix.options))
        q_weight = matrix.tensor("codes") if bits == self.bits else self._emit_widened(matrix, bits)
        name = "zeros" if bits == self.bits else _WIDE_ZEROS[bits]
        zeros = matrix.tensor(name) if matrix.has(name) else None
        return parts.emit_matmul_nbits(matrix, x, bias, bits, q_weight, zeros)

    def expands_to_int4(self, options: SchemeOptions) -> bool:
        """Return whether codes become 4-bit ones when the graph is loaded."""
        return False

    def emit_int4(self, matrix: PackedMatrix) -> Tensor:
        """Emit 4-bit codes."""
        return matrix.tensor("codes")

    def operator_variants(self, options: SchemeOptions) -> tuple[str, ...]:
        """Return the operators of as many bits and more."""
        return nbits_variants(self._default_bits(options), options)

    def variant_node(self, matrix: PackedMatrix, x: str, y: str) -> tuple[Any, dict[str, Tensor]]:
        """Return MatMulNBits with the bits of the selected variant."""
        return nbits_variant_node(matrix, self._default_bits(matrix.options), x, y)

    def unpacking_tables(self) -> dict[str, Any]:
        """Return the table that expands 4-bit codes to 8-bit ones."""
        return int4_to_int8_table()

    def _default_bits(self, options: SchemeOptions) -> int:
        """Return the bits of the exported codes unless another variant is selected."""
        return 4 if self.expands_to_int4(options) else self.bits

    def _emit_widened(self, matrix: PackedMatrix, bits: int) -> Tensor:
        nibbles = self.emit_int4(matrix)
        return emit_int4_to_int8(nibbles) if bits == 8 else nibbles

    def _zero_points(self, grid: QuantParams) -> Tensor | int:
        """Return the zero points in a shape that broadcasts over codes, [N, G, 1]."""
        return grid["zeros"][..., None].float() if "zeros" in grid else self.zero_point

    def _has_odd_groups(self, matrix: PackedMatrix) -> bool:
        """Return whether rows of zero points end within a byte, which the blocked form does not support."""
        return self.bits == 4 and matrix.has("zeros") and matrix.tensor("scales").shape[1] % 2 == 1

    def _emit_blockwise(self, matrix: PackedMatrix, x: Tensor, bias: Tensor | None) -> Tensor:
        from smelt.quantization.emit import NBitsLayout, blockwise_linear

        scales = matrix.tensor(parts.FLOAT16_SCALES)
        layout = NBitsLayout(matrix.width, scales.shape[0], self.bits, parts.group_size(matrix.options))
        name = _FLAT_ZEROS if self._has_odd_groups(matrix) else "zeros"
        zeros = matrix.tensor(name) if matrix.has(name) else None
        rounds = self.quantizes_activations(matrix.options)
        return blockwise_linear(x, matrix.tensor("codes"), scales, zeros, bias, layout, rounds)

    @property
    def _zero_bits(self) -> int:
        """Return the bits of a stored zero point."""
        return 4 if self.bits == 3 else self.bits


def _unpack_as_float(packed: Tensor, bits: int) -> Tensor:
    """Return packed codes as float32, with operators that can be exported."""
    return packed.float() if bits == 8 else parts.unpack_base_n_float(packed, 2**bits, 8 // bits)


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
    q_weight = matrix.tensor("codes").detach() ^ _SIGN_BITS
    if use == "lookup":
        return {_ROWS: q_weight}
    columns = parts.unpack_nibbles(q_weight).flatten(1).t()
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
    values = F.embedding(ids, signed_block_weight(matrix.tensor(_ROWS), matrix.tensor("scales"), size))
    return values[..., : matrix.width]


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
        **parts.GroupwiseScheme.required_options,
        SIGNED_INT4_TARGET: SIGNED_INT4_OPTIONS,
    }
    supported_dtypes: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **parts.GroupwiseScheme.supported_dtypes,
        SIGNED_INT4_TARGET: ("fp16",),
    }
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
        first = INT4_ZERO_POINT - self.zero_point
        return super().unpacking_tables() | {_TABLE: int4_expansion_table(range(first, first + 4))}


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
            _LOW: int4_expansion_table(range(4)),
            _HIGH: int4_expansion_table([INT4_ZERO_POINT - self.zero_point, INT4_ZERO_POINT]),
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
