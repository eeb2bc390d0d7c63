"""What schemes of whole-number codes in groups share: a scale, perhaps a zero point, MatMulNBits.

value = (code - zero) * scale, code and zero between 0 and 2^b - 1; zero is 2^(b - 1) in symmetric matrices,
which store none. Codes of 2, 4 and 8 bits are stored as ONNX Runtime's MatMulNBits reads them; of 3 bits the
two low ones so, and the high ones beside them, eight in a byte. Scales are float16: what rounding them costs
is far below the codes' own error.

Symmetric: the value of largest magnitude in a group becomes code 0 (that is -2^(b - 1)), so that all codes
are used; the zero point is the same everywhere. A value of the other sign that is as large would be
+2^(b - 1) and is cut by a step at most; all others are half a step off at most. Positive: the scale is
the largest magnitude by 2^(b - 1) whatever its sign, and 1 for zeros. Asymmetric: smallest and
largest value become 0 and 2^b - 1, and zero itself stays exact. Both as ONNX Runtime's own quantizer does
(onnxruntime/core/mlas/lib/q4_dq.cpp, range2scale and range2scalezp); scales are rounded to float16 before
codes are chosen. In training the range follows the weights, so that at most a step is cut off.

Shapes: N = outputs (rows), K = inputs (columns), g = group size, G = ceil(K / g), b = bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.runtime.schemes.parts import forms
from smelt.runtime.schemes.parts import groups as parts
from smelt.runtime.schemes.parts.nibbles import MIDDLE, shifted_zeros
from smelt.runtime.schemes.scheme import Coded, Codes, Grid, Option, Options, Scheme, Stored, Use

if TYPE_CHECKING:
    from torch import Tensor

POSITIVE = "positive"
SYMMETRIC = Option(
    "symmetric",
    True,
    (True, False),
    "false: with zero points; positive: no negative scales, for TensorRT",
)

# of a code its parts that are packed alone: the name of the tensor, how many bits, the place of the lowest
_PLANES = {
    2: (("codes", 2, 0),),
    3: (("codes", 2, 0), ("highs", 1, 2)),
    4: (("codes", 4, 0),),
    8: (("codes", 8, 0),),
}
# names of zero points that are not as they are stored, by the bits of the operator
_WIDE_ZEROS = {4: "wide_zeros", 8: "byte_zeros"}
_FLAT_ZEROS = "flat_zeros"
_BLOCKED = "openvino"


class AffineGroups(Scheme):
    """codes: uint8 [N, G, g b / 8]; scales: float32 [N, G], each a float16; zeros: uint8 [N, ceil(G b / 8)].

    Of 3 bits codes: uint8 [N, G, g / 4]; highs: uint8 [N, G, g / 8]; zeros: uint8 [N, ceil(G / 2)].

    bits: b, 2, 3, 4 or 8.
    """

    bits: ClassVar[int]
    source: ClassVar[str] = "ONNX Runtime, com.microsoft::MatMulNBits and its quantizer (mlas/lib/q4_dq.cpp)"
    settings: ClassVar[tuple[Option, ...]] = (parts.GROUP_SIZE, SYMMETRIC, parts.ACCURACY_LEVEL)
    refused: ClassVar[Mapping[str, str]] = parts.REFUSED
    operators: ClassVar[Mapping[str, tuple[int, ...]]] = parts.OPERATORS

    @property
    def most(self) -> int:
        """The largest code."""
        return int(2**self.bits) - 1

    @property
    def middle(self) -> int:
        """The zero point of symmetric matrices."""
        return int(2 ** (self.bits - 1))

    def group(self, width: int, options: Options) -> int:
        """Return g."""
        return parts.group_size(options)

    def fit(self, groups: Tensor, width: int, options: Options) -> Grid:
        """Return scales, each a float16, and zero points unless symmetric."""
        low, high = groups.amin(dim=-1).clamp_(max=0), groups.amax(dim=-1).clamp_(min=0)
        if options[SYMMETRIC.name] == POSITIVE:
            scales = (high.maximum(-low) / self.middle).half().float()
            return {"scales": scales.where(scales > 0, 1.0)}
        if options[SYMMETRIC.name]:
            return {"scales": (high.where(high > -low, low) / -self.middle).half().float()}
        scales = ((high - low) / self.most).half().float()
        return {
            "scales": scales,
            "zeros": (-low * parts.inverse(scales)).round_().clamp_(0, self.most).byte(),
        }

    def nearest(self, groups: Tensor, grid: Grid, options: Options) -> Tensor:
        """Return codes from 0 to the largest one, uint8."""
        steps = (groups * parts.inverse(grid["scales"])[..., None]).round_()
        return steps.add_(self._zeros(grid)).clamp_(0, self.most).byte()

    def values(self, codes: Tensor, grid: Grid, options: Options) -> Tensor:
        """Return (code - zero) * scale."""
        return (codes.float() - self._zeros(grid)) * grid["scales"][..., None]

    def ends(self, grid: Grid, options: Options) -> tuple[Tensor | float, Tensor | float] | None:
        """Return what is left of 0 and of the largest code without the zero point."""
        zeros = self._zeros(grid)
        return 0.0 - zeros, self.most - zeros

    def storage(self, rows: int, width: int, options: Options) -> dict[str, Stored]:
        """Return codes, as many in a byte as fit, scales, and zero points in bytes likewise."""
        size = self.group(width, options)
        count = parts.group_count(width, size)
        found = {
            name: Stored((rows, count, size * bits // 8), "uint8", packs=0 if low else 8 // bits)
            for name, bits, low in _PLANES[self.bits]
        }
        found["scales"] = Stored((rows, count), "float32", filed="float16")
        if not options[SYMMETRIC.name]:
            found["zeros"] = Stored((rows, -(-count * self._zero_bits // 8)), "uint8")
        return found

    def pack(self, decided: Codes, options: Options) -> dict[str, Tensor]:
        """Return what `storage` says."""
        from smelt.runtime.schemes.parts.packing import pack_codes

        grid = decided.grid
        found = {
            name: pack_codes(decided.codes >> low & 2**bits - 1, bits)
            for name, bits, low in _PLANES[self.bits]
        }
        found["scales"] = grid["scales"].half().float()
        return found | ({"zeros": pack_codes(grid["zeros"], self._zero_bits)} if "zeros" in grid else {})

    def unpack(self, matrix: Coded) -> Codes:
        """Return codes and zero points as uint8."""
        from smelt.runtime.schemes.parts.packing import unpack_codes

        (first, bits, _), *others = _PLANES[self.bits]
        codes, grid = unpack_codes(matrix.tensor(first), bits), {"scales": matrix.tensor("scales")}
        for name, bits, low in others:
            codes = codes | unpack_codes(matrix.tensor(name), bits) << low
        if matrix.has("zeros"):
            grid["zeros"] = unpack_codes(matrix.tensor("zeros"), self._zero_bits)[:, : codes.shape[1]]
        return Codes(codes, grid)

    def product(self, matrix: Coded, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply by the values; activations are float32, or int8 per block (accuracy level 4)."""
        return parts.product(matrix, x, bias)

    def lookup(self, matrix: Coded, ids: Tensor) -> Tensor:
        """Return some rows, by operators that also leave as a graph; a row of zeros stays one."""
        flat = ids.flatten()
        (first, bits, _), *others = _PLANES[self.bits]
        codes = _as_floats(matrix.tensor(first).index_select(0, flat), bits)
        for name, more, low in others:
            codes = codes + _as_floats(matrix.tensor(name).index_select(0, flat), more) * float(2**low)
        zeros: Tensor | float = float(self.middle)
        if matrix.has("zeros"):
            packed = matrix.tensor("zeros").index_select(0, flat)
            zeros = _as_floats(packed, self._zero_bits)[:, : codes.shape[1], None]
        stored = matrix.tensor(parts.HALF_SCALES if matrix.has(parts.HALF_SCALES) else "scales")
        scales = stored.index_select(0, flat).float()[..., None]
        rows = ((codes - zeros) * scales).flatten(1)[:, : matrix.width]
        return rows.reshape(*ids.shape, matrix.width)

    def rounds_activations(self, options: Options) -> bool:
        """Say whether the accuracy level is 4."""
        return parts.rounds_activations(options)

    def graph_tensors(self, matrix: Coded, use: Use) -> dict[str, Tensor]:
        """Return the scales in 16 bits, and the zero points of codes that are spread."""
        found = parts.graph_tensors(matrix)
        bits = forms.bits_of(matrix, self._own_bits(matrix.options))
        if use == "product" and matrix.has("zeros") and bits != self.bits:
            zeros = self.unpack(matrix).grid["zeros"]
            found[_WIDE_ZEROS[bits]] = (
                forms.byte_zeros(zeros, self.middle)
                if bits == 8
                else shifted_zeros(zeros, MIDDLE - self.middle)
            )
        if use == "product" and self._flat(matrix):
            from smelt.runtime.schemes.parts.packing import pack_codes

            found[_FLAT_ZEROS] = pack_codes(self.unpack(matrix).grid["zeros"].flatten(), self.bits)
        return found

    def emit_product(self, matrix: Coded, x: Tensor, bias: Tensor | None, target: str) -> Tensor:
        """Emit MatMulNBits, of more bits where codes are spread; for OpenVINO a MatMul of blocks."""
        if target == _BLOCKED:
            return self._blocked(matrix, x, bias)
        bits = forms.bits_of(matrix, self._own_bits(matrix.options))
        codes = matrix.tensor("codes") if bits == self.bits else self._wider(matrix, bits)
        name = "zeros" if bits == self.bits else _WIDE_ZEROS[bits]
        zeros = matrix.tensor(name) if matrix.has(name) else None
        return parts.emit_product(matrix, x, bias, bits, codes, zeros)

    def spreads(self, options: Options) -> bool:
        """Say whether codes become 4-bit ones when the graph is loaded."""
        return False

    def nibbles(self, matrix: Coded) -> Tensor:
        """Emit 4-bit codes."""
        return matrix.tensor("codes")

    def forms(self, options: Options) -> tuple[str, ...]:
        """Return the operators of as many bits and more."""
        return forms.forms_of(self._own_bits(options), options)

    def form_node(self, matrix: Coded, x: str, y: str) -> tuple[Any, dict[str, Tensor]]:
        """Return MatMulNBits of the form's bits."""
        return forms.node(matrix, self._own_bits(matrix.options), x, y)

    def load_tables(self) -> dict[str, Any]:
        """Return what makes 8-bit codes of 4-bit ones."""
        return forms.load_tables()

    def _own_bits(self, options: Options) -> int:
        """Return in how many bits codes leave unless another form is chosen."""
        return 4 if self.spreads(options) else self.bits

    def _wider(self, matrix: Coded, bits: int) -> Tensor:
        nibbles = self.nibbles(matrix)
        return forms.as_bytes(nibbles) if bits == 8 else nibbles

    def exact_nodes(self, node: Any) -> list[Any]:
        """Return the same operator at accuracy level 0."""
        return parts.exact_nodes(node)

    def _zeros(self, grid: Grid) -> Tensor | int:
        """Return the zero points as they broadcast over codes, [N, G, 1]."""
        return grid["zeros"][..., None].float() if "zeros" in grid else self.middle

    def _flat(self, matrix: Coded) -> bool:
        """Say whether rows of zero points end within a byte, which the blocked form does not have."""
        return self.bits == 4 and matrix.has("zeros") and matrix.tensor("scales").shape[1] % 2 == 1

    def _blocked(self, matrix: Coded, x: Tensor, bias: Tensor | None) -> Tensor:
        from smelt.runtime.layers.emit import Layout
        from smelt.runtime.layers.emit_blocks import blocked_product

        scales = matrix.tensor(parts.HALF_SCALES)
        layout = Layout(matrix.width, scales.shape[0], self.bits, parts.group_size(matrix.options))
        name = _FLAT_ZEROS if self._flat(matrix) else "zeros"
        zeros = matrix.tensor(name) if matrix.has(name) else None
        rounds = self.rounds_activations(matrix.options)
        return blocked_product(x, matrix.tensor("codes"), scales, zeros, bias, layout, rounds)

    @property
    def _zero_bits(self) -> int:
        """In how many bits a zero point is stored."""
        return 4 if self.bits == 3 else self.bits


def _as_floats(packed: Tensor, bits: int) -> Tensor:
    """Return packed codes as float32, by operators that leave torch well."""
    from smelt.runtime.schemes.parts.packing import digits_as_floats

    return packed.float() if bits == 8 else digits_as_floats(packed, 2**bits, 8 // bits)
