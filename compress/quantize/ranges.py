"""Which magnitude of activations becomes the largest code, found from what a layer was fed.

- minmax: the largest value that was seen; nothing is cut off.
- percentile: that share of the values, by magnitude, lies inside.
- entropy: the cut whose coarse histogram is nearest to the fine one (Kullback-Leibler divergence; Migacz,
  8-bit inference with TensorRT, GTC 2017).
- mse: the cut with the least squared error of rounding and clipping together.

The first three give what the calibrators of onnxruntime.quantization give for the same values in one piece
(`onnxruntime/python/tools/quantization/calibrate.py`: MinMaxCalibrater, HistogramCollector). Values come
piece by piece here, in two passes: the first finds their extremes, the second counts them in bins that so do
not depend on the pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from smelt.compress.quantize.settings import Method

BINS = 2048
_CODES = 128  # quantized bins of a histogram of both signs
_LEVELS = 127
_CUTS = 128  # candidates of mse, from an eighth of the largest magnitude upwards
_SMOOTHED = 1e-4

_INFINITE = np.float32(np.inf)

Counts = NDArray[np.int64]
Floats = NDArray[np.floating[Any]]


@dataclass
class Extremes:
    """What a first pass keeps of a layer: low <= x <= high, least <= |x|; how many rows were seen."""

    low: np.float32 = _INFINITE
    high: np.float32 = -_INFINITE
    least: np.float32 = _INFINITE
    rows: int = 0

    def see(self, x: Tensor) -> None:
        """Take in float32 [rows, K]."""
        if not x.numel():
            return
        low, high = x.aminmax()
        self.low = min(self.low, np.float32(low.item()))
        self.high = max(self.high, np.float32(high.item()))
        self.least = min(self.least, np.float32(x.abs().amin().item()))
        self.rows += len(x)

    @property
    def largest(self) -> np.float32:
        """The largest magnitude."""
        return max(abs(self.low), abs(self.high))


class Histogram:
    """How many values lie in each of `BINS` bins, as `method` wants them.

    Of both signs for entropy, of magnitudes else: from the least one, for mse from 0.
    """

    def __init__(self, method: Method, extremes: Extremes, bins: int = BINS) -> None:
        self.method, self.extremes, self._bins = method, extremes, bins
        largest = extremes.largest
        lowest = {"entropy": -largest, "percentile": extremes.least}.get(method, np.float32(0))
        self._range = cast(Any, (lowest, largest))  # float32, so that the edges are too
        self.counts: Counts = np.zeros(bins, dtype=np.int64)
        self.edges: Floats = np.histogram(np.zeros(0, np.float32), bins, range=self._range)[1]

    def see(self, x: Tensor) -> None:
        """Count float32 [rows, K]."""
        values = (x if self.method == "entropy" else x.abs()).numpy().ravel()
        counts, self.edges = np.histogram(values, self._bins, range=self._range)
        self.counts += counts

    def cut(self, percentile: float) -> float:
        """Return the magnitude that becomes the largest code.

        Args:
            percentile: of the magnitudes, for that method.
        """
        if self.method == "mse":
            return float(min(least_squares(self.counts, self.edges), self.extremes.largest))
        if self.method == "entropy":
            low, high = least_divergence(self.counts, self.edges)
        else:
            high = inside(self.counts, self.edges, percentile)
            low = -high
        return float(max(abs(max(low, self.extremes.low)), abs(min(high, self.extremes.high))))


def inside(counts: Counts, edges: Floats, percentile: float) -> Any:
    """Return the edge below the bin in which `percentile` percent of the values are reached."""
    shares = np.cumsum(counts / counts.sum())
    return edges.astype(np.float32)[np.searchsorted(shares, percentile / 100.0)]


def least_squares(counts: Counts, edges: Floats) -> np.floating[Any]:
    """Return the magnitude at which int8 codes of the bins' centres have the least squared error."""
    centres = (edges[:-1] + edges[1:]).astype(np.float64) / 2
    cuts = edges[-1] * np.arange(_CUTS // 8, _CUTS + 1) / _CUTS
    errors = []
    for cut in cuts:
        step = cut / _LEVELS or 1.0
        left = np.clip(np.rint(centres / step), -_LEVELS - 1, _LEVELS) * step
        errors.append(float((counts * (centres - left) ** 2).sum()))
    best: np.floating[Any] = cuts[int(np.argmin(errors))]
    return best


def least_divergence(counts: Counts, edges: Floats, codes: int = _CODES) -> tuple[Any, Any]:
    """Return the edges, of the two signs, between which `codes` coarse bins tell most of the fine ones."""
    middle, half = len(counts) // 2, codes // 2
    sums = np.concatenate([[0], np.cumsum(counts)])
    found, limits = [], []
    for reach in range(half, middle + 1):
        begin, end = middle - reach, min(middle + reach + 1, len(counts))
        limits.append((edges[begin], edges[end]))
        fine = counts[begin:end].copy()
        fine[0] += sums[begin]  # what would be cut off
        fine[-1] += sums[-1] - sums[end]
        coarse = _spread_again(counts[begin:end], codes, fine != 0)
        found.append(_divergence(_smoothed(fine), _smoothed(coarse)))
    return limits[int(np.argmin(found))]


def _spread_again(inner: Counts, codes: int, there: NDArray[np.bool_]) -> Counts:
    """Merge bins to `codes` coarse ones, and give each fine bin that is not empty its share, cut to a whole.

    The last coarse bin has also what is left over at the end, but does not reach there.
    """
    merged = len(inner) // codes
    whole = codes * merged
    coarse = inner[:whole].reshape(codes, merged).sum(axis=1)
    coarse[-1] += inner[whole:].sum()
    filled = there[:whole].reshape(codes, merged).sum(axis=1)
    shares = np.where(filled > 0, coarse / np.maximum(filled, 1), 0).astype(np.int64)
    spread = np.zeros(len(inner), dtype=np.int64)
    spread[:whole] = np.repeat(shares, merged)
    return spread


def _smoothed(counts: Counts) -> NDArray[np.float32] | None:
    """Take a little off the bins that are not empty for those that are; None where all are."""
    empty = (counts == 0).astype(np.float32)
    many = empty.sum()
    if many == counts.size:
        return None
    taken = _SMOOTHED * float(many) / float(counts.size - many)
    smoothed = counts.astype(np.float32)
    smoothed += _SMOOTHED * empty + (-taken) * (counts != 0).astype(np.float32)
    return smoothed


def _divergence(p: NDArray[np.float32] | None, q: NDArray[np.float32] | None) -> float:
    if p is None or q is None:
        return float("inf")
    p, q = p / p.sum(), q / q.sum()
    return float(np.sum(p * np.log(p / q), dtype=p.dtype))
