"""4-bit weights that are looked up in a table of 16 values: pow2 (powers of two) and mxfp4 (OCP's E2M1).

A file stores the codes, the first of two in the low bits. When a graph is loaded they become
128 + value / step, 8-bit codes of MatMulNBits in units of scale * step, which are the same values: a small
file, with the memory and speed of int8-groupwise. Only weights are quantized.

Shapes: N = outputs (rows), K = inputs (columns), g = group size, G = ceil(K / g).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.quantization import groupwise as parts
from smelt.quantization.scheme import (
    MatrixUse,
    PackedMatrix,
    QuantParams,
    SchemeOption,
    SchemeOptions,
    StoredTensor,
    UnpackedWeights,
)
from smelt.quantization.schemes.affine import Int8Groupwise

if TYPE_CHECKING:
    from torch import Tensor

_SIGN = 8  # added to the code of a negative value


class FourBitTable(parts.GroupwiseScheme):
    """codes: uint8 [N, G, g / 2]; scales: float32 [N, G]. A subclass has 16 values and chooses codes.

    magnitudes: the first eight values, as integers; those of the codes from 8 on are their negatives.
    units: of the integers, so that a value is magnitude / units * scale. table_name: of the table that
    expands the codes in a graph.
    """

    magnitudes: ClassVar[tuple[int, ...]]
    units: ClassVar[int]
    table_name: ClassVar[str]
    scale_dtype: ClassVar[str]
    # float16 cannot hold a part of the least scale
    supported_dtypes: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    # activations are rounded as in int4
    tolerance: ClassVar[float] = 0.04
    embedding_tolerance: ClassVar[float] = 0.04
    learnable_scales: ClassVar[bool] = False

    def code_values(self) -> Any:
        """Return the value of each code in units of scale / `units`, int32 [16]."""
        import numpy as np

        positive = np.array(self.magnitudes, dtype=np.int32)
        return np.concatenate([positive, -positive])

    def dequantize(self, codes: Tensor, grid: QuantParams, options: SchemeOptions) -> Tensor:
        """Return value * scale."""
        import torch

        table = torch.from_numpy(self.code_values()).float().to(codes.device) / self.units
        values: Tensor = table[codes.int()] * grid["scales"][..., None]
        return values

    def stored_tensors(self, rows: int, width: int, options: SchemeOptions) -> dict[str, StoredTensor]:
        """Return the specs of two codes per byte, and scales."""
        size = self.group_size(width, options)
        count = parts.num_groups(width, size)
        return {
            "codes": StoredTensor((rows, count, size // 2), "uint8"),
            "scales": StoredTensor((rows, count), "float32", file_dtype=self.scale_dtype),
        }

    def pack(self, decided: UnpackedWeights, options: SchemeOptions) -> dict[str, Tensor]:
        """Return the tensors of `stored_tensors`."""
        import torch

        scales = decided.qparams["scales"].to(getattr(torch, self.scale_dtype)).float()
        return {"codes": parts.pack_nibbles(decided.q_weight), "scales": scales}

    def unpack(self, matrix: PackedMatrix) -> UnpackedWeights:
        """Return the codes as uint8."""
        return UnpackedWeights(
            parts.unpack_nibbles(matrix.tensor("codes")), {"scales": matrix.tensor("scales")}
        )

    def lookup(self, matrix: PackedMatrix, ids: Tensor) -> Tensor:
        """Return some rows, with operators that can be exported; a row of zeros stays zero."""
        import torch

        flat = ids.flatten()
        indices = parts.unpack_nibbles_float(matrix.tensor("codes").index_select(0, flat)).int()
        in_graph = matrix.has("table")
        table = matrix.tensor("table") if in_graph else torch.from_numpy(self.code_values()).to(ids.device)
        steps = table.index_select(0, indices.flatten()).reshape(indices.shape).float() / self.units
        stored_scales = matrix.tensor(parts.FLOAT16_SCALES if matrix.has(parts.FLOAT16_SCALES) else "scales")
        scales = stored_scales.index_select(0, flat).float()[..., None]
        values: Tensor = (steps * scales).flatten(1)[:, : matrix.width]
        return values.reshape(*ids.shape, matrix.width)

    def export_constants(self, matrix: PackedMatrix, use: MatrixUse) -> dict[str, Tensor]:
        """Return the scales in 16 bits, if these are exact; for lookups also the table."""
        import torch

        constants = super().export_constants(matrix, use)
        if not constants[parts.FLOAT16_SCALES].float().equal(matrix.tensor("scales")):
            constants = {}
        return constants | ({"table": torch.from_numpy(self.code_values())} if use == "lookup" else {})

    def emit_linear(self, matrix: PackedMatrix, x: Tensor, bias: Tensor | None, target: str) -> Tensor:
        """Emit MatMulNBits with 8 bits, expanded from the stored codes when the graph is loaded."""
        from smelt.quantization import emit

        q_weight = emit.expand_by_table(self.table_name, matrix.tensor("codes"), 2)
        has_float16_scales = matrix.has(parts.FLOAT16_SCALES)
        scales = (
            emit.widen_scales(matrix.tensor(parts.FLOAT16_SCALES))
            if has_float16_scales
            else matrix.tensor("scales")
        )
        # float16 could not represent a part of its least number: it is divided after the conversion
        return parts.emit_matmul_nbits(matrix, x, bias, 8, q_weight, scales=scales / self.units)

    def unpacking_tables(self) -> dict[str, Any]:
        """Return for each byte of two codes their 8-bit codes, the low one first, uint8 [256, 2]."""
        import numpy as np

        bytes_of = (self.code_values() + 128).astype(np.uint8)
        all_bytes = np.arange(256)
        return {self.table_name: np.stack([bytes_of[all_bytes & 15], bytes_of[all_bytes >> 4]], axis=1)}


MIN_EXPONENT = 6  # the largest q: 2^(b - 1) - 2
ZERO_CODE = 7


class Pow2(FourBitTable):
    """A sign and a power of two: value = sign * 2^-q * scale for q = 0 to 6, or 0.

    scale = the largest magnitude of the group, as a float16.

        q = clip(round(-log2(|x| / scale)), 0, 6)     (Miyashita et al. 2016, arXiv:1603.01025, section 2.2)

    so that the border between two powers is their geometric mean. Below half the least magnitude, 2^-7
    scales, a weight is nearer to 0 and becomes 0, the powers of INQ (Zhou et al. 2017, arXiv:1702.03044) with
    zero among them. Code: q, and 8 more for a negative weight; 7 is zero, and 15 is never chosen.
    """

    name: ClassVar[str] = "pow2"
    summary: ClassVar[str] = "4-bit weights, a sign and a power of two, one scale per group of inputs"
    recommended_for: ClassVar[str] = (
        f"hardware with shift multiplication; here as fast as {Int8Groupwise.name}"
    )
    source: ClassVar[str] = "Miyashita et al. 2016, arXiv:1603.01025 (logarithmic codes of weights)"
    option_specs: ClassVar[tuple[SchemeOption, ...]] = (parts.GROUP_SIZE, parts.ACCURACY_LEVEL)
    exported_as: ClassVar[str] = f"{name} weights (MatMulNBits)"
    magnitudes: ClassVar[tuple[int, ...]] = (*(2 ** (6 - q) for q in range(7)), 0)
    units: ClassVar[int] = 2**MIN_EXPONENT
    table_name: ClassVar[str] = "BytesOfPowers"
    scale_dtype: ClassVar[str] = "float16"

    def compute_qparams(self, groups: Tensor, width: int, options: SchemeOptions) -> QuantParams:
        """Return the largest magnitudes, each a float16."""
        return {"scales": groups.abs().amax(dim=-1).half().float()}

    def quantize(self, groups: Tensor, grid: QuantParams, options: SchemeOptions) -> Tensor:
        """Return codes, uint8: the nearest power by its logarithm, or zero."""
        ratios = (groups * parts.safe_reciprocal(grid["scales"])[..., None]).abs()
        powers = (-ratios.log2()).round_().clamp_(0, MIN_EXPONENT)
        q_weight = powers + _SIGN * (groups < 0)
        return q_weight.masked_fill_(ratios < 2.0 ** -(MIN_EXPONENT + 1), ZERO_CODE).byte()


MX_GROUP_SIZE = 32
E2M1_MAX = 6.0
_MAX_EXPONENT = 2  # of E2M1: 6 = 1.5 * 2^2
# E8M0: 2^-127 to 2^127; float32 holds 2^-127 and its half without a full mantissa, which a power needs not.
_MIN_SCALE, _MAX_SCALE = 2.0**-127, 2.0**127


class Mxfp4(FourBitTable):
    """OCP MXFP4: 4-bit floats (E2M1) with one power of two (E8M0) per 32 inputs of a row.

        value = e2m1 * scale        e2m1: 0, 0.5, 1, 1.5, 2, 3, 4 or 6, with a sign
        scale = 2^(floor(log2(max |x|)) - 2)        2: as 4 is the largest power of two of e2m1

    Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3.3 and 6.3. Values are rounded to the
    nearest, ties to the even code, those beyond 6 become 6 (a group whose largest magnitude is 7 scales has
    an error there). A group of zeros has scale 1. Negative zero (code 8) is read, and never chosen. A graph
    stores scales as float16 if these are exact, which they are from 2^-24 to 2^15, else as float32.
    """

    name: ClassVar[str] = "mxfp4"
    summary: ClassVar[str] = "4-bit float weights (E2M1), one power-of-two scale per 32 inputs"
    recommended_for: ClassVar[str] = (
        f"comparison with hardware that multiplies MXFP4; here as fast as {Int8Groupwise.name}"
    )
    source: ClassVar[str] = "OCP Microscaling Formats (MX) Specification 1.0 (MXFP4)"
    option_specs: ClassVar[tuple[SchemeOption, ...]] = (
        replace(
            parts.GROUP_SIZE,
            default=MX_GROUP_SIZE,
            allowed=(MX_GROUP_SIZE,),
            rejection=f"{name} has groups of {MX_GROUP_SIZE} weights, as its specification says",
        ),
        parts.ACCURACY_LEVEL,
    )
    unsupported_targets: ClassVar[Mapping[str, str]] = {
        **parts.NBITS_UNSUPPORTED_TARGETS,
        "tensorrt": "TensorRT 11 reads no powers of two (E8M0) as scales of 4-bit floats, only E4M3 per 16",
    }
    exported_as: ClassVar[str] = f"{name} weights (MatMulNBits)"
    magnitudes: ClassVar[tuple[int, ...]] = (0, 1, 2, 3, 4, 6, 8, 12)  # halves
    units: ClassVar[int] = 2
    table_name: ClassVar[str] = "BytesOfE2M1"
    scale_dtype: ClassVar[str] = "float8_e8m0fnu"

    def checkpoint_args(self, options: SchemeOptions) -> Mapping[str, Any]:
        """Return blocks of weights with float activations, as vLLM computes them on any GPU."""
        return {
            "format": "mxfp4-pack-quantized",
            "weights": {
                "num_bits": 4,
                "type": "float",
                "symmetric": True,
                "strategy": "group",
                "group_size": MX_GROUP_SIZE,
                "scale_dtype": "torch.uint8",
                "zp_dtype": "torch.uint8",
            },
        }

    def compute_qparams(self, groups: Tensor, width: int, options: SchemeOptions) -> QuantParams:
        """Return the powers of two, 1 for a group of zeros."""
        import torch

        largest = groups.abs().amax(dim=-1)
        # frexp: largest = m * 2^e with m from 0.5 to 1, exact where a logarithm is not
        exponents = torch.frexp(largest).exponent - 1 - _MAX_EXPONENT
        scales = torch.ldexp(torch.ones_like(largest), exponents).clamp_(_MIN_SCALE, _MAX_SCALE)
        return {"scales": scales.where(largest > 0, 1.0)}

    def quantize(self, groups: Tensor, grid: QuantParams, options: SchemeOptions) -> Tensor:
        """Return codes, uint8: the nearest magnitude, ties to the even code, and 8 more if negative."""
        return e2m1_codes(groups / grid["scales"][..., None])


def e2m1_codes(ratios: Tensor) -> Tensor:
    """Return the codes of the E2M1 numbers nearest to `ratios`, uint8, ties to the even code; 0 for zeros."""
    import torch

    magnitudes = torch.bucketize(ratios.abs(), _e2m1_borders().to(ratios.device), out_int32=True)
    return (magnitudes + _SIGN * ((ratios < 0) & (magnitudes > 0))).byte()


def e2m1_values(codes: Tensor) -> Tensor:
    """Return the E2M1 numbers of uint8 `codes`, float32."""
    import torch

    table = torch.from_numpy(Mxfp4().code_values()).float().to(codes.device) / Mxfp4.units
    values: Tensor = table[codes.int()]
    return values


def _e2m1_borders() -> Tensor:
    """Return the largest magnitude that becomes each code but the last, float32 [7].

    It is the middle of two magnitudes where the lower code is even, else the number before the middle.
    """
    import torch

    magnitudes = torch.tensor(Mxfp4.magnitudes, dtype=torch.float32) / 2
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    is_even = torch.arange(len(middles)) % 2 == 0
    return middles.where(is_even, torch.nextafter(middles, torch.zeros(())))
