"""Calibration of activation ranges on samples.

A calibration method returns the range of activations that are not clipped:

- minmax: the observed range.
- percentile: symmetric: the magnitude that this percentage of the values does not exceed; else the range of
  this percentage of the values, with equally many beyond each end.
- entropy: the threshold whose coarse histogram is nearest to the fine one (Kullback-Leibler divergence;
  Migacz, 8-bit inference with TensorRT, GTC 2017).
- mse: the fraction of the observed range with the least squared error of rounding and clipping.

The ends are in the observed range. The first three give the results of the calibrators of
onnxruntime.quantization on the same values in one batch
(`onnxruntime/python/tools/quantization/calibrate.py`: MinMaxCalibrater, HistogramCollector). Here values
arrive in batches, in two passes: the first finds the extremes, the second fills histogram bins that therefore
do not depend on the batches. Of thresholds that are equally good but for rounding, the smallest is chosen.

A quantized convolution rounds its inputs. So that a runtime can pass integers from one to the next, residual
sums and inputs of max pools are rounded too (`smelt/quantization/layers.py`). Batch norms are folded
before, because the folded kernels are quantized.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from smelt.calibration.samples import CalibrationSamples, ObserveInputs
from smelt.compress.quantize.plan_layers import ActivationRange, PlannedLayer
from smelt.compress.quantize.settings import CalibrationMethod, QuantizeSettings
from smelt.core.errors import InputError
from smelt.core.near_ties import first_within_tolerance
from smelt.models.edits import Edit, replace_module
from smelt.models.families.registry import family_of
from smelt.models.layers import conv_end_names
from smelt.quantization.layers import QuantizedActivation
from smelt.quantization.schemes.int8_static import activation_qparams
from smelt.quantization.schemes.registry import SCHEMES

BINS = 2048
_NUM_LEVELS = 128  # quantized bins of a histogram of both signs
_NUM_FRACTIONS = 128  # candidates of mse, from an eighth of the observed range upwards
_SMOOTHING = 1e-4

_INFINITE = np.float32(np.inf)
_SMALLEST_NORMAL = np.finfo(np.float32).smallest_normal

BinCounts = NDArray[np.int64]
FloatArray = NDArray[np.floating[Any]]


@dataclass
class Extremes:
    """Results of the first pass for a layer: low <= x <= high, least <= |x|, and the number of rows."""

    low: np.float32 = _INFINITE
    high: np.float32 = -_INFINITE
    least: np.float32 = _INFINITE
    rows: int = 0

    def update(self, x: Tensor) -> None:
        """Update with inputs, float32 [rows, K]."""
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
    """Histogram of `BINS` bins for a calibration method.

    Magnitudes for symmetric ranges, from the smallest observed one, for mse from 0; signed values for entropy
    and other ranges.
    """

    def __init__(
        self, method: CalibrationMethod, extremes: Extremes, symmetric: bool, bins: int = BINS
    ) -> None:
        self.method, self.extremes, self.symmetric, self._bins = method, extremes, symmetric, bins
        self._signed = method == "entropy" or not symmetric
        # bins of subnormal width have no edges where these are flushed to zero
        largest = max(extremes.largest, 2 * bins * _SMALLEST_NORMAL) if extremes.largest else np.float32(0)
        lowest = extremes.least if method == "percentile" else np.float32(0)
        # magnitudes that are almost equal have fewer float32 numbers between them than bins
        lowest = lowest if largest - lowest > 2 * bins * np.spacing(largest) else np.float32(0)
        lowest = -largest if self._signed else lowest
        self._range = cast("Any", (lowest, largest))  # float32, so that the edges are too
        self.counts: BinCounts = np.zeros(bins, dtype=np.int64)
        self.edges: FloatArray = np.histogram(np.zeros(0, np.float32), bins, range=self._range)[1]

    def update(self, x: Tensor) -> None:
        """Count inputs, float32 [rows, K]."""
        values = (x if self._signed else x.abs()).numpy().ravel()
        counts, self.edges = np.histogram(values, self._bins, range=self._range)
        self.counts += counts

    def activation_range(self, percentile: float) -> ActivationRange:
        """Return the range that is not clipped.

        Args:
            percentile: percentile of the values, for the method percentile.
        """
        extremes = self.extremes
        low: Any
        high: Any
        if self.method == "mse":
            low, high = mse_range(self.counts, self.edges, extremes, self.symmetric)
        elif self.method == "entropy":
            low, high = entropy_range(self.counts, self.edges)
        elif self.symmetric:
            high = percentile_edge(self.counts, self.edges, percentile / 100)
            low = -high
        else:
            outside = (100 - percentile) / 200
            low = percentile_edge(self.counts, self.edges, outside)
            high = percentile_edge(self.counts, self.edges, 1 - outside)
        return ActivationRange(float(max(low, extremes.low)), float(min(high, extremes.high)))


def percentile_edge(counts: BinCounts, edges: FloatArray, fraction: float) -> Any:
    """Return the lower edge of the bin that contains the quantile `fraction`."""
    cumulative = np.cumsum(counts / counts.sum())
    return edges.astype(np.float32)[np.searchsorted(cumulative, fraction)]


def mse_range(
    counts: BinCounts, edges: FloatArray, extremes: Extremes, symmetric: bool
) -> tuple[float, float]:
    """Return the fraction of the observed range with the least squared error of the bin centers."""
    centers = (edges[:-1] + edges[1:]).astype(np.float64) / 2
    largest = float(extremes.largest)
    low, high = (-largest, largest) if symmetric else (float(extremes.low), float(extremes.high))
    fractions = np.arange(_NUM_FRACTIONS // 8, _NUM_FRACTIONS + 1) / _NUM_FRACTIONS
    errors = []
    for fraction in fractions:
        scale, zero = activation_qparams(fraction * low, fraction * high, symmetric)
        quantized = np.clip(np.rint(centers / scale), -128 - zero, 127 - zero) * scale
        errors.append(float((counts * (centers - quantized) ** 2).sum()))
    best_fraction = fractions[first_within_tolerance(errors)]
    return best_fraction * low, best_fraction * high


def entropy_range(counts: BinCounts, edges: FloatArray, codes: int = _NUM_LEVELS) -> tuple[Any, Any]:
    """Return the signed edges for which `codes` coarse bins have the least divergence from the fine ones."""
    middle, half = len(counts) // 2, codes // 2
    sums = np.concatenate([[0], np.cumsum(counts)])
    divergences, limits = [], []
    for reach in range(half, middle + 1):
        start, end = middle - reach, min(middle + reach + 1, len(counts))
        limits.append((edges[start], edges[end]))
        fine = counts[start:end].copy()
        fine[0] += sums[start]  # clipped values
        fine[-1] += sums[-1] - sums[end]
        coarse = _requantize_bins(counts[start:end], codes, fine != 0)
        divergences.append(_divergence(_smooth(fine), _smooth(coarse)))
    return limits[first_within_tolerance(divergences)]


def _requantize_bins(inner: BinCounts, codes: int, nonempty: NDArray[np.bool_]) -> BinCounts:
    """Merge bins into `codes` coarse ones, and spread each count over its nonempty fine bins, rounded down.

    The last coarse bin also counts the remaining bins at the end, but does not extend over them.
    """
    merged = len(inner) // codes
    num_grouped = codes * merged
    coarse = inner[:num_grouped].reshape(codes, merged).sum(axis=1)
    coarse[-1] += inner[num_grouped:].sum()
    num_nonempty = nonempty[:num_grouped].reshape(codes, merged).sum(axis=1)
    counts_per_bin = np.where(num_nonempty > 0, coarse / np.maximum(num_nonempty, 1), 0).astype(np.int64)
    result = np.zeros(len(inner), dtype=np.int64)
    result[:num_grouped] = np.repeat(counts_per_bin, merged)
    return result


def _smooth(counts: BinCounts) -> NDArray[np.float32] | None:
    """Move a small probability from nonempty bins to empty ones; return None if all are empty."""
    empty = (counts == 0).astype(np.float32)
    num_empty = empty.sum()
    if num_empty == counts.size:
        return None
    reduction = _SMOOTHING * float(num_empty) / float(counts.size - num_empty)
    smoothed = counts.astype(np.float32)
    smoothed += _SMOOTHING * empty + (-reduction) * (counts != 0).astype(np.float32)
    return smoothed


def _divergence(p: NDArray[np.float32] | None, q: NDArray[np.float32] | None) -> float:
    if p is None or q is None:
        return float("inf")
    p, q = p / p.sum(), q / q.sum()
    return float(np.sum(p * np.log(p / q), dtype=p.dtype))


# Fewer tokens are not representative.
MIN_CALIBRATION_TOKENS = 1000


def calibrate_ranges(
    layers: Sequence[PlannedLayer],
    samples: CalibrationSamples,
    settings: QuantizeSettings,
    observe: ObserveInputs,
) -> dict[int, ActivationRange]:
    """Return the ranges of activations by `PlannedLayer.weight_id`.

    Layers that share a weight share a range. Layers that no sample reaches are left out.

    Args:
        layers: planned layers; those without activation ranges are ignored.
        samples: calibration samples.
        settings: settings with `range_method` and `calibration_percentile`.
        observe: calls back with the inputs of layers on the samples; called twice for methods with
            histograms.

    Raises:
        InputError: activations are not finite.
    """
    modules: dict[str, list[nn.Module]] = {}
    names: dict[str, str] = {}
    for layer in layers:
        if layer.needs_range:
            modules.setdefault(str(layer.weight_id), []).append(layer.module)
            names.setdefault(str(layer.weight_id), layer.name)
    if not modules:
        return {}
    ranges = observe_ranges(modules, names, samples, settings, observe, has_symmetric_ranges(layers))
    return {int(key): observed for key, observed in ranges.items()}


def has_symmetric_ranges(layers: Sequence[PlannedLayer]) -> bool:
    """Return whether activations have no zero points."""
    return all(SCHEMES[layer.scheme].has_symmetric_activations(layer.options) for layer in layers)


def observe_ranges(
    modules: Mapping[str, Sequence[nn.Module]],
    names: Mapping[str, str],
    samples: CalibrationSamples,
    settings: QuantizeSettings,
    observe: ObserveInputs,
    symmetric: bool,
) -> dict[str, ActivationRange]:
    """Return the input ranges of `modules`, by the caller's keys, without those that no sample reaches.

    Args:
        modules: those of one key share a range.
        names: names for messages, by key.
        samples: calibration samples.
        settings: settings with `range_method` and `calibration_percentile`.
        observe: see `calibrate_ranges`.
        symmetric: whether activations have no zero points.

    Raises:
        InputError: activations are not finite.
    """
    extremes = {key: Extremes() for key in modules}
    observe(modules, lambda key, x: extremes[key].update(x))
    for key, limits in extremes.items():
        if limits.rows and not float(limits.largest) < float("inf"):
            raise InputError(
                f"quantize: {names[key]}: the layer's inputs on samples of {samples.origin} are not"
                " finite. The training before this step has probably diverged; lower its learning_rate.",
                code="non-finite-activations",
            )
    with_samples = {key: limits for key, limits in extremes.items() if limits.rows}
    method = settings.range_method
    if method == "minmax":
        return {
            key: ActivationRange(float(limits.low), float(limits.high))
            for key, limits in with_samples.items()
        }
    histograms = {key: Histogram(method, limits, symmetric) for key, limits in with_samples.items()}

    def count(key: str, x: Tensor) -> None:
        histograms[key].update(x)

    observe({key: modules[key] for key in with_samples}, count)
    percentile = settings.calibration_percentile
    return {key: histogram.activation_range(percentile) for key, histogram in histograms.items()}


@dataclass(frozen=True)
class RoundingPoint:
    """A point where activations are rounded: before the module `name`.

    convolution: the convolution that must be quantized for the rounding to be useful. range_source: the
    convolution with the same inputs, whose range is used; None if the point has its own range.
    """

    name: str
    convolution: str
    range_source: str | None = None


def rounding_points(model: Any) -> list[RoundingPoint]:
    """Return the rounding points of a convolutional network with folded batch norms."""
    family = family_of(model)
    if family is None or family.conv_chain is None:
        return []
    convolution, norm = family.convs_and_norms[0]
    points: list[RoundingPoint] = []
    for name, module in model.named_modules():
        owner, _, attribute = name.rpartition(".")
        if attribute != family.conv_chain:
            continue
        links = [f"{name}.{child}" for child, _ in module.named_children()]
        input_name, _ = conv_end_names(model, f"{links[0]}.{convolution}")
        _, output_name = conv_end_names(model, f"{links[-1]}.{convolution}")
        shortcut = f"{owner}.{family.conv_shortcut}"
        if isinstance(model.get_submodule(shortcut), nn.Identity):
            points.append(RoundingPoint(shortcut, input_name, range_source=input_name))
        else:
            points.append(
                RoundingPoint(f"{shortcut}.{norm}", conv_end_names(model, f"{shortcut}.{convolution}")[1])
            )
        points.append(RoundingPoint(f"{links[-1]}.{norm}", output_name))
    return points + list(_max_pools(model))


def _max_pools(model: Any) -> list[RoundingPoint]:
    """Return the max pools between two convolutions, whose outputs are values of their inputs."""
    modules = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.MaxPool2d | nn.Conv2d)]
    return [
        RoundingPoint(name, reader, reader)
        for (name, module), (reader, next_module) in pairwise(modules)
        if isinstance(module, nn.MaxPool2d) and isinstance(next_module, nn.Conv2d)
    ]


def calibrate_convolutions(
    model: Any,
    layers: Sequence[PlannedLayer],
    samples: CalibrationSamples,
    settings: QuantizeSettings,
    observe: ObserveInputs,
) -> tuple[dict[int, ActivationRange], dict[str, ActivationRange]]:
    """Return the input ranges of convolutions, and those of rounding points by name."""
    convolutions = {layer.name: layer for layer in layers if isinstance(layer.module, nn.Conv2d)}
    if not convolutions:
        return {}, {}
    points = [point for point in rounding_points(model) if point.convolution in convolutions]
    modules = {name: [layer.module] for name, layer in convolutions.items()} | {
        p.name: [model.get_submodule(p.name)] for p in points if p.range_source not in convolutions
    }
    names, symmetric = {name: name for name in modules}, has_symmetric_ranges(layers)
    observed = observe_ranges(modules, names, samples, settings, observe, symmetric)
    ranges = {layer.weight_id: observed[n] for n, layer in convolutions.items() if n in observed}
    sources = {p.name: p.range_source if p.range_source in convolutions else p.name for p in points}
    return ranges, {name: observed[source] for name, source in sources.items()}


def insert_rounding(model: Any, ranges: Mapping[str, ActivationRange], symmetric: bool) -> list[Edit]:
    """Insert rounding before the modules in `ranges`; return the edits."""
    edits: list[Edit] = []
    for name, activation_range in ranges.items():
        rounding = QuantizedActivation(model.get_submodule(name))
        rounding.set_activation_range_(*activation_range, symmetric)
        replace_module(model, name, rounding.eval())
        edits.append({"op": "round", "module": name})
    return edits
