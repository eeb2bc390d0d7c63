"""What schemes of whole-number codes in groups share: a scale, perhaps a zero point, MatMulNBits.

value = (code - zero) * scale, code and zero between 0 and 2^b - 1; zero is 2^(b - 1) in symmetric matrices,
which store none. Codes are stored as ONNX Runtime's MatMulNBits reads them; scales as float16: what rounding
them costs is far below the codes' own error.

Symmetric: the value of largest magnitude in a group becomes code 0 (that is -2^(b - 1)), so that all codes
are used; the zero point is the same everywhere. A value of the other sign that is as large would be
+2^(b - 1) and is cut by a step at most; all others are half a step off at most. Asymmetric: smallest and
largest value become 0 and 2^b - 1, and zero itself stays exact. Both as ONNX Runtime's own quantizer does
(onnxruntime/core/mlas/lib/q4_dq.cpp, range2scale and range2scalezp); scales are rounded to float16 before
codes are chosen. In training the range follows the weights, so that at most a step is cut off.

Shapes: N = outputs (rows), K = inputs (columns), g = group size, G = ceil(K / g), b = bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.runtime.schemes.parts import groups as parts
from smelt.runtime.schemes.scheme import Coded, Codes, Grid, Option, Options, Scheme, Stored, Use

if TYPE_CHECKING:
    from torch import Tensor

SYMMETRIC = Option("symmetric", True, (True, False), "zero lies in the middle; false stores zero points")


class AffineGroups(Scheme):
    """codes: uint8 [N, G, g b / 8]; scales: float32 [N, G], each a float16; zeros: uint8 [N, ceil(G b / 8)].

    bits: b, 4 or 8.
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

    def storage(self, rows: int, width: int, options: Options) -> dict[str, Stored]:
        """Return codes, as many in a byte as fit, scales, and zero points in bytes likewise."""
        size, packs = self.group(width, options), 8 // self.bits
        count = parts.group_count(width, size)
        found = {
            "codes": Stored((rows, count, size // packs), "uint8", packs=packs),
            "scales": Stored((rows, count), "float32", filed="float16"),
        }
        if not options[SYMMETRIC.name]:
            found["zeros"] = Stored((rows, -(-count // packs)), "uint8")
        return found

    def pack(self, decided: Codes, options: Options) -> dict[str, Tensor]:
        """Return what `storage` says."""
        grid = decided.grid
        found = {"codes": self._packed(decided.codes), "scales": grid["scales"].half().float()}
        return found | ({"zeros": self._packed(grid["zeros"])} if "zeros" in grid else {})

    def unpack(self, matrix: Coded) -> Codes:
        """Return codes and zero points as uint8."""
        codes, grid = self._one_by_one(matrix.tensor("codes")), {"scales": matrix.tensor("scales")}
        if matrix.has("zeros"):
            grid["zeros"] = self._one_by_one(matrix.tensor("zeros"))[:, : codes.shape[1]]
        return Codes(codes, grid)

    def product(self, matrix: Coded, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply by the values; activations are float32, or int8 per block (accuracy level 4)."""
        return parts.product(matrix, x, bias)

    def lookup(self, matrix: Coded, ids: Tensor) -> Tensor:
        """Return some rows, by operators that also leave as a graph; a row of zeros stays one."""
        flat = ids.flatten()
        codes = self._as_floats(matrix.tensor("codes").index_select(0, flat))
        zeros: Tensor | float = float(self.middle)
        if matrix.has("zeros"):
            zeros = self._as_floats(matrix.tensor("zeros").index_select(0, flat))[:, : codes.shape[1], None]
        stored = matrix.tensor(parts.HALF_SCALES if matrix.has(parts.HALF_SCALES) else "scales")
        scales = stored.index_select(0, flat).float()[..., None]
        rows = ((codes - zeros) * scales).flatten(1)[:, : matrix.width]
        return rows.reshape(*ids.shape, matrix.width)

    def rounds_activations(self, options: Options) -> bool:
        """Say whether the accuracy level is 4."""
        return parts.rounds_activations(options)

    def graph_tensors(self, matrix: Coded, use: Use) -> dict[str, Tensor]:
        """Return the scales in 16 bits."""
        return parts.graph_tensors(matrix)

    def emit_product(self, matrix: Coded, x: Tensor, bias: Tensor | None, target: str) -> Tensor:
        """Emit MatMulNBits."""
        zeros = matrix.tensor("zeros") if matrix.has("zeros") else None
        return parts.emit_product(matrix, x, bias, self.bits, matrix.tensor("codes"), zeros)

    def exact_nodes(self, node: Any) -> list[Any]:
        """Return the same operator at accuracy level 0."""
        return parts.exact_nodes(node)

    def _zeros(self, grid: Grid) -> Tensor | int:
        """Return the zero points as they broadcast over codes, [N, G, 1]."""
        return grid["zeros"][..., None].float() if "zeros" in grid else self.middle

    def _packed(self, codes: Tensor) -> Tensor:
        """Put as many codes into a byte as fit."""
        from smelt.runtime.schemes.parts.packing import pack_nibbles

        return pack_nibbles(codes) if self.bits == 4 else codes

    def _one_by_one(self, packed: Tensor) -> Tensor:
        """Return what `_packed` was given, filled up with zeros."""
        from smelt.runtime.schemes.parts.packing import unpack_nibbles

        return unpack_nibbles(packed) if self.bits == 4 else packed

    def _as_floats(self, packed: Tensor) -> Tensor:
        """Return the codes as float32, by operators that leave torch well."""
        from smelt.runtime.schemes.parts.packing import nibbles_as_floats

        return nibbles_as_floats(packed) if self.bits == 4 else packed.float()
