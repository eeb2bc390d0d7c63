"""Scheme binary: the sign of each weight and one scale for each group of a row's weights.

value = scale if the bit is 1, else -scale. Stored as one bit per weight (bit i of byte j belongs to the
weight 8 j + i of its group) and float16 scales, so that groups of 64 take 1.25 bits per weight. They are
exported to MatMulNBits with 2-bit codes (1 is -1, 3 is +1, the zero point is 2), or 4-bit ones where
activations stay float32 (`smelt/quantization/affine_groupwise.py`); the graph stores the bits, and ONNX
Runtime expands them once, when the session is opened.

For a group w of a row, the best values of the form alpha * sign are alpha = mean |w| and the signs of w
(Rastegari et al. 2016, XNOR-Net, arXiv:1603.05279, section 3.1, Binary-Weight-Networks); sign(0) is +1.
Training updates float weights, whose signs are used, with a straight-through gradient everywhere, as for the
weights of transformers in Liu et al. 2022, BiT, arXiv:2205.13016 (github.com/facebookresearch/bit,
transformer/utils_quant.py, BwnQuantizer). The clip at 1 of BinaryConnect (Courbariaux et al. 2015,
arXiv:1511.00363) belongs to weights that represent -1 and 1 themselves: here they are a hundredth of that.

Shapes: N = outputs (rows), K = inputs (columns), g = group size, G = ceil(K / g).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.quantization import affine_groupwise
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
from smelt.quantization.schemes.int8 import Int8Dynamic

if TYPE_CHECKING:
    from torch import Tensor

# tables by the bits of their output codes
_TABLES = {2: "TwoBitCodes", 4: "NibblesOfBits"}


class Binary(Scheme):
    """codes: uint8 [N, G, g / 8]; scales: float32 [N, G], each a float16."""

    name: ClassVar[str] = "binary"
    summary: ClassVar[str] = "one bit per weight and one scale per group of inputs"
    recommended_for: ClassVar[str] = "the smallest files"
    source: ClassVar[str] = "Rastegari et al. 2016, XNOR-Net, arXiv:1603.05279 (Binary-Weight-Networks)"
    option_specs: ClassVar[tuple[SchemeOption, ...]] = (parts.two_bit_group_size(name), parts.ACCURACY_LEVEL)
    supports_embeddings: ClassVar[bool] = False
    embedding_scheme: ClassVar[str] = Int8Dynamic.name
    requires_training: ClassVar[bool] = True
    learnable_scales: ClassVar[bool] = False
    represents_zero: ClassVar[bool] = False
    unsupported_targets: ClassVar[Mapping[str, str]] = parts.NBITS_UNSUPPORTED_TARGETS
    exported_as: ClassVar[str] = f"{name} weights (MatMulNBits)"
    operators: ClassVar[Mapping[str, tuple[int, ...]]] = parts.MATMUL_NBITS
    # 0.006 was measured on a Marian; activations are rounded as in int4
    tolerance: ClassVar[float] = 0.04
    embedding_tolerance: ClassVar[float] = 0.04

    def group_size(self, width: int, options: SchemeOptions) -> int:
        """Return g."""
        return parts.group_size(options)

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

    def linear(self, matrix: PackedMatrix, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply by the values; activations are float32, or int8 per block (accuracy level 4)."""
        return parts.groupwise_linear(matrix, x, bias)

    def quantizes_activations(self, options: SchemeOptions) -> bool:
        """Return whether the accuracy level is 4."""
        return parts.quantizes_activation_blocks(options)

    def export_constants(self, matrix: PackedMatrix, use: MatrixUse) -> dict[str, Tensor]:
        """Return the scales in 16 bits."""
        return parts.groupwise_constants(matrix)

    def emit_linear(self, matrix: PackedMatrix, x: Tensor, bias: Tensor | None, target: str) -> Tensor:
        """Emit MatMulNBits, whose codes are expanded from the stored ones when the graph is loaded."""
        from smelt.quantization import emit

        bits = affine_groupwise.variant_bits(matrix, _default_bits(matrix.options))
        spread = min(bits, 4)
        codes = emit.expand_by_table(_TABLES[spread], matrix.tensor("codes"), spread)
        return parts.emit_matmul_nbits(
            matrix, x, bias, bits, affine_groupwise.emit_int4_to_int8(codes) if bits == 8 else codes
        )

    def operator_variants(self, options: SchemeOptions) -> tuple[str, ...]:
        """Return the operators of as many bits and more."""
        return affine_groupwise.nbits_variants(_default_bits(options), options)

    def variant_node(self, matrix: PackedMatrix, x: str, y: str) -> tuple[Any, dict[str, Tensor]]:
        """Return MatMulNBits with the bits of the selected variant."""
        return affine_groupwise.nbits_variant_node(matrix, _default_bits(matrix.options), x, y)

    def float_activation_nodes(self, node: Any) -> list[Any]:
        """Return the same operator at accuracy level 0."""
        return parts.nbits_float_activation_nodes(node)

    def unpacking_tables(self) -> dict[str, Any]:
        """Return for each byte of eight bits its eight codes, in two bytes of 2-bit or four of 4-bit ones.

        Bit 0 is -1 and bit 1 is +1, relative to the middle: codes 1 and 3, or 7 and 9.
        """
        import numpy as np

        signs = np.arange(256, dtype=np.uint8)[:, None] >> np.arange(8, dtype=np.uint8) & 1
        codes = np.where(signs == 1, 3, 1).astype(np.uint8).reshape(256, 2, 4)
        shifted = codes << np.array([0, 2, 4, 6], dtype=np.uint8)
        pairs = [affine_groupwise.INT4_ZERO_POINT - 1, affine_groupwise.INT4_ZERO_POINT + 1]
        return {
            _TABLES[2]: np.bitwise_or.reduce(shifted, axis=2),
            _TABLES[4]: affine_groupwise.int4_expansion_table(pairs),
        }


def _default_bits(options: SchemeOptions) -> int:
    """Return the bits of the exported codes unless another variant is selected."""
    return 2 if parts.quantizes_activation_blocks(options) else 4
