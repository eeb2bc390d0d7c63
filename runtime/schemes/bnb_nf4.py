"""Scheme bnb-nf4: 4-bit NormalFloat codes of bitsandbytes, one float32 scale for each 64 inputs of a row.

value = table[code] * scale, scale = the largest magnitude of the block. The table has the quantiles of a
normal distribution between -1 and 1, zero among them (Dettmers et al. 2023, QLoRA, arXiv:2305.14314, section
3 and appendix E). Codes are the nearest entries of it; the midpoint between two goes to the lower one, as in
bitsandbytes. Two codes lie in a byte, the first in the high bits; absmax is not quantized once more.

bitsandbytes cuts a matrix into blocks as it lies in memory, here a row begins a block. That is the same where
the inputs are a multiple of 64; elsewhere the last block of a row is filled up with zeros. In torch
bitsandbytes multiplies; in a graph ONNX Runtime's MatMulBnb4 does. Both dequantize to float32 and multiply
float32 activations.

Shapes: N = outputs (rows), K = inputs (columns), g = 64, G = ceil(K / g).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.runtime.schemes.parts import bits_and_bytes
from smelt.runtime.schemes.parts import groups as parts
from smelt.runtime.schemes.scheme import Coded, Codes, Grid, Options, Scheme, Stored, Use

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BLOCK = 64
TYPE = "nf4"
TABLE = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_WHY = "it multiplies packed NF4 codes (MatMulBnb4)"


class BnbNf4(Scheme):
    """codes: uint8 [N, G, g / 2]; scales: float32 [N, G]."""

    name: ClassVar[str] = "bnb-nf4"
    summary: ClassVar[str] = "4-bit NormalFloat weights of bitsandbytes, one scale per 64 inputs"
    pays: ClassVar[str] = "memory, while adapters train; not time"
    source: ClassVar[str] = "Dettmers et al. 2023, QLoRA, arXiv:2305.14314 (bitsandbytes, Linear4bit)"
    learns: ClassVar[bool] = False
    packages: ClassVar[Mapping[str, str]] = bits_and_bytes.PACKAGES
    by_word: ClassVar[bool] = False
    refused: ClassVar[Mapping[str, str]] = {"ort-cuda": _WHY, "tensorrt": _WHY, "openvino": _WHY}
    leaves_as: ClassVar[str] = f"{name} codes (MatMulBnb4)"
    operators: ClassVar[Mapping[str, tuple[int, ...]]] = {"MatMulBnb4": (2,)}
    # no product rounds activations, so that graphs are held to float32's tolerance
    drift: ClassVar[float] = 0.0
    vector_drift: ClassVar[float] = 0.0

    def group(self, width: int, options: Options) -> int:
        """Return g."""
        return BLOCK

    def fit(self, groups: Tensor, width: int, options: Options) -> Grid:
        """Return the largest magnitudes."""
        return {"scales": groups.abs().amax(dim=-1)}

    def nearest(self, groups: Tensor, grid: Grid, options: Options) -> Tensor:
        """Return the places of the nearest entries of the table, uint8."""
        import torch

        table = _table(groups.device)
        scaled = (groups * parts.inverse(grid["scales"])[..., None]).clamp_(-1, 1)
        return torch.bucketize(scaled, (table[1:] + table[:-1]) / 2, out_int32=True).byte()

    def values(self, codes: Tensor, grid: Grid, options: Options) -> Tensor:
        """Return table[code] * scale."""
        return _table(codes.device)[codes.int()] * grid["scales"][..., None]

    def storage(self, rows: int, width: int, options: Options) -> dict[str, Stored]:
        """Return two codes in a byte, and scales."""
        count = parts.group_count(width, BLOCK)
        return {
            "codes": Stored((rows, count, BLOCK // 2), "uint8", packs=2),
            "scales": Stored((rows, count), "float32"),
        }

    def pack(self, decided: Codes, options: Options) -> dict[str, Tensor]:
        """Return what `storage` says."""
        from smelt.runtime.schemes.parts.packing import pack_nibbles

        return {
            "codes": pack_nibbles(decided.codes, high_first=True),
            "scales": decided.grid["scales"].float(),
        }

    def unpack(self, matrix: Coded) -> Codes:
        """Return the codes as uint8."""
        from smelt.runtime.schemes.parts.packing import unpack_nibbles

        codes = unpack_nibbles(matrix.tensor("codes"), high_first=True)
        return Codes(codes, {"scales": matrix.tensor("scales")})

    def product(self, matrix: Coded, x: Tensor, bias: Tensor | None) -> Tensor:
        """Let bitsandbytes multiply; its float weights live as long as one product."""
        import torch

        library, (rows, count) = bits_and_bytes.library(), matrix.tensor("scales").shape
        state = library.functional.QuantState(
            absmax=matrix.tensor("scales").flatten(),
            shape=torch.Size((rows, count * BLOCK)),
            code=_table(x.device),
            blocksize=BLOCK,
            quant_type=TYPE,
            dtype=torch.float32,
        )
        codes = matrix.tensor("codes").reshape(-1, 1)
        out: Tensor = library.matmul_4bit(_filled_up(x, count), codes, state, bias=bias)
        return out

    def lookup(self, matrix: Coded, ids: Tensor) -> Tensor:
        """Return some rows, by operators that also leave as a graph; a row of zeros stays one."""
        import torch

        from smelt.runtime.schemes.parts.packing import nibbles_as_floats

        count = parts.group_count(matrix.width, BLOCK)
        taken = ids.flatten()[:, None]

        def rows(name: str, otherwise: str, width: int) -> Tensor:
            flat = matrix.tensor(name) if matrix.has(name) else matrix.tensor(otherwise).flatten()
            places = taken * width + torch.arange(width, device=taken.device)
            return flat.index_select(0, places.flatten())

        codes = nibbles_as_floats(rows("flat", "codes", count * BLOCK // 2), high_first=True).int()
        table = matrix.tensor("table") if matrix.has("table") else _table(codes.device)
        scales = rows("flat_scales", "scales", count).reshape(-1, count, 1)
        values = table.index_select(0, codes).reshape(-1, count, BLOCK) * scales
        found = values.flatten(1)[:, : matrix.width]
        return found.reshape(*ids.shape, matrix.width)

    def rounds_activations(self, options: Options) -> bool:
        """Return false: they stay float32."""
        return False

    def graph_tensors(self, matrix: Coded, use: Use) -> dict[str, Tensor]:
        """Return codes and scales as the operator wants them, in one dimension; for lookups the table too."""
        flat = {
            "flat": matrix.tensor("codes").detach().flatten(),
            "flat_scales": matrix.tensor("scales").detach().flatten(),
        }
        return flat | ({"table": _table(flat["flat"].device).clone()} if use == "lookup" else {})

    def emit_product(self, matrix: Coded, x: Tensor, bias: Tensor | None, target: str) -> Tensor:
        """Emit MatMulBnb4, which blocks of 64 go through row by row."""
        from smelt.runtime.layers import emit

        rows, count = matrix.tensor("scales").shape
        layout = emit.Layout(count * BLOCK, rows, 4, BLOCK)
        codes, scales = matrix.tensor("flat"), matrix.tensor("flat_scales")
        return emit.matmul_bnb4(_filled_up(x, count), codes, scales, bias, layout)

    def exact_nodes(self, node: Any) -> list[Any]:
        """Return the operator itself: its activations are whole."""
        return [node]


def _filled_up(x: Tensor, count: int) -> Tensor:
    """Return `x` [..., K] with zeros behind it, as long as `count` blocks."""
    from torch.nn import functional as F

    lacking = count * BLOCK - x.shape[-1]
    return F.pad(x, (0, lacking)) if lacking else x


@cache
def _table(device: torch.device) -> Tensor:
    """Return the table, float32 [16]."""
    import torch

    with torch.inference_mode(False):
        return torch.tensor(TABLE, device=device)
