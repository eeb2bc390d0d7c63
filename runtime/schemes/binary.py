"""Scheme binary: a sign for each weight and one scale for each group of a row's weights.

value = scale if the bit is 1, else -scale. Stored as one bit a weight (bit i of byte j belongs to the weight
8 j + i of its group) and float16 scales, so that groups of 64 take 1.25 bits a weight. They leave as
MatMulNBits with 2-bit codes (1 is -1, 3 is +1, the zero point is 2), or 4-bit ones where activations stay
float32 (parts/forms.py); the graph holds the bits, and ONNX Runtime widens them once, when the session is
opened.

For a group w of a row, the best values of the form alpha * sign are alpha = mean |w| and the signs of w
(Rastegari et al. 2016, XNOR-Net, arXiv:1603.05279, section 3.1, Binary-Weight-Networks); sign(0) is +1.
Training moves float weights behind the signs and looks through them everywhere, as for the weights of
transformers in Liu et al. 2022, BiT, arXiv:2205.13016 (github.com/facebookresearch/bit,
transformer/utils_quant.py, BwnQuantizer). The clip at 1 of BinaryConnect (Courbariaux et al. 2015,
arXiv:1511.00363) belongs to weights that stand for -1 and 1 themselves: here they are a hundredth of that.

Shapes: N = outputs (rows), K = inputs (columns), g = group size, G = ceil(K / g).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.runtime.schemes.int8_dynamic import Int8Dynamic
from smelt.runtime.schemes.parts import forms, nibbles
from smelt.runtime.schemes.parts import groups as parts
from smelt.runtime.schemes.scheme import Coded, Codes, Grid, Option, Options, Scheme, Stored, Use

if TYPE_CHECKING:
    from torch import Tensor

# tables by the bits of the codes that they give
_TABLES = {2: "TwoBitCodes", 4: "NibblesOfBits"}


class Binary(Scheme):
    """codes: uint8 [N, G, g / 8]; scales: float32 [N, G], each a float16."""

    name: ClassVar[str] = "binary"
    summary: ClassVar[str] = "one bit a weight and one scale per group of inputs"
    pays: ClassVar[str] = "the smallest files"
    source: ClassVar[str] = "Rastegari et al. 2016, XNOR-Net, arXiv:1603.05279 (Binary-Weight-Networks)"
    settings: ClassVar[tuple[Option, ...]] = (parts.two_bit_group_size(name), parts.ACCURACY_LEVEL)
    tables: ClassVar[bool] = False
    vocabulary: ClassVar[str] = Int8Dynamic.name
    trained: ClassVar[bool] = True
    learns: ClassVar[bool] = False
    zero: ClassVar[bool] = False
    binary_inputs: ClassVar[bool] = True
    refused: ClassVar[Mapping[str, str]] = parts.REFUSED
    leaves_as: ClassVar[str] = f"{name} codes (MatMulNBits)"
    operators: ClassVar[Mapping[str, tuple[int, ...]]] = parts.OPERATORS
    # 0.006 was measured on a Marian; the rounding of activations is int4's
    drift: ClassVar[float] = 0.04
    vector_drift: ClassVar[float] = 0.04

    def group(self, width: int, options: Options) -> int:
        """Return g."""
        return parts.group_size(options)

    def fit(self, groups: Tensor, width: int, options: Options) -> Grid:
        """Return the mean magnitudes, each a float16; what fills up the last group is no weight."""
        counts = groups.new_full((groups.shape[1],), float(groups.shape[2]))
        counts[-1] -= groups.shape[1] * groups.shape[2] - width
        return {"scales": (groups.abs().sum(dim=-1) / counts).half().float()}

    def nearest(self, groups: Tensor, grid: Grid, options: Options) -> Tensor:
        """Return the signs, bool, true for +1."""
        return groups >= 0

    def values(self, codes: Tensor, grid: Grid, options: Options) -> Tensor:
        """Return scale or -scale."""
        scales = grid["scales"][..., None]
        return scales.where(codes, -scales)

    def storage(self, rows: int, width: int, options: Options) -> dict[str, Stored]:
        """Return eight signs in a byte, and scales."""
        size = self.group(width, options)
        count = parts.group_count(width, size)
        return {
            "codes": Stored((rows, count, size // 8), "uint8", packs=8),
            "scales": Stored((rows, count), "float32", filed="float16"),
        }

    def pack(self, decided: Codes, options: Options) -> dict[str, Tensor]:
        """Return bits."""
        from smelt.runtime.schemes.parts.packing import pack_bits

        return {"codes": pack_bits(decided.codes), "scales": decided.grid["scales"].half().float()}

    def unpack(self, matrix: Coded) -> Codes:
        """Return the signs as bool."""
        from smelt.runtime.schemes.parts.packing import unpack_bits

        return Codes(unpack_bits(matrix.tensor("codes")), {"scales": matrix.tensor("scales")})

    def product(self, matrix: Coded, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply by the values; activations are float32, or int8 per block (accuracy level 4)."""
        return parts.product(matrix, x, bias)

    def rounds_activations(self, options: Options) -> bool:
        """Say whether the accuracy level is 4."""
        return parts.rounds_activations(options)

    def graph_tensors(self, matrix: Coded, use: Use) -> dict[str, Tensor]:
        """Return the scales in 16 bits."""
        return parts.graph_tensors(matrix)

    def emit_product(self, matrix: Coded, x: Tensor, bias: Tensor | None, target: str) -> Tensor:
        """Emit MatMulNBits, whose codes are made of the stored ones when the graph is loaded."""
        from smelt.runtime.layers import emit

        bits = forms.bits_of(matrix, _own_bits(matrix.options))
        spread = min(bits, 4)
        codes = emit.spread(_TABLES[spread], matrix.tensor("codes"), spread)
        return parts.emit_product(matrix, x, bias, bits, forms.as_bytes(codes) if bits == 8 else codes)

    def forms(self, options: Options) -> tuple[str, ...]:
        """Return the operators of as many bits and more."""
        return forms.forms_of(_own_bits(options), options)

    def form_node(self, matrix: Coded, x: str, y: str) -> tuple[Any, dict[str, Tensor]]:
        """Return MatMulNBits of the form's bits."""
        return forms.node(matrix, _own_bits(matrix.options), x, y)

    def exact_nodes(self, node: Any) -> list[Any]:
        """Return the same operator at accuracy level 0."""
        return parts.exact_nodes(node)

    def load_tables(self) -> dict[str, Any]:
        """Return for each byte of eight bits its eight codes, in two bytes of 2-bit or four of 4-bit ones.

        A bit that is 0 is -1 and one that is 1 is +1, beside the middle: codes 1 and 3, or 7 and 9.
        """
        import numpy as np

        signs = np.arange(256, dtype=np.uint8)[:, None] >> np.arange(8, dtype=np.uint8) & 1
        codes = np.where(signs == 1, 3, 1).astype(np.uint8).reshape(256, 2, 4)
        shifted = codes << np.array([0, 2, 4, 6], dtype=np.uint8)
        pairs = [nibbles.MIDDLE - 1, nibbles.MIDDLE + 1]
        return {_TABLES[2]: np.bitwise_or.reduce(shifted, axis=2), _TABLES[4]: nibbles.table(pairs)}


def _own_bits(options: Options) -> int:
    """Return in how many bits codes leave unless another form is chosen."""
    return 2 if parts.rounds_activations(options) else 4
