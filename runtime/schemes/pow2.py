"""Scheme pow2: 4-bit codes of a sign and a power of two, one scale for each group of a row's weights.

value = sign * 2^-q * scale for q = 0 to 6, or 0; scale = the largest magnitude of the group, as a float16.

    q = clip(round(-log2(|x| / scale)), 0, 6)        (Miyashita et al. 2016, arXiv:1603.01025, section 2.2)

so that the border between two powers is their geometric mean. Below half the least magnitude, 2^-7 scales, a
weight is nearer to 0 and becomes 0, the powers of INQ (Zhou et al. 2017, arXiv:1702.03044) with zero among
them. Code: q, and 8 more for a negative weight; 7 is zero, and 15 is never chosen.

A file holds the codes. When a graph is loaded they become 128 + sign * 2^(6 - q), 8-bit codes of MatMulNBits
in steps of scale / 64, which are the same values: a small file, and in memory and time int8-groupwise.

Shapes: N = outputs (rows), K = inputs (columns), g = group size, G = ceil(K / g).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.runtime.schemes.int8_groupwise import Int8Groupwise
from smelt.runtime.schemes.parts import groups as parts
from smelt.runtime.schemes.scheme import Coded, Codes, Grid, Option, Options, Scheme, Stored, Use

if TYPE_CHECKING:
    from torch import Tensor

LEAST = 6  # the largest q: 2^(b - 1) - 2
ZERO = 7
_SIGN = 8
_TABLE = "BytesOfPowers"


class Pow2(Scheme):
    """codes: uint8 [N, G, g / 2]; scales: float32 [N, G], each a float16."""

    name: ClassVar[str] = "pow2"
    summary: ClassVar[str] = "4-bit weights, a sign and a power of two, one scale per group of inputs"
    pays: ClassVar[str] = f"products by shifts elsewhere; here as fast as {Int8Groupwise.name}"
    source: ClassVar[str] = "Miyashita et al. 2016, arXiv:1603.01025 (logarithmic codes of weights)"
    settings: ClassVar[tuple[Option, ...]] = (parts.GROUP_SIZE, parts.ACCURACY_LEVEL)
    refused: ClassVar[Mapping[str, str]] = parts.REFUSED
    leaves_as: ClassVar[str] = f"{name} codes (MatMulNBits)"
    operators: ClassVar[Mapping[str, tuple[int, ...]]] = parts.OPERATORS
    # the rounding of activations is int4's
    drift: ClassVar[float] = 0.04
    vector_drift: ClassVar[float] = 0.04
    learns: ClassVar[bool] = False

    def group(self, width: int, options: Options) -> int:
        """Return g."""
        return parts.group_size(options)

    def fit(self, groups: Tensor, width: int, options: Options) -> Grid:
        """Return the largest magnitudes, each a float16."""
        return {"scales": groups.abs().amax(dim=-1).half().float()}

    def nearest(self, groups: Tensor, grid: Grid, options: Options) -> Tensor:
        """Return codes, uint8: the nearest power by its logarithm, or zero."""
        shares = (groups * parts.inverse(grid["scales"])[..., None]).abs()
        powers = (-shares.log2()).round_().clamp_(0, LEAST)
        codes = powers + _SIGN * (groups < 0)
        return codes.masked_fill_(shares < 2.0 ** -(LEAST + 1), ZERO).byte()

    def values(self, codes: Tensor, grid: Grid, options: Options) -> Tensor:
        """Return sign * 2^-q * scale, or 0."""
        import torch

        table = torch.from_numpy(_steps()).float().to(codes.device) / 2**LEAST
        found: Tensor = table[codes.int()] * grid["scales"][..., None]
        return found

    def storage(self, rows: int, width: int, options: Options) -> dict[str, Stored]:
        """Return two codes in a byte, and scales."""
        size = self.group(width, options)
        count = parts.group_count(width, size)
        return {
            "codes": Stored((rows, count, size // 2), "uint8", packs=2),
            "scales": Stored((rows, count), "float32", filed="float16"),
        }

    def pack(self, decided: Codes, options: Options) -> dict[str, Tensor]:
        """Return what `storage` says."""
        from smelt.runtime.schemes.parts.packing import pack_nibbles

        return {"codes": pack_nibbles(decided.codes), "scales": decided.grid["scales"].half().float()}

    def unpack(self, matrix: Coded) -> Codes:
        """Return the codes as uint8."""
        from smelt.runtime.schemes.parts.packing import unpack_nibbles

        return Codes(unpack_nibbles(matrix.tensor("codes")), {"scales": matrix.tensor("scales")})

    def product(self, matrix: Coded, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply by the values; activations are float32, or int8 per block (accuracy level 4)."""
        return parts.product(matrix, x, bias)

    def lookup(self, matrix: Coded, ids: Tensor) -> Tensor:
        """Return some rows, by operators that also leave as a graph; a row of zeros stays one."""
        import torch

        from smelt.runtime.schemes.parts.packing import nibbles_as_floats

        flat = ids.flatten()
        codes = nibbles_as_floats(matrix.tensor("codes").index_select(0, flat)).int()
        table = matrix.tensor("table") if matrix.has("table") else torch.from_numpy(_steps()).to(ids.device)
        steps = table.index_select(0, codes.flatten()).reshape(codes.shape).float() / 2**LEAST
        stored = matrix.tensor(parts.HALF_SCALES if matrix.has(parts.HALF_SCALES) else "scales")
        scales = stored.index_select(0, flat).float()[..., None]
        rows: Tensor = (steps * scales).flatten(1)[:, : matrix.width]
        return rows.reshape(*ids.shape, matrix.width)

    def rounds_activations(self, options: Options) -> bool:
        """Say whether the accuracy level is 4."""
        return parts.rounds_activations(options)

    def graph_tensors(self, matrix: Coded, use: Use) -> dict[str, Tensor]:
        """Return the scales in 16 bits; for lookups the table too."""
        import torch

        found = parts.graph_tensors(matrix)
        return found | ({"table": torch.from_numpy(_steps())} if use == "lookup" else {})

    def emit_product(self, matrix: Coded, x: Tensor, bias: Tensor | None, target: str) -> Tensor:
        """Emit MatMulNBits with 8 bits, which are made of the stored codes when the graph is loaded."""
        from smelt.runtime.layers import emit

        codes = emit.spread(_TABLE, matrix.tensor("codes"), 2)
        # float16 could not hold a 64th of a small scale: it is divided once it is wide
        scales = emit.float_scales(matrix.tensor(parts.HALF_SCALES)) / 2**LEAST
        return parts.emit_product(matrix, x, bias, 8, codes, scales=scales)

    def exact_nodes(self, node: Any) -> list[Any]:
        """Return the same operator at accuracy level 0."""
        return parts.exact_nodes(node)

    def load_tables(self) -> dict[str, Any]:
        """Return for each byte of two codes their 8-bit codes, the low one first, uint8 [256, 2]."""
        import numpy as np

        bytes_of = (_steps() + 128).astype(np.uint8)
        both = np.arange(256)
        return {_TABLE: np.stack([bytes_of[both & 15], bytes_of[both >> 4]], axis=1)}


def _steps() -> Any:
    """Return what each code stands for in steps of scale / 64, int32 [16]."""
    import numpy as np

    powers = np.array([2 ** (LEAST - q) for q in range(LEAST + 1)] + [0], dtype=np.int32)
    return np.concatenate([powers, -powers])
