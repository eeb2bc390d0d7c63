"""Scheme kmeans4: 4-bit weights, indices into a codebook of 16 values for each group of a row's inputs.

value = (codebook[code] - 128) * scale; the codebook has bytes, scale = amax / 127 of the group. The 16
values minimize the squared error by Lloyd's iteration (Lloyd 1982, Least squares quantization
in PCM; for weights Han et al. 2016, Deep Compression, arXiv:1510.00149, section 3). Its result depends on
its start. So it starts from values spread evenly over the group's range (the best in the paper),
from those of int4, from halfway between even ones and quantiles, and from a density of least error, and the
best result is kept: apart from the rounding to bytes no group has a larger error than in int4, and no random
numbers are used. Where a group has zero weights, the value nearest to 0 becomes 0, so that pruned weights
stay 0.

A file stores codes, codebooks and scales; when a graph is loaded the indices become the bytes, which
MatMulNBits multiplies as 8-bit codes: a small file, with the memory and speed of int8-groupwise.

Shapes: N = outputs (rows), K = inputs (columns), g = inputs that share a codebook, G = ceil(K / g).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from smelt.core.near_ties import is_better
from smelt.quantization import groupwise as parts
from smelt.quantization.scheme import (
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

# here the inputs of a row that share a codebook
KMEANS_GROUP_SIZE = SchemeOption("group_size", 256, (128, 256), parts.GROUP_SIZE.description)
CODEBOOK_SIZE = 16
LLOYD_ITERATIONS = 25
_LARGEST, _MIDDLE = 127, 128
_TABLE = "BytesOfNibbles"
# The density of values of least error is the cube root of the weights' density (Panter and Dite 1951), which
# is one over the gap between neighbors: so evenly along the sum of gaps^(2/3).
_GAPS = 2 / 3
_ROWS = 4096  # rows that are fitted at once, which limits the memory of the fit


class Kmeans4(parts.GroupwiseScheme):
    """codes: uint8 [N, G, g / 2]; codebook: uint8 [N, G, 16], rising; scales: float32 [N, G], as float16."""

    name: ClassVar[str] = "kmeans4"
    summary: ClassVar[str] = "4-bit weights, a codebook of 16 values per group of inputs"
    recommended_for: ClassVar[str] = f"small files; as fast as {Int8Groupwise.name}"
    source: ClassVar[str] = "Han et al. 2016, Deep Compression, arXiv:1510.00149 (weights that share values)"
    option_specs: ClassVar[tuple[SchemeOption, ...]] = (KMEANS_GROUP_SIZE, parts.ACCURACY_LEVEL)
    exported_as: ClassVar[str] = f"{name} weights (MatMulNBits)"
    # activations are rounded, in blocks up to twice as long as int4's
    tolerance: ClassVar[float] = 0.04
    embedding_tolerance: ClassVar[float] = 0.04
    learnable_scales: ClassVar[bool] = False
    represents_zero: ClassVar[bool] = False
    supports_clipping: ClassVar[bool] = False

    def compute_qparams(self, groups: Tensor, width: int, options: SchemeOptions) -> QuantParams:
        """Return scales and codebooks, uint8 [N, G, 16], without the padding of the last group."""
        import torch

        scales = (groups.abs().amax(dim=-1) / _LARGEST).half().float()
        steps = groups * parts.safe_reciprocal(scales)[..., None]
        counts = torch.full(groups.shape[1:2], groups.shape[2], device=groups.device)
        counts[-1] -= groups.shape[1] * groups.shape[2] - width
        books = [_fit_codebooks(chunk, counts) for chunk in steps.split(_ROWS)]
        return {"scales": scales, "codebook": torch.cat(books)}

    def quantize(self, groups: Tensor, grid: QuantParams, options: SchemeOptions) -> Tensor:
        """Return the indices of the nearest values, uint8; a midpoint belongs to the lower one."""
        import torch

        values = grid["codebook"].float() - _MIDDLE
        steps = (groups * parts.safe_reciprocal(grid["scales"])[..., None]).contiguous()
        midpoints = ((values[..., 1:] + values[..., :-1]) / 2).expand(*steps.shape[:2], -1).contiguous()
        return torch.searchsorted(midpoints, steps).byte()

    def dequantize(self, codes: Tensor, grid: QuantParams, options: SchemeOptions) -> Tensor:
        """Return (codebook[code] - 128) * scale."""
        books = grid["codebook"].expand(*codes.shape[:2], -1)
        return (books.gather(2, codes.long()).float() - _MIDDLE) * grid["scales"][..., None]

    def stored_tensors(self, rows: int, width: int, options: SchemeOptions) -> dict[str, StoredTensor]:
        """Return the specs of two codes per byte, codebooks and scales."""
        size = self.group_size(width, options)
        count = parts.num_groups(width, size)
        return {
            "codes": StoredTensor((rows, count, size // 2), "uint8"),
            "codebook": StoredTensor((rows, count, CODEBOOK_SIZE), "uint8"),
            "scales": StoredTensor((rows, count), "float32", file_dtype="float16"),
        }

    def pack(self, decided: UnpackedWeights, options: SchemeOptions) -> dict[str, Tensor]:
        """Return the tensors of `stored_tensors`."""
        return {
            "codes": parts.pack_nibbles(decided.q_weight),
            "codebook": decided.qparams["codebook"],
            "scales": decided.qparams["scales"].half().float(),
        }

    def unpack(self, matrix: PackedMatrix) -> UnpackedWeights:
        """Return the codes as uint8."""
        grid = {"scales": matrix.tensor("scales"), "codebook": matrix.tensor("codebook")}
        return UnpackedWeights(parts.unpack_nibbles(matrix.tensor("codes")), grid)

    def lookup(self, matrix: PackedMatrix, ids: Tensor) -> Tensor:
        """Return some rows, with operators that can be exported; a row of zeros stays zero."""
        flat = ids.flatten()
        indices = parts.unpack_nibbles_float(matrix.tensor("codes").index_select(0, flat)).long()
        books = matrix.tensor("codebook").index_select(0, flat).float() - _MIDDLE
        stored_scales = matrix.tensor(parts.FLOAT16_SCALES if matrix.has(parts.FLOAT16_SCALES) else "scales")
        scales = stored_scales.index_select(0, flat).float()[..., None]
        values = (books.gather(2, indices) * scales).flatten(1)[:, : matrix.width]
        return values.reshape(*ids.shape, matrix.width)

    def emit_linear(self, matrix: PackedMatrix, x: Tensor, bias: Tensor | None, target: str) -> Tensor:
        """Emit MatMulNBits with 8 bits, which are looked up in the codebooks when the graph is loaded."""
        from smelt.quantization import emit

        indices = emit.expand_by_table(_TABLE, matrix.tensor("codes"), 2)
        values = matrix.tensor("codebook").gather(2, indices.long())
        scales, options = matrix.tensor(parts.FLOAT16_SCALES), matrix.options
        layout = emit.NBitsLayout(matrix.width, scales.shape[0], 8, self.group_size(matrix.width, options))
        level = int(options[parts.ACCURACY_LEVEL.name])
        return emit.matmul_nbits(x, values, scales, None, bias, layout, level)

    def unpacking_tables(self) -> dict[str, Any]:
        """Return for each byte its two codes, the low one first, uint8 [256, 2]."""
        import numpy as np

        all_bytes = np.arange(256, dtype=np.uint8)
        return {_TABLE: np.stack([all_bytes & 15, all_bytes >> 4], axis=1)}


def _fit_codebooks(steps: Tensor, counts: Tensor) -> Tensor:
    """Return codebooks, uint8 [N, G, 16], for weights in units of scales, float32 [N, G, g].

    Args:
        steps: between -127 and 127, apart from the rounding of the scales.
        counts: number of weights in each group, int64 [G]; the others are padding after them.
    """
    import torch

    size = steps.shape[2]
    counts = counts.expand(steps.shape[:2])[..., None]
    filling = torch.arange(size, device=steps.device) >= counts
    sorted_steps = steps.double().masked_fill(filling, torch.inf).sort(dim=-1).values
    sums = torch.nn.functional.pad(sorted_steps.masked_fill(filling, 0).cumsum(dim=-1), (1, 0))
    weights = sorted_steps.masked_fill(filling, 0)
    has_zero = (weights == 0).logical_and(~filling).any(dim=-1, keepdim=True)
    candidates = [
        _round_centroids(_lloyd_iterations(start, sorted_steps, sums, counts), has_zero)
        for start in _initial_centroids(sorted_steps, filling, counts)
    ]
    errors = [
        (_nearest_value(end, weights) - weights).masked_fill(filling, 0).square().sum(dim=-1)
        for end in candidates
    ]
    best, lowest_error = candidates[0], errors[0]
    for end, error in zip(candidates[1:], errors[1:], strict=True):
        better = is_better(error, lowest_error)
        best, lowest_error = end.where(better[..., None], best), error.where(better, lowest_error)
    return (best + _MIDDLE).byte()


def _initial_centroids(rising: Tensor, filling: Tensor, counts: Tensor) -> list[Tensor]:
    """Return initial centers, each float64 [N, G, 16], rising; arguments as in `_lloyd_iterations`."""
    import torch

    last = rising.gather(2, counts - 1)
    parts_of_all = (torch.arange(CODEBOOK_SIZE, device=rising.device) + 0.5) / CODEBOOK_SIZE
    first = rising[..., :1]
    evenly_spaced = first + (last - first) * torch.linspace(0, 1, CODEBOOK_SIZE, device=rising.device)
    largest = first.where(-first > last, last)
    symmetric = largest * -torch.linspace(-1, 1, CODEBOOK_SIZE + 1, device=rising.device)[:-1]
    quantiles = rising.gather(2, (parts_of_all * counts).long())
    gaps = rising.masked_fill(filling, 0).diff(dim=-1, prepend=first).clamp(min=0)
    cumulative_gaps = gaps.pow(_GAPS).masked_fill(filling, 0).cumsum(dim=-1)
    positions = torch.searchsorted(cumulative_gaps, (cumulative_gaps[..., -1:] * parts_of_all).contiguous())
    dense = rising.gather(2, positions.minimum(counts - 1))
    return [evenly_spaced, symmetric.sort(dim=-1).values, (evenly_spaced + quantiles) / 2, dense]


def _lloyd_iterations(centers: Tensor, rising: Tensor, sums: Tensor, counts: Tensor) -> Tensor:
    """Return the centers after `LLOYD_ITERATIONS`: each weight to the nearest, each center to its mean.

    Args:
        centers: float64 [N, G, 16], rising.
        rising: the weights, sorted, padded with infinity.
        sums: of the first n weights, float64 [N, G, g + 1].
        counts: of weights, [N, G, 1].
    """
    import torch

    for _ in range(LLOYD_ITERATIONS):
        midpoints = ((centers[..., 1:] + centers[..., :-1]) / 2).contiguous()
        boundaries = torch.searchsorted(rising, midpoints, right=True)
        boundaries = torch.cat([torch.zeros_like(counts), boundaries, counts], dim=-1)
        cluster_sizes = boundaries.diff(dim=-1)
        means = sums.gather(2, boundaries).diff(dim=-1) / cluster_sizes.clamp(min=1)
        centers = means.where(cluster_sizes > 0, centers).sort(dim=-1).values
    return centers


def _round_centroids(centers: Tensor, has_zero: Tensor) -> Tensor:
    """Return centers as integers; the one nearest to 0 as 0 where the group has a weight of 0."""
    import torch

    integers = centers.round().clamp(-_LARGEST, _LARGEST)
    nearest = integers.abs().argmin(dim=-1, keepdim=True)
    positions = torch.arange(CODEBOOK_SIZE, device=centers.device)
    return integers.masked_fill((positions == nearest) & has_zero, 0)


def _nearest_value(values: Tensor, weights: Tensor) -> Tensor:
    """Return the value of rising `values` [N, G, 16] nearest to each of `weights` [N, G, g]."""
    import torch

    midpoints = ((values[..., 1:] + values[..., :-1]) / 2).contiguous()
    return values.gather(2, torch.searchsorted(midpoints, weights.contiguous()))
