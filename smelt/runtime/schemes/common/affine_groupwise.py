"""Base of schemes with integers in groups: a scale, optionally a zero point, MatMulNBits.

value = (code - zero) * scale, code and zero between 0 and 2^b - 1; zero is 2^(b - 1) in symmetric matrices,
have none stored. Codes of 2, 4 and 8 bits are stored in the layout of ONNX Runtime's MatMulNBits; of 3 bits
the two low ones in this layout, and the high ones separately, eight per byte. Scales are float16: the error
of rounding them is far below the quantization error.

Symmetric: the value of largest magnitude in a group becomes code 0 (that is -2^(b - 1)), so that all codes
are used; the zero point is the same everywhere. A value of the other sign that is as large would be
+2^(b - 1) and is clipped by one step at most; the error of all others is half a step at most. Positive: the
scale is the largest magnitude by 2^(b - 1) whatever its sign, and 1 for zeros. Asymmetric: smallest and
largest value become 0 and 2^b - 1, and zero itself stays exact. Both as in ONNX Runtime's own quantizer
(onnxruntime/core/mlas/lib/q4_dq.cpp, range2scale and range2scalezp); scales are rounded to float16 before
codes are computed. In training the range follows the weights, so that one step at most is clipped.

Shapes: N = outputs (rows), K = inputs (columns), g = group size, G = ceil(K / g), b = bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.runtime.schemes.common import groupwise as parts
from smelt.runtime.schemes.common import nbits_variants
from smelt.runtime.schemes.common.int4_expansion import INT4_ZERO_POINT, shift_zero_points
from smelt.runtime.schemes.scheme import (
    MatrixUse,
    PackedMatrix,
    QuantParams,
    Scheme,
    SchemeOption,
    SchemeOptions,
    StoredTensor,
    UnpackedWeights,
)

if TYPE_CHECKING:
    from torch import Tensor

POSITIVE_SCALES = "positive"
SYMMETRIC = SchemeOption(
    "symmetric",
    True,
    (True, False),
    "false: with zero points; positive: no negative scales, for TensorRT",
)

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


class AffineGroupwise(Scheme):
    """codes: uint8 [N, G, g b / 8]; scales: float32 [N, G], each a float16; zeros: uint8 [N, ceil(G b / 8)].

    Of 3 bits codes: uint8 [N, G, g / 4]; highs: uint8 [N, G, g / 8]; zeros: uint8 [N, ceil(G / 2)].

    bits: b, 2, 3, 4 or 8.
    """

    bits: ClassVar[int]
    source: ClassVar[str] = "ONNX Runtime, com.microsoft::MatMulNBits and its quantizer (mlas/lib/q4_dq.cpp)"
    option_specs: ClassVar[tuple[SchemeOption, ...]] = (parts.GROUP_SIZE, SYMMETRIC, parts.ACCURACY_LEVEL)
    unsupported_targets: ClassVar[Mapping[str, str]] = parts.NBITS_UNSUPPORTED_TARGETS
    operators: ClassVar[Mapping[str, tuple[int, ...]]] = parts.MATMUL_NBITS

    @property
    def max_code(self) -> int:
        """Return the largest code."""
        return int(2**self.bits) - 1

    @property
    def zero_point(self) -> int:
        """Return the zero point of symmetric matrices."""
        return int(2 ** (self.bits - 1))

    def group_size(self, width: int, options: SchemeOptions) -> int:
        """Return g."""
        return parts.group_size(options)

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
        found = {
            name: StoredTensor(
                (rows, count, size * bits // 8), "uint8", values_per_element=0 if low else 8 // bits
            )
            for name, bits, low in _PLANES[self.bits]
        }
        found["scales"] = StoredTensor((rows, count), "float32", file_dtype="float16")
        if not options[SYMMETRIC.name]:
            found["zeros"] = StoredTensor((rows, -(-count * self._zero_bits // 8)), "uint8")
        return found

    def pack(self, decided: UnpackedWeights, options: SchemeOptions) -> dict[str, Tensor]:
        """Return the tensors of `stored_tensors`."""
        from smelt.runtime.schemes.common.packing import pack_codes

        grid = decided.qparams
        found = {
            name: pack_codes(decided.q_weight >> low & 2**bits - 1, bits)
            for name, bits, low in _PLANES[self.bits]
        }
        found["scales"] = grid["scales"].half().float()
        return found | ({"zeros": pack_codes(grid["zeros"], self._zero_bits)} if "zeros" in grid else {})

    def unpack(self, matrix: PackedMatrix) -> UnpackedWeights:
        """Return codes and zero points as uint8."""
        from smelt.runtime.schemes.common.packing import unpack_codes

        (first, bits, _), *others = _PLANES[self.bits]
        codes, grid = unpack_codes(matrix.tensor(first), bits), {"scales": matrix.tensor("scales")}
        for name, bits, low in others:
            codes = codes | unpack_codes(matrix.tensor(name), bits) << low
        if matrix.has("zeros"):
            grid["zeros"] = unpack_codes(matrix.tensor("zeros"), self._zero_bits)[:, : codes.shape[1]]
        return UnpackedWeights(codes, grid)

    def linear(self, matrix: PackedMatrix, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply by the values; activations are float32, or int8 per block (accuracy level 4)."""
        return parts.groupwise_linear(matrix, x, bias)

    def lookup(self, matrix: PackedMatrix, ids: Tensor) -> Tensor:
        """Return some rows, with operators that can be exported; a row of zeros stays zero."""
        flat = ids.flatten()
        (first, bits, _), *others = _PLANES[self.bits]
        codes = _unpack_as_float(matrix.tensor(first).index_select(0, flat), bits)
        for name, more, low in others:
            codes = codes + _unpack_as_float(matrix.tensor(name).index_select(0, flat), more) * float(2**low)
        zeros: Tensor | float = float(self.zero_point)
        if matrix.has("zeros"):
            packed = matrix.tensor("zeros").index_select(0, flat)
            zeros = _unpack_as_float(packed, self._zero_bits)[:, : codes.shape[1], None]
        stored = matrix.tensor(parts.FLOAT16_SCALES if matrix.has(parts.FLOAT16_SCALES) else "scales")
        scales = stored.index_select(0, flat).float()[..., None]
        rows = ((codes - zeros) * scales).flatten(1)[:, : matrix.width]
        return rows.reshape(*ids.shape, matrix.width)

    def quantizes_activations(self, options: SchemeOptions) -> bool:
        """Return whether the accuracy level is 4."""
        return parts.quantizes_activation_blocks(options)

    def export_constants(self, matrix: PackedMatrix, use: MatrixUse) -> dict[str, Tensor]:
        """Return the scales in 16 bits, and the zero points of expanded codes."""
        found = parts.groupwise_constants(matrix)
        bits = nbits_variants.variant_bits(matrix, self._default_bits(matrix.options))
        if use == "product" and matrix.has("zeros") and bits != self.bits:
            zeros = self.unpack(matrix).qparams["zeros"]
            found[_WIDE_ZEROS[bits]] = (
                nbits_variants.int8_zero_points(zeros, self.zero_point)
                if bits == 8
                else shift_zero_points(zeros, INT4_ZERO_POINT - self.zero_point)
            )
        if use == "product" and self._has_odd_groups(matrix):
            from smelt.runtime.schemes.common.packing import pack_codes

            found[_FLAT_ZEROS] = pack_codes(self.unpack(matrix).qparams["zeros"].flatten(), self.bits)
        return found

    def emit_linear(self, matrix: PackedMatrix, x: Tensor, bias: Tensor | None, target: str) -> Tensor:
        """Emit MatMulNBits, of more bits for expanded codes; for OpenVINO a MatMul of blocks."""
        if target == _BLOCKED:
            return self._emit_blockwise(matrix, x, bias)
        bits = nbits_variants.variant_bits(matrix, self._default_bits(matrix.options))
        codes = matrix.tensor("codes") if bits == self.bits else self._emit_widened(matrix, bits)
        name = "zeros" if bits == self.bits else _WIDE_ZEROS[bits]
        zeros = matrix.tensor(name) if matrix.has(name) else None
        return parts.emit_matmul_nbits(matrix, x, bias, bits, codes, zeros)

    def expands_to_int4(self, options: SchemeOptions) -> bool:
        """Return whether codes become 4-bit ones when the graph is loaded."""
        return False

    def emit_int4(self, matrix: PackedMatrix) -> Tensor:
        """Emit 4-bit codes."""
        return matrix.tensor("codes")

    def operator_variants(self, options: SchemeOptions) -> tuple[str, ...]:
        """Return the operators of as many bits and more."""
        return nbits_variants.nbits_variants(self._default_bits(options), options)

    def variant_node(self, matrix: PackedMatrix, x: str, y: str) -> tuple[Any, dict[str, Tensor]]:
        """Return MatMulNBits with the bits of the selected variant."""
        return nbits_variants.nbits_variant_node(matrix, self._default_bits(matrix.options), x, y)

    def unpacking_tables(self) -> dict[str, Any]:
        """Return the table that expands 4-bit codes to 8-bit ones."""
        return nbits_variants.int4_to_int8_table()

    def _default_bits(self, options: SchemeOptions) -> int:
        """Return the bits of the exported codes unless another variant is selected."""
        return 4 if self.expands_to_int4(options) else self.bits

    def _emit_widened(self, matrix: PackedMatrix, bits: int) -> Tensor:
        nibbles = self.emit_int4(matrix)
        return nbits_variants.emit_int4_to_int8(nibbles) if bits == 8 else nibbles

    def float_activation_nodes(self, node: Any) -> list[Any]:
        """Return the same operator at accuracy level 0."""
        return parts.nbits_float_activation_nodes(node)

    def _zero_points(self, grid: QuantParams) -> Tensor | int:
        """Return the zero points in a shape that broadcasts over codes, [N, G, 1]."""
        return grid["zeros"][..., None].float() if "zeros" in grid else self.zero_point

    def _has_odd_groups(self, matrix: PackedMatrix) -> bool:
        """Return whether rows of zero points end within a byte, which the blocked form does not support."""
        return self.bits == 4 and matrix.has("zeros") and matrix.tensor("scales").shape[1] % 2 == 1

    def _emit_blockwise(self, matrix: PackedMatrix, x: Tensor, bias: Tensor | None) -> Tensor:
        from smelt.runtime.layers.emit import NBitsLayout
        from smelt.runtime.layers.emit_blockwise import blockwise_linear

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
    from smelt.runtime.schemes.common.packing import unpack_base_n_float

    return packed.float() if bits == 8 else unpack_base_n_float(packed, 2**bits, 8 // bits)
