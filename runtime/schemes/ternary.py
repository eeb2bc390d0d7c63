"""Scheme ternary: -1, 0 or 1 for each weight, and one scale for each group of a row's weights or each row.

Li et al. 2016, Ternary Weight Networks, arXiv:1605.04711, equations 5 and 6: what lies beyond the threshold
0.7 mean |w| becomes the scale with its sign, everything else 0, and the scale is the mean magnitude of what
lies beyond it. Where a grid is all that is known (codes that are read back), the nearest value is taken.

A file holds five codes in a byte, as digits of base 3 (3^5 = 243): 1.875 bits a weight in groups of 64, 1.75
in groups of 128. They leave as 2-bit MatMulNBits with the zero point 1, into which a table spreads them when
the graph is loaded.

Shapes: N = outputs (rows), K = inputs (columns), g = inputs that share a scale, G = ceil(K / g),
b = block of the operator, the option group_size; g = b, or with one scale a row all inputs, filled up to a
multiple of b.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.runtime.schemes.binary import Binary
from smelt.runtime.schemes.int4 import Int4
from smelt.runtime.schemes.parts import forms
from smelt.runtime.schemes.parts import groups as parts
from smelt.runtime.schemes.parts.rows import SHARED
from smelt.runtime.schemes.scheme import Coded, Codes, Grid, Option, Options, Scheme, Stored, Use

if TYPE_CHECKING:
    from torch import Tensor

THRESHOLD = 0.7
_DIGITS = 5
# tables by the bits of the codes that they give
_TABLES = {2: "TwoBitsOfDigits", 4: "NibblesOfDigits", 8: "BytesOfDigits"}
_CHANNEL = "channel"
GRANULARITY = Option("granularity", "group", ("group", _CHANNEL), SHARED)


class Ternary(Scheme):
    """codes: uint8 [N, G, ceil(g / 5)]; scales: float32 [N, G], each a float16."""

    name: ClassVar[str] = "ternary"
    summary: ClassVar[str] = "weights of -1, 0 and 1 and one scale per group of inputs or per row"
    pays: ClassVar[str] = "small files"
    source: ClassVar[str] = "Li et al. 2016, Ternary Weight Networks, arXiv:1605.04711"
    settings: ClassVar[tuple[Option, ...]] = (
        parts.two_bit_group_size(name),
        GRANULARITY,
        parts.ACCURACY_LEVEL,
    )
    vocabulary: ClassVar[str] = Int4.name
    trained: ClassVar[bool] = True
    halves: ClassVar[str] = Binary.name
    refused: ClassVar[Mapping[str, str]] = parts.REFUSED
    leaves_as: ClassVar[str] = f"{name} codes (MatMulNBits)"
    operators: ClassVar[Mapping[str, tuple[int, ...]]] = parts.OPERATORS
    drift: ClassVar[float] = 0.04
    vector_drift: ClassVar[float] = 0.04

    def group(self, width: int, options: Options) -> int:
        """Return g."""
        block = parts.group_size(options)
        by_row = options[GRANULARITY.name] == _CHANNEL
        return parts.group_count(width, block) * block if by_row else block

    def fit(self, groups: Tensor, width: int, options: Options) -> Grid:
        """Return scales, each a float16, and the thresholds; what fills up the last group is no weight."""
        counts = groups.new_full((groups.shape[1],), float(groups.shape[2]))
        counts[-1] -= groups.shape[1] * groups.shape[2] - width
        sizes = groups.abs()
        thresholds = THRESHOLD * sizes.sum(dim=-1) / counts
        beyond = sizes > thresholds[..., None]
        sums = (sizes * beyond).sum(dim=-1)
        return {
            "scales": (sums / beyond.sum(dim=-1).clamp_(min=1)).half().float(),
            "thresholds": thresholds,
        }

    def nearest(self, groups: Tensor, grid: Grid, options: Options) -> Tensor:
        """Return the signs of what lies beyond the threshold, plus 1, uint8."""
        limits = grid["thresholds"] if "thresholds" in grid else grid["scales"] / 2
        return (1 + groups.sign() * (groups.abs() > limits[..., None])).byte()

    def values(self, codes: Tensor, grid: Grid, options: Options) -> Tensor:
        """Return -scale, 0 or scale."""
        return (codes.float() - 1) * grid["scales"][..., None]

    def ends(self, grid: Grid, options: Options) -> tuple[Tensor | float, Tensor | float] | None:
        """Return -1 and 1."""
        return -1.0, 1.0

    def storage(self, rows: int, width: int, options: Options) -> dict[str, Stored]:
        """Return five codes in a byte, and scales."""
        size = self.group(width, options)
        count = parts.group_count(width, size)
        return {
            "codes": Stored((rows, count, -(-size // _DIGITS)), "uint8", packs=_DIGITS),
            "scales": Stored((rows, count), "float32", filed="float16"),
        }

    def pack(self, decided: Codes, options: Options) -> dict[str, Tensor]:
        """Return digits of base 3, the first the lowest."""
        from smelt.runtime.schemes.parts.packing import pack_digits

        return {
            "codes": pack_digits(decided.codes, 3, _DIGITS),
            "scales": decided.grid["scales"].half().float(),
        }

    def unpack(self, matrix: Coded) -> Codes:
        """Return the codes as uint8."""
        from smelt.runtime.schemes.parts.packing import digits_as_floats

        size = self.group(matrix.width, matrix.options)
        codes = digits_as_floats(matrix.tensor("codes"), 3, _DIGITS)[..., :size].byte()
        return Codes(codes, {"scales": matrix.tensor("scales")})

    def product(self, matrix: Coded, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply by the values; activations are float32, or int8 per block (accuracy level 4)."""
        return parts.product(matrix, x, bias)

    def lookup(self, matrix: Coded, ids: Tensor) -> Tensor:
        """Return some rows, by operators that also leave as a graph; a row of zeros stays one."""
        from smelt.runtime.schemes.parts.packing import digits_as_floats

        flat, size = ids.flatten(), self.group(matrix.width, matrix.options)
        codes = digits_as_floats(matrix.tensor("codes").index_select(0, flat), 3, _DIGITS)[..., :size]
        stored = matrix.tensor(parts.HALF_SCALES if matrix.has(parts.HALF_SCALES) else "scales")
        scales = stored.index_select(0, flat).float()[..., None]
        rows = ((codes - 1.0) * scales).flatten(1)[:, : matrix.width]
        return rows.reshape(*ids.shape, matrix.width)

    def rounds_activations(self, options: Options) -> bool:
        """Say whether the accuracy level is 4."""
        return parts.rounds_activations(options)

    def graph_tensors(self, matrix: Coded, use: Use) -> dict[str, Tensor]:
        """Return the scales in 16 bits."""
        return parts.graph_tensors(matrix)

    def emit_product(self, matrix: Coded, x: Tensor, bias: Tensor | None, target: str) -> Tensor:
        """Emit MatMulNBits, of 4 bits where activations stay float32; loading makes the codes."""
        from smelt.runtime.layers import emit

        rows, count, _ = matrix.tensor("codes").shape
        size, block = self.group(matrix.width, matrix.options), parts.group_size(matrix.options)
        bits = forms.bits_of(matrix, _own_bits(matrix.options))
        single = emit.spread(_TABLES[bits], matrix.tensor("codes"), _DIGITS)[..., :size]
        codes = single.reshape(rows, -1, block)
        codes = codes if bits == 8 else emit.joined_codes(codes, bits)
        scales = emit.float_scales(matrix.tensor(parts.HALF_SCALES))
        scales = scales.expand(rows, codes.shape[1]) if count == 1 else scales
        return parts.emit_product(matrix, x, bias, bits, codes, scales=scales)

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
        """Return the five digits of each byte, uint8 [256, 5], with zero in the middle of 2, 4 or 8 bits."""
        import numpy as np

        digits = np.arange(256)[:, None] // 3 ** np.arange(_DIGITS) % 3
        return {word: (digits - 1 + 2 ** (bits - 1)).astype(np.uint8) for bits, word in _TABLES.items()}


def _own_bits(options: Options) -> int:
    """Return in how many bits codes leave unless another form is chosen."""
    return 2 if parts.rounds_activations(options) else 4
