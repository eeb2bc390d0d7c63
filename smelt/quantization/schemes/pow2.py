"""Scheme pow2: 4-bit weights with a sign and a power of two, one scale for each group of a row's weights.

value = sign * 2^-q * scale for q = 0 to 6, or 0; scale = the largest magnitude of the group, as a float16.

    q = clip(round(-log2(|x| / scale)), 0, 6)        (Miyashita et al. 2016, arXiv:1603.01025, section 2.2)

so that the border between two powers is their geometric mean. Below half the least magnitude, 2^-7 scales, a
weight is nearer to 0 and becomes 0, the powers of INQ (Zhou et al. 2017, arXiv:1702.03044) with zero among
them. Code: q, and 8 more for a negative weight; 7 is zero, and 15 is never chosen.

A file stores the codes. When a graph is loaded they become 128 + sign * 2^(6 - q), 8-bit codes of MatMulNBits
in units of scale / 64, which are the same values: a small file, with the memory and speed of int8-groupwise.

Shapes: N = outputs (rows), K = inputs (columns), g = group size, G = ceil(K / g).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

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
from smelt.quantization.schemes.affine import Int8Groupwise

if TYPE_CHECKING:
    from torch import Tensor

MIN_EXPONENT = 6  # the largest q: 2^(b - 1) - 2
ZERO_CODE = 7
_SIGN = 8
_TABLE = "BytesOfPowers"


class Pow2(Scheme):
    """codes: uint8 [N, G, g / 2]; scales: float32 [N, G], each a float16."""

    name: ClassVar[str] = "pow2"
    summary: ClassVar[str] = "4-bit weights, a sign and a power of two, one scale per group of inputs"
    recommended_for: ClassVar[str] = (
        f"hardware with shift multiplication; here as fast as {Int8Groupwise.name}"
    )
    source: ClassVar[str] = "Miyashita et al. 2016, arXiv:1603.01025 (logarithmic codes of weights)"
    option_specs: ClassVar[tuple[SchemeOption, ...]] = (parts.GROUP_SIZE, parts.ACCURACY_LEVEL)
    unsupported_targets: ClassVar[Mapping[str, str]] = parts.NBITS_UNSUPPORTED_TARGETS
    exported_as: ClassVar[str] = f"{name} weights (MatMulNBits)"
    operators: ClassVar[Mapping[str, tuple[int, ...]]] = parts.MATMUL_NBITS
    # activations are rounded as in int4
    tolerance: ClassVar[float] = 0.04
    embedding_tolerance: ClassVar[float] = 0.04
    learnable_scales: ClassVar[bool] = False

    def group_size(self, width: int, options: SchemeOptions) -> int:
        """Return g."""
        return parts.group_size(options)

    def compute_qparams(self, groups: Tensor, width: int, options: SchemeOptions) -> QuantParams:
        """Return the largest magnitudes, each a float16."""
        return {"scales": groups.abs().amax(dim=-1).half().float()}

    def quantize(self, groups: Tensor, grid: QuantParams, options: SchemeOptions) -> Tensor:
        """Return codes, uint8: the nearest power by its logarithm, or zero."""
        shares = (groups * parts.safe_reciprocal(grid["scales"])[..., None]).abs()
        powers = (-shares.log2()).round_().clamp_(0, MIN_EXPONENT)
        codes = powers + _SIGN * (groups < 0)
        return codes.masked_fill_(shares < 2.0 ** -(MIN_EXPONENT + 1), ZERO_CODE).byte()

    def dequantize(self, codes: Tensor, grid: QuantParams, options: SchemeOptions) -> Tensor:
        """Return sign * 2^-q * scale, or 0."""
        import torch

        table = torch.from_numpy(_code_values()).float().to(codes.device) / 2**MIN_EXPONENT
        found: Tensor = table[codes.int()] * grid["scales"][..., None]
        return found

    def stored_tensors(self, rows: int, width: int, options: SchemeOptions) -> dict[str, StoredTensor]:
        """Return the specs of two codes per byte, and scales."""
        size = self.group_size(width, options)
        count = parts.num_groups(width, size)
        return {
            "codes": StoredTensor((rows, count, size // 2), "uint8"),
            "scales": StoredTensor((rows, count), "float32", file_dtype="float16"),
        }

    def pack(self, decided: UnpackedWeights, options: SchemeOptions) -> dict[str, Tensor]:
        """Return the tensors of `stored_tensors`."""
        from smelt.quantization.packing import pack_nibbles

        return {"codes": pack_nibbles(decided.q_weight), "scales": decided.qparams["scales"].half().float()}

    def unpack(self, matrix: PackedMatrix) -> UnpackedWeights:
        """Return the codes as uint8."""
        from smelt.quantization.packing import unpack_nibbles

        return UnpackedWeights(unpack_nibbles(matrix.tensor("codes")), {"scales": matrix.tensor("scales")})

    def linear(self, matrix: PackedMatrix, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply by the values; activations are float32, or int8 per block (accuracy level 4)."""
        return parts.groupwise_linear(matrix, x, bias)

    def lookup(self, matrix: PackedMatrix, ids: Tensor) -> Tensor:
        """Return some rows, with operators that can be exported; a row of zeros stays zero."""
        import torch

        from smelt.quantization.packing import unpack_nibbles_float

        flat = ids.flatten()
        codes = unpack_nibbles_float(matrix.tensor("codes").index_select(0, flat)).int()
        table = (
            matrix.tensor("table") if matrix.has("table") else torch.from_numpy(_code_values()).to(ids.device)
        )
        steps = table.index_select(0, codes.flatten()).reshape(codes.shape).float() / 2**MIN_EXPONENT
        stored = matrix.tensor(parts.FLOAT16_SCALES if matrix.has(parts.FLOAT16_SCALES) else "scales")
        scales = stored.index_select(0, flat).float()[..., None]
        rows: Tensor = (steps * scales).flatten(1)[:, : matrix.width]
        return rows.reshape(*ids.shape, matrix.width)

    def quantizes_activations(self, options: SchemeOptions) -> bool:
        """Return whether the accuracy level is 4."""
        return parts.quantizes_activation_blocks(options)

    def export_constants(self, matrix: PackedMatrix, use: MatrixUse) -> dict[str, Tensor]:
        """Return the scales in 16 bits; for lookups also the table."""
        import torch

        found = parts.groupwise_constants(matrix)
        return found | ({"table": torch.from_numpy(_code_values())} if use == "lookup" else {})

    def emit_linear(self, matrix: PackedMatrix, x: Tensor, bias: Tensor | None, target: str) -> Tensor:
        """Emit MatMulNBits with 8 bits, expanded from the stored codes when the graph is loaded."""
        from smelt.quantization import emit

        codes = emit.expand_by_table(_TABLE, matrix.tensor("codes"), 2)
        # float16 could not represent a 64th of a small scale: it is divided after the conversion
        scales = emit.widen_scales(matrix.tensor(parts.FLOAT16_SCALES)) / 2**MIN_EXPONENT
        return parts.emit_matmul_nbits(matrix, x, bias, 8, codes, scales=scales)

    def float_activation_nodes(self, node: Any) -> list[Any]:
        """Return the same operator at accuracy level 0."""
        return parts.nbits_float_activation_nodes(node)

    def unpacking_tables(self) -> dict[str, Any]:
        """Return for each byte of two codes their 8-bit codes, the low one first, uint8 [256, 2]."""
        import numpy as np

        bytes_of = (_code_values() + 128).astype(np.uint8)
        both = np.arange(256)
        return {_TABLE: np.stack([bytes_of[both & 15], bytes_of[both >> 4]], axis=1)}


def _code_values() -> Any:
    """Return the value of each code in units of scale / 64, int32 [16]."""
    import numpy as np

    powers = np.array([2 ** (MIN_EXPONENT - q) for q in range(MIN_EXPONENT + 1)] + [0], dtype=np.int32)
    return np.concatenate([powers, -powers])
