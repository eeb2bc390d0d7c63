"""Scheme kmeans4: 4-bit codes, places in a codebook of 16 values that a group of a row's inputs has alone.

value = (codebook[code] - 128) * scale; the codebook holds bytes, scale = amax / 127 of the group. The 16
values are those of least squared error that Lloyd's iteration finds (Lloyd 1982, Least squares quantization
in PCM; for weights Han et al. 2016, Deep Compression, arXiv:1510.00149, section 3). Where it ends depends on
where it starts. So it starts from values spread evenly over the group's range (what the paper found best),
from those of int4, from halfway between even ones and quantiles, and from a density of least error, and the
best end is kept: but for the rounding to bytes no group errs more than in int4, and nothing is drawn by
chance. Where weights of a group are 0, the value nearest to 0 becomes 0, so that what was pruned stays so.

A file holds codes, codebooks and scales; when a graph is loaded the places become the bytes, which
MatMulNBits multiplies as 8-bit codes: a small file, and in memory and time int8-groupwise.

Shapes: N = outputs (rows), K = inputs (columns), g = inputs that share a codebook, G = ceil(K / g).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.runtime.schemes.int8_groupwise import Int8Groupwise
from smelt.runtime.schemes.parts import groups as parts
from smelt.runtime.schemes.scheme import Coded, Codes, Grid, Option, Options, Scheme, Stored, Use

if TYPE_CHECKING:
    from torch import Tensor

# here the inputs of a row that share a codebook
GROUP_SIZE = Option("group_size", 256, (128, 256), parts.GROUP_SIZE.description)
ENTRIES = 16
ROUNDS = 25
_LARGEST, _MIDDLE = 127, 128
_TABLE = "BytesOfNibbles"
# Values of least error lie as densely as the cube root of the weights' density (Panter and Dite 1951), which
# is one over the gap between neighbours: so evenly along the sum of gaps^(2/3).
_GAPS = 2 / 3
_ROWS = 4096  # so many are fitted at once, which bounds the memory of the fit


class Kmeans4(Scheme):
    """codes: uint8 [N, G, g / 2]; codebook: uint8 [N, G, 16], rising; scales: float32 [N, G], as float16."""

    name: ClassVar[str] = "kmeans4"
    summary: ClassVar[str] = "4-bit weights, 16 values of its own for each group of inputs"
    pays: ClassVar[str] = f"small files; as fast as {Int8Groupwise.name}"
    source: ClassVar[str] = "Han et al. 2016, Deep Compression, arXiv:1510.00149 (weights that share values)"
    settings: ClassVar[tuple[Option, ...]] = (GROUP_SIZE, parts.ACCURACY_LEVEL)
    refused: ClassVar[Mapping[str, str]] = parts.REFUSED
    leaves_as: ClassVar[str] = f"{name} codes (MatMulNBits)"
    operators: ClassVar[Mapping[str, tuple[int, ...]]] = parts.OPERATORS
    # what rounds is the activations, in blocks up to twice as long as int4's
    drift: ClassVar[float] = 0.04
    vector_drift: ClassVar[float] = 0.04
    learns: ClassVar[bool] = False
    zero: ClassVar[bool] = False
    ranges: ClassVar[bool] = False

    def group(self, width: int, options: Options) -> int:
        """Return g."""
        return int(options[GROUP_SIZE.name])

    def fit(self, groups: Tensor, width: int, options: Options) -> Grid:
        """Return scales and codebooks, uint8 [N, G, 16]; what fills up the last group is no weight."""
        import torch

        scales = (groups.abs().amax(dim=-1) / _LARGEST).half().float()
        steps = groups * parts.inverse(scales)[..., None]
        counts = torch.full(groups.shape[1:2], groups.shape[2], device=groups.device)
        counts[-1] -= groups.shape[1] * groups.shape[2] - width
        books = [_codebooks(part, counts) for part in steps.split(_ROWS)]
        return {"scales": scales, "codebook": torch.cat(books)}

    def nearest(self, groups: Tensor, grid: Grid, options: Options) -> Tensor:
        """Return the places of the nearest values, uint8; a midpoint goes to the lower one."""
        import torch

        values = grid["codebook"].float() - _MIDDLE
        steps = (groups * parts.inverse(grid["scales"])[..., None]).contiguous()
        between = ((values[..., 1:] + values[..., :-1]) / 2).expand(*steps.shape[:2], -1).contiguous()
        return torch.searchsorted(between, steps).byte()

    def values(self, codes: Tensor, grid: Grid, options: Options) -> Tensor:
        """Return (codebook[code] - 128) * scale."""
        books = grid["codebook"].expand(*codes.shape[:2], -1)
        return (books.gather(2, codes.long()).float() - _MIDDLE) * grid["scales"][..., None]

    def storage(self, rows: int, width: int, options: Options) -> dict[str, Stored]:
        """Return two codes in a byte, codebooks and scales."""
        size = self.group(width, options)
        count = parts.group_count(width, size)
        return {
            "codes": Stored((rows, count, size // 2), "uint8", packs=2),
            "codebook": Stored((rows, count, ENTRIES), "uint8", packs=0),
            "scales": Stored((rows, count), "float32", filed="float16"),
        }

    def pack(self, decided: Codes, options: Options) -> dict[str, Tensor]:
        """Return what `storage` says."""
        from smelt.runtime.schemes.parts.packing import pack_nibbles

        return {
            "codes": pack_nibbles(decided.codes),
            "codebook": decided.grid["codebook"],
            "scales": decided.grid["scales"].half().float(),
        }

    def unpack(self, matrix: Coded) -> Codes:
        """Return the codes as uint8."""
        from smelt.runtime.schemes.parts.packing import unpack_nibbles

        grid = {"scales": matrix.tensor("scales"), "codebook": matrix.tensor("codebook")}
        return Codes(unpack_nibbles(matrix.tensor("codes")), grid)

    def product(self, matrix: Coded, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply by the values; activations are float32, or int8 per block (accuracy level 4)."""
        from torch.nn import functional as F

        if parts.rounds_activations(matrix.options):
            x = parts.blocks_as_int8(x, self.group(matrix.width, matrix.options))
        return F.linear(x, matrix.values(), bias)

    def lookup(self, matrix: Coded, ids: Tensor) -> Tensor:
        """Return some rows, by operators that also leave as a graph; a row of zeros stays one."""
        from smelt.runtime.schemes.parts.packing import nibbles_as_floats

        flat = ids.flatten()
        places = nibbles_as_floats(matrix.tensor("codes").index_select(0, flat)).long()
        books = matrix.tensor("codebook").index_select(0, flat).float() - _MIDDLE
        stored = matrix.tensor(parts.HALF_SCALES if matrix.has(parts.HALF_SCALES) else "scales")
        scales = stored.index_select(0, flat).float()[..., None]
        rows = (books.gather(2, places) * scales).flatten(1)[:, : matrix.width]
        return rows.reshape(*ids.shape, matrix.width)

    def rounds_activations(self, options: Options) -> bool:
        """Say whether the accuracy level is 4."""
        return parts.rounds_activations(options)

    def graph_tensors(self, matrix: Coded, use: Use) -> dict[str, Tensor]:
        """Return the scales in 16 bits."""
        return parts.graph_tensors(matrix)

    def emit_product(self, matrix: Coded, x: Tensor, bias: Tensor | None, target: str) -> Tensor:
        """Emit MatMulNBits with 8 bits, which are looked up in the codebooks when the graph is loaded."""
        from smelt.runtime.layers import emit

        places = emit.spread(_TABLE, matrix.tensor("codes"), 2)
        codes = matrix.tensor("codebook").gather(2, places.long())
        scales, options = matrix.tensor(parts.HALF_SCALES), matrix.options
        layout = emit.Layout(matrix.width, scales.shape[0], 8, self.group(matrix.width, options))
        level = int(options[parts.ACCURACY_LEVEL.name])
        return emit.matmul_nbits(x, codes, scales, None, bias, layout, level)

    def exact_nodes(self, node: Any) -> list[Any]:
        """Return the same operator at accuracy level 0."""
        return parts.exact_nodes(node)

    def load_tables(self) -> dict[str, Any]:
        """Return for each byte of two codes these, the low one first, uint8 [256, 2]."""
        import numpy as np

        both = np.arange(256, dtype=np.uint8)
        return {_TABLE: np.stack([both & 15, both >> 4], axis=1)}


def _codebooks(steps: Tensor, counts: Tensor) -> Tensor:
    """Return codebooks, uint8 [N, G, 16], for weights in scales, float32 [N, G, g].

    Args:
        steps: between -127 and 127, but for the rounding of the scales.
        counts: how many of each group are weights, int64 [G]; the others stand behind them.
    """
    import torch

    size = steps.shape[2]
    counts = counts.expand(steps.shape[:2])[..., None]
    filling = torch.arange(size, device=steps.device) >= counts
    rising = steps.double().masked_fill(filling, torch.inf).sort(dim=-1).values
    sums = torch.nn.functional.pad(rising.masked_fill(filling, 0).cumsum(dim=-1), (1, 0))
    weights = rising.masked_fill(filling, 0)
    has_zero = (weights == 0).logical_and(~filling).any(dim=-1, keepdim=True)
    ends = [
        _rounded(_lloyd(start, rising, sums, counts), has_zero) for start in _starts(rising, filling, counts)
    ]
    errors = [(_on(end, weights) - weights).masked_fill(filling, 0).square().sum(dim=-1) for end in ends]
    best, least = ends[0], errors[0]
    for end, error in zip(ends[1:], errors[1:], strict=True):
        best = end.where((error < least)[..., None], best)
        least = error.minimum(least)
    return (best + _MIDDLE).byte()


def _starts(rising: Tensor, filling: Tensor, counts: Tensor) -> list[Tensor]:
    """Return centres to start from, each float64 [N, G, 16], rising; arguments as of `_lloyd`."""
    import torch

    last = rising.gather(2, counts - 1)
    parts_of_all = (torch.arange(ENTRIES, device=rising.device) + 0.5) / ENTRIES
    first = rising[..., :1]
    even = first + (last - first) * torch.linspace(0, 1, ENTRIES, device=rising.device)
    largest = first.where(-first > last, last)
    whole = largest * -torch.linspace(-1, 1, ENTRIES + 1, device=rising.device)[:-1]
    quantiles = rising.gather(2, (parts_of_all * counts).long())
    gaps = rising.masked_fill(filling, 0).diff(dim=-1, prepend=first).clamp(min=0)
    ways = gaps.pow(_GAPS).masked_fill(filling, 0).cumsum(dim=-1)
    there = torch.searchsorted(ways, (ways[..., -1:] * parts_of_all).contiguous())
    dense = rising.gather(2, there.minimum(counts - 1))
    return [even, whole.sort(dim=-1).values, (even + quantiles) / 2, dense]


def _lloyd(centres: Tensor, rising: Tensor, sums: Tensor, counts: Tensor) -> Tensor:
    """Return the centres after `ROUNDS` of: each weight to the nearest, each centre to the mean of its own.

    Args:
        centres: float64 [N, G, 16], rising.
        rising: the weights, sorted, infinity behind them.
        sums: of the first n weights, float64 [N, G, g + 1].
        counts: of weights, [N, G, 1].
    """
    import torch

    for _ in range(ROUNDS):
        between = ((centres[..., 1:] + centres[..., :-1]) / 2).contiguous()
        ends = torch.searchsorted(rising, between, right=True)
        ends = torch.cat([torch.zeros_like(counts), ends, counts], dim=-1)
        own = ends.diff(dim=-1)
        means = sums.gather(2, ends).diff(dim=-1) / own.clamp(min=1)
        centres = means.where(own > 0, centres).sort(dim=-1).values
    return centres


def _rounded(centres: Tensor, has_zero: Tensor) -> Tensor:
    """Return centres as whole numbers; the one nearest to 0 as 0 where the group has a weight of 0."""
    import torch

    whole = centres.round().clamp(-_LARGEST, _LARGEST)
    nearest = whole.abs().argmin(dim=-1, keepdim=True)
    places = torch.arange(ENTRIES, device=centres.device)
    return whole.masked_fill((places == nearest) & has_zero, 0)


def _on(values: Tensor, weights: Tensor) -> Tensor:
    """Return of rising `values` [N, G, 16] the nearest to each of `weights` [N, G, g]."""
    import torch

    between = ((values[..., 1:] + values[..., :-1]) / 2).contiguous()
    return values.gather(2, torch.searchsorted(between, weights.contiguous()))
