"""Scheme int4: 4-bit codes, one scale (and zero point) for each group of a row's weights.

value = (code - zero) * scale, code and zero between 0 and 15; zero is 8 in symmetric matrices, which store
none. Codes are stored as ONNX Runtime's MatMulNBits reads them, two in a byte; scales as float16: what
rounding them costs is far below the 4 bits' own error.

Symmetric: the value of largest magnitude in a group becomes code 0 (that is -8), so that all 16 codes
are used; the zero point is 8 everywhere. A value of the other sign that is as large would be +8 and is cut
to +7, by a step at most; all others are half a step off at most. That is worth it: a scale of amax / 7,
which cuts nothing, has a mean squared error that is 28 % larger (groups of 64, normal or trained
weights). Asymmetric: smallest and largest value become 0 and 15, and zero itself stays exact. Both as
ONNX Runtime's own quantizer does (onnxruntime/core/mlas/lib/q4_dq.cpp, range2scale and range2scalezp);
scales are rounded to float16 before codes are chosen. In training the range follows the weights, so that
at most a step is cut off.

Shapes: N = outputs (rows), K = inputs (columns), g = group size, G = ceil(K / g).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.runtime.schemes.parts import groups as parts
from smelt.runtime.schemes.scheme import Coded, Codes, Grid, Option, Options, Scheme, Stored, Use

if TYPE_CHECKING:
    from torch import Tensor

ZERO = 8
SYMMETRIC = Option("symmetric", True, (True, False), "zero lies in the middle; false stores zero points")


class Int4(Scheme):
    """codes: uint8 [N, G, g / 2]; scales: float32 [N, G], each a float16; zeros: uint8 [N, ceil(G / 2)]."""

    name: ClassVar[str] = "int4"
    summary: ClassVar[str] = "4-bit weights, one scale per group of inputs"
    source: ClassVar[str] = "ONNX Runtime, com.microsoft::MatMulNBits and its quantizer (mlas/lib/q4_dq.cpp)"
    settings: ClassVar[tuple[Option, ...]] = (parts.GROUP_SIZE, SYMMETRIC, parts.ACCURACY_LEVEL)
    refused: ClassVar[Mapping[str, str]] = parts.REFUSED
    leaves_as: ClassVar[str] = f"{name} codes (MatMulNBits)"
    operators: ClassVar[Mapping[str, tuple[int, ...]]] = parts.OPERATORS
    # 0.006 to 0.018 was measured on four families
    drift: ClassVar[float] = 0.04
    vector_drift: ClassVar[float] = 0.04

    def group(self, width: int, options: Options) -> int:
        """Return g."""
        return parts.group_size(options)

    def fit(self, groups: Tensor, width: int, options: Options) -> Grid:
        """Return scales, each a float16, and zero points unless symmetric."""
        low, high = groups.amin(dim=-1).clamp_(max=0), groups.amax(dim=-1).clamp_(min=0)
        if options[SYMMETRIC.name]:
            return {"scales": (high.where(high > -low, low) / -8).half().float()}
        scales = ((high - low) / 15).half().float()
        return {"scales": scales, "zeros": (-low * parts.inverse(scales)).round_().clamp_(0, 15).byte()}

    def nearest(self, groups: Tensor, grid: Grid, options: Options) -> Tensor:
        """Return codes from 0 to 15, uint8."""
        steps = (groups * parts.inverse(grid["scales"])[..., None]).round_()
        return steps.add_(_zeros(grid)).clamp_(0, 15).byte()

    def values(self, codes: Tensor, grid: Grid, options: Options) -> Tensor:
        """Return (code - zero) * scale."""
        return (codes.float() - _zeros(grid)) * grid["scales"][..., None]

    def storage(self, rows: int, width: int, options: Options) -> dict[str, Stored]:
        """Return two codes in a byte, scales, and two zero points in a byte."""
        size = self.group(width, options)
        count = parts.group_count(width, size)
        found = {
            "codes": Stored((rows, count, size // 2), "uint8", packs=2),
            "scales": Stored((rows, count), "float32", filed="float16"),
        }
        if not options[SYMMETRIC.name]:
            found["zeros"] = Stored((rows, -(-count // 2)), "uint8")
        return found

    def pack(self, decided: Codes, options: Options) -> dict[str, Tensor]:
        """Return nibbles."""
        from smelt.runtime.schemes.parts.packing import pack_nibbles

        grid = decided.grid
        found = {"codes": pack_nibbles(decided.codes), "scales": grid["scales"].half().float()}
        return found | ({"zeros": pack_nibbles(grid["zeros"])} if "zeros" in grid else {})

    def unpack(self, matrix: Coded) -> Codes:
        """Return codes and zero points as uint8."""
        from smelt.runtime.schemes.parts.packing import unpack_nibbles

        codes, grid = unpack_nibbles(matrix.tensor("codes")), {"scales": matrix.tensor("scales")}
        if matrix.has("zeros"):
            grid["zeros"] = unpack_nibbles(matrix.tensor("zeros"))[:, : codes.shape[1]]
        return Codes(codes, grid)

    def product(self, matrix: Coded, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply by the values; activations are float32, or int8 per block (accuracy level 4)."""
        return parts.product(matrix, x, bias)

    def lookup(self, matrix: Coded, ids: Tensor) -> Tensor:
        """Return some rows, by operators that also leave as a graph; a row of zeros stays one."""
        from smelt.runtime.schemes.parts.packing import nibbles_as_floats

        flat = ids.flatten()
        codes = nibbles_as_floats(matrix.tensor("codes").index_select(0, flat))
        zeros: Tensor | float = float(ZERO)
        if matrix.has("zeros"):
            zeros = nibbles_as_floats(matrix.tensor("zeros").index_select(0, flat))[:, : codes.shape[1], None]
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
        """Emit MatMulNBits with 4 bits."""
        zeros = matrix.tensor("zeros") if matrix.has("zeros") else None
        return parts.emit_product(matrix, x, bias, 4, matrix.tensor("codes"), zeros)

    def exact_nodes(self, node: Any) -> list[Any]:
        """Return the same operator at accuracy level 0."""
        return parts.exact_nodes(node)


def _zeros(grid: Grid) -> Tensor | int:
    """Return the zero points as they broadcast over codes, [N, G, 1]."""
    return grid["zeros"][..., None].float() if "zeros" in grid else ZERO
