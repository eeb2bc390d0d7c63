"""Schemes binary and ternary: weights of one sign bit, or -1, 0 or 1, and a scale for each group or row.

Binary: value = scale if the bit is 1, else -scale. Stored as one bit per weight (bit i of byte j belongs to
the weight 8 j + i of its group) and float16 scales, so that groups of 64 take 1.25 bits per weight. They are
exported to MatMulNBits with 2-bit codes (1 is -1, 3 is +1, the zero point is 2), or 4-bit ones where
activations stay float32 (`smelt/quantization/schemes/affine.py`); the graph stores the bits, and ONNX Runtime
expands them once, when the session is opened.

For a group w of a row, the best values of the form alpha * sign are alpha = mean |w| and the signs of w
(Rastegari et al. 2016, XNOR-Net, arXiv:1603.05279, section 3.1, Binary-Weight-Networks); sign(0) is +1.
Training updates float weights, whose signs are used, with a straight-through gradient everywhere, as for the
weights of transformers in Liu et al. 2022, BiT, arXiv:2205.13016 (github.com/facebookresearch/bit,
transformer/utils_quant.py, BwnQuantizer). The clip at 1 of BinaryConnect (Courbariaux et al. 2015,
arXiv:1511.00363) belongs to weights that represent -1 and 1 themselves: here they are a hundredth of that.

Ternary: Li et al. 2016, Ternary Weight Networks, arXiv:1605.04711, equations 5 and 6: weights beyond the
threshold 0.7 mean |w| become the scale with their sign, all others 0, and the scale is the mean magnitude of
the weights beyond it. Where only the scale is known (codes that are read back), the nearest value is taken.

A file stores five codes per byte, as digits of base 3 (3^5 = 243): 1.875 bits per weight in groups of 64,
1.75 in groups of 128. They are exported to 2-bit MatMulNBits with the zero point 1, to which a table expands
them when the graph is loaded.

Shapes: N = outputs (rows), K = inputs (columns), g = inputs that share a scale, G = ceil(K / g),
b = block of the operator, the option group_size; g = b, or with one scale per row all inputs, padded to a
multiple of b.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from smelt.quantization import groupwise as parts
from smelt.quantization.scheme import (
    PackedMatrix,
    QuantParams,
    SchemeOption,
    SchemeOptions,
    StoredTensor,
    UnpackedWeights,
)
from smelt.quantization.schemes import affine
from smelt.quantization.schemes.int8 import GRANULARITY_DESCRIPTION, Int8Dynamic

if TYPE_CHECKING:
    from torch import Tensor


# tables by the bits of their output codes
_BIT_TABLES = {2: "TwoBitCodes", 4: "NibblesOfBits"}


class _TwoBitScheme(parts.GroupwiseScheme):
    """A scheme that is exported to 2-bit codes, or wider ones."""

    def operator_variants(self, options: SchemeOptions) -> tuple[str, ...]:
        """Return the operators of as many bits and more."""
        return affine.nbits_variants(_default_bits(options), options)

    def variant_node(self, matrix: PackedMatrix, x: str, y: str) -> tuple[Any, dict[str, Tensor]]:
        """Return MatMulNBits with the bits of the selected variant."""
        return affine.nbits_variant_node(matrix, _default_bits(matrix.options), x, y)


class Binary(_TwoBitScheme):
    """codes: uint8 [N, G, g / 8]; scales: float32 [N, G], each a float16."""

    name: ClassVar[str] = "binary"
    summary: ClassVar[str] = "one bit per weight and one scale per group of inputs"
    recommended_for: ClassVar[str] = "the smallest files"
    source: ClassVar[str] = "Rastegari et al. 2016, XNOR-Net, arXiv:1603.05279 (Binary-Weight-Networks)"
    option_specs: ClassVar[tuple[SchemeOption, ...]] = (
        parts.two_bit_group_size(name),
        parts.ACCURACY_LEVEL,
        parts.ACTIVATION_BITS,
    )
    embedding_scheme: ClassVar[str] = Int8Dynamic.name
    requires_training: ClassVar[bool] = True
    learnable_scales: ClassVar[bool] = False
    represents_zero: ClassVar[bool] = False
    exported_as: ClassVar[str] = f"{name} weights (MatMulNBits)"
    # 0.006 was measured on a Marian; activations are rounded as in int4
    tolerance: ClassVar[float] = 0.04
    embedding_tolerance: ClassVar[float] = 0.04

    def compute_qparams(self, groups: Tensor, width: int, options: SchemeOptions) -> QuantParams:
        """Return the mean magnitudes, each a float16, without the padding of the last group."""
        counts = groups.new_full((groups.shape[1],), float(groups.shape[2]))
        counts[-1] -= groups.shape[1] * groups.shape[2] - width
        return {"scales": (groups.abs().sum(dim=-1) / counts).half().float()}

    def quantize(self, groups: Tensor, grid: QuantParams, options: SchemeOptions) -> Tensor:
        """Return the signs, bool, true for +1."""
        return groups >= 0

    def dequantize(self, codes: Tensor, grid: QuantParams, options: SchemeOptions) -> Tensor:
        """Return scale or -scale."""
        scales = grid["scales"][..., None]
        return scales.where(codes, -scales)

    def stored_tensors(self, rows: int, width: int, options: SchemeOptions) -> dict[str, StoredTensor]:
        """Return the specs of eight signs per byte, and scales."""
        size = self.group_size(width, options)
        count = parts.num_groups(width, size)
        return {
            "codes": StoredTensor((rows, count, size // 8), "uint8"),
            "scales": StoredTensor((rows, count), "float32", file_dtype="float16"),
        }

    def pack(self, decided: UnpackedWeights, options: SchemeOptions) -> dict[str, Tensor]:
        """Return the packed bits."""
        return {
            "codes": parts.pack_bits(decided.q_weight),
            "scales": decided.qparams["scales"].half().float(),
        }

    def unpack(self, matrix: PackedMatrix) -> UnpackedWeights:
        """Return the signs as bool."""
        return UnpackedWeights(parts.unpack_bits(matrix.tensor("codes")), {"scales": matrix.tensor("scales")})

    def lookup(self, matrix: PackedMatrix, ids: Tensor) -> Tensor:
        """Return some rows, with operators that can be exported; a row of zeros stays zero."""
        size = self.group_size(matrix.width, matrix.options)
        return parts.lookup_digits(matrix, ids, size, base=2, digits=8, values=(2.0, -1.0))

    def emit_linear(self, matrix: PackedMatrix, x: Tensor, bias: Tensor | None, target: str) -> Tensor:
        """Emit MatMulNBits, whose codes are expanded from the stored ones when the graph is loaded."""
        from smelt.quantization import emit

        bits = affine.variant_bits(matrix, _default_bits(matrix.options))
        expanded_bits = min(bits, 4)
        q_weight = emit.expand_by_table(_BIT_TABLES[expanded_bits], matrix.tensor("codes"), expanded_bits)
        return parts.emit_matmul_nbits(
            matrix, x, bias, bits, affine.emit_int4_to_int8(q_weight) if bits == 8 else q_weight
        )

    def unpacking_tables(self) -> dict[str, Any]:
        """Return for each byte of eight bits its eight codes, in two bytes of 2-bit or four of 4-bit ones.

        Bit 0 is -1 and bit 1 is +1, relative to the middle: codes 1 and 3, or 7 and 9.
        """
        import numpy as np

        signs = np.arange(256, dtype=np.uint8)[:, None] >> np.arange(8, dtype=np.uint8) & 1
        two_bit = np.where(signs == 1, 3, 1).astype(np.uint8).reshape(256, 2, 4)
        shifted = two_bit << np.array([0, 2, 4, 6], dtype=np.uint8)
        values = [affine.INT4_ZERO_POINT - 1, affine.INT4_ZERO_POINT + 1]
        return {
            _BIT_TABLES[2]: np.bitwise_or.reduce(shifted, axis=2),
            _BIT_TABLES[4]: affine.int4_expansion_table(values),
        }


THRESHOLD = 0.7
_DIGITS = 5
# tables by the bits of their output codes
_TABLES = {2: "TwoBitsOfDigits", 4: "NibblesOfDigits", 8: "BytesOfDigits"}
_CHANNEL = "channel"
TERNARY_GRANULARITY = SchemeOption(
    "granularity", "group", ("group", _CHANNEL), GRANULARITY_DESCRIPTION, own_only=True
)


class Ternary(_TwoBitScheme):
    """codes: uint8 [N, G, ceil(g / 5)]; scales: float32 [N, G], each a float16."""

    name: ClassVar[str] = "ternary"
    summary: ClassVar[str] = "weights of -1, 0 and 1 and one scale per group of inputs or per row"
    recommended_for: ClassVar[str] = "small files"
    source: ClassVar[str] = "Li et al. 2016, Ternary Weight Networks, arXiv:1605.04711"
    option_specs: ClassVar[tuple[SchemeOption, ...]] = (
        parts.two_bit_group_size(name),
        TERNARY_GRANULARITY,
        parts.ACCURACY_LEVEL,
        parts.ACTIVATION_BITS,
    )
    embedding_scheme: ClassVar[str] = affine.Int4.name
    requires_training: ClassVar[bool] = True
    split_scheme: ClassVar[str] = Binary.name
    exported_as: ClassVar[str] = f"{name} weights (MatMulNBits)"
    tolerance: ClassVar[float] = 0.04
    embedding_tolerance: ClassVar[float] = 0.04

    def group_size(self, width: int, options: SchemeOptions) -> int:
        """Return g."""
        block = parts.group_size(options)
        by_row = options[TERNARY_GRANULARITY.name] == _CHANNEL
        return parts.num_groups(width, block) * block if by_row else block

    def compute_qparams(self, groups: Tensor, width: int, options: SchemeOptions) -> QuantParams:
        """Return scales, each a float16, and the thresholds, without the padding of the last group."""
        counts = groups.new_full((groups.shape[1],), float(groups.shape[2]))
        counts[-1] -= groups.shape[1] * groups.shape[2] - width
        sizes = groups.abs()
        thresholds = THRESHOLD * sizes.sum(dim=-1) / counts
        is_nonzero = sizes > thresholds[..., None]
        sums = (sizes * is_nonzero).sum(dim=-1)
        return {
            "scales": (sums / is_nonzero.sum(dim=-1).clamp_(min=1)).half().float(),
            "thresholds": thresholds,
        }

    def quantize(self, groups: Tensor, grid: QuantParams, options: SchemeOptions) -> Tensor:
        """Return the signs of the weights beyond the threshold, plus 1, uint8."""
        limits = grid["thresholds"] if "thresholds" in grid else grid["scales"] / 2
        return (1 + groups.sign() * (groups.abs() > limits[..., None])).byte()

    def dequantize(self, codes: Tensor, grid: QuantParams, options: SchemeOptions) -> Tensor:
        """Return -scale, 0 or scale."""
        return (codes.float() - 1) * grid["scales"][..., None]

    def code_range(
        self, grid: QuantParams, options: SchemeOptions
    ) -> tuple[Tensor | float, Tensor | float] | None:
        """Return -1 and 1."""
        return -1.0, 1.0

    def stored_tensors(self, rows: int, width: int, options: SchemeOptions) -> dict[str, StoredTensor]:
        """Return the specs of five codes per byte, and scales."""
        size = self.group_size(width, options)
        count = parts.num_groups(width, size)
        return {
            "codes": StoredTensor((rows, count, -(-size // _DIGITS)), "uint8"),
            "scales": StoredTensor((rows, count), "float32", file_dtype="float16"),
        }

    def pack(self, decided: UnpackedWeights, options: SchemeOptions) -> dict[str, Tensor]:
        """Return digits of base 3, the first the lowest."""
        return {
            "codes": parts.pack_base_n(decided.q_weight, 3, _DIGITS),
            "scales": decided.qparams["scales"].half().float(),
        }

    def unpack(self, matrix: PackedMatrix) -> UnpackedWeights:
        """Return the codes as uint8."""
        size = self.group_size(matrix.width, matrix.options)
        q_weight = parts.unpack_base_n_float(matrix.tensor("codes"), 3, _DIGITS)[..., :size].byte()
        return UnpackedWeights(q_weight, {"scales": matrix.tensor("scales")})

    def lookup(self, matrix: PackedMatrix, ids: Tensor) -> Tensor:
        """Return some rows, with operators that can be exported; a row of zeros stays zero."""
        size = self.group_size(matrix.width, matrix.options)
        return parts.lookup_digits(matrix, ids, size, base=3, digits=_DIGITS, values=(1.0, -1.0))

    def emit_linear(self, matrix: PackedMatrix, x: Tensor, bias: Tensor | None, target: str) -> Tensor:
        """Emit MatMulNBits, of 4 bits where activations stay float32; the codes are expanded at loading."""
        from smelt.quantization import emit

        out_features, count, _ = matrix.tensor("codes").shape
        size, block = self.group_size(matrix.width, matrix.options), parts.group_size(matrix.options)
        bits = affine.variant_bits(matrix, _default_bits(matrix.options))
        single = emit.expand_by_table(_TABLES[bits], matrix.tensor("codes"), _DIGITS)[..., :size]
        q_weight = single.reshape(out_features, -1, block)
        q_weight = q_weight if bits == 8 else emit.pack_at_load(q_weight, bits)
        scales = emit.widen_scales(matrix.tensor(parts.FLOAT16_SCALES))
        scales = scales.expand(out_features, q_weight.shape[1]) if count == 1 else scales
        return parts.emit_matmul_nbits(matrix, x, bias, bits, q_weight, scales=scales)

    def unpacking_tables(self) -> dict[str, Any]:
        """Return the five digits of each byte, uint8 [256, 5], with zero in the middle of 2, 4 or 8 bits."""
        import numpy as np

        digits = np.arange(256)[:, None] // 3 ** np.arange(_DIGITS) % 3
        return {
            table_name: (digits - 1 + 2 ** (bits - 1)).astype(np.uint8)
            for bits, table_name in _TABLES.items()
        }


def _default_bits(options: SchemeOptions) -> int:
    """Return the bits of the exported codes unless another variant is selected."""
    return 2 if parts.quantizes_activation_blocks(options) else 4
