"""Calibration of activation ranges on samples.

A calibration method returns the magnitude that maps to the largest quantized value:

- minmax: the largest observed value; no clipping.
- percentile: the magnitude that this percentage of the values does not exceed.
- entropy: the threshold whose coarse histogram is nearest to the fine one (Kullback-Leibler divergence;
  Migacz, 8-bit inference with TensorRT, GTC 2017).
- mse: the threshold with the least squared error of rounding and clipping.

The first three give the results of the calibrators of onnxruntime.quantization on the same values in one
batch (`onnxruntime/python/tools/quantization/calibrate.py`: MinMaxCalibrater, HistogramCollector). Here
values arrive in batches, in two passes: the first finds the extremes, the second fills histogram bins that
therefore do not depend on the batches. Of thresholds that are equally good but for rounding, the smallest is
chosen.

A quantized convolution rounds its inputs. So that a runtime can pass integers from one to the next, residual
sums and inputs of max pools are rounded too (`smelt/quantization/layers.py`). Batch norms are folded
before, because the folded kernels are quantized.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from smelt.calibration.samples import CalibrationSamples, ObserveInputs
from smelt.compress.quantize.plan_layers import PlannedLayer
from smelt.compress.quantize.settings import CalibrationMethod, QuantizeSettings
from smelt.core.errors import InputError
from smelt.core.near_ties import first_within_tolerance
from smelt.models.edits import Edit, replace_module
from smelt.models.families.registry import family_of
from smelt.models.layers import conv_end_names
from smelt.quantization.layers import QuantizedActivation

BINS = 2048
_NUM_LEVELS = 128  # quantized bins of a histogram of both signs
_MAX_INT8 = 127
_NUM_THRESHOLDS = 128  # candidates of mse, from an eighth of the largest magnitude upwards
_SMOOTHING = 1e-4

_INFINITE = np.float32(np.inf)

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

    Signed values for entropy, else magnitudes: from the smallest observed one, for mse from 0.
    """

    def __init__(self, method: CalibrationMethod, extremes: Extremes, bins: int = BINS) -> None:
        self.method, self.extremes, self._bins = method, extremes, bins
        largest = extremes.largest
        lowest = {"entropy": -largest, "percentile": extremes.least}.get(method, np.float32(0))
        self._range = cast("Any", (lowest, largest))  # float32, so that the edges are too
        self.counts: BinCounts = np.zeros(bins, dtype=np.int64)
        self.edges: FloatArray = np.histogram(np.zeros(0, np.float32), bins, range=self._range)[1]

    def update(self, x: Tensor) -> None:
        """Count inputs, float32 [rows, K]."""
        values = (x if self.method == "entropy" else x.abs()).numpy().ravel()
        counts, self.edges = np.histogram(values, self._bins, range=self._range)
        self.counts += counts

    def range_end(self, percentile: float) -> float:
        """Return the magnitude that maps to the largest quantized value.

        Args:
            percentile: percentile of the magnitudes, for the method percentile.
        """
        if self.method == "mse":
            return float(min(mse_range(self.counts, self.edges), self.extremes.largest))
        if self.method == "entropy":
            low, high = entropy_range(self.counts, self.edges)
        else:
            high = percentile_range(self.counts, self.edges, percentile)
            low = -high
        return float(max(abs(max(low, self.extremes.low)), abs(min(high, self.extremes.high))))


def percentile_range(counts: BinCounts, edges: FloatArray, percentile: float) -> Any:
    """Return the lower edge of the bin that contains the percentile."""
    cumulative = np.cumsum(counts / counts.sum())
    return edges.astype(np.float32)[np.searchsorted(cumulative, percentile / 100.0)]


def mse_range(counts: BinCounts, edges: FloatArray) -> np.floating[Any]:
    """Return the threshold with the least squared int8 quantization error of the bin centers."""
    centers = (edges[:-1] + edges[1:]).astype(np.float64) / 2
    thresholds = edges[-1] * np.arange(_NUM_THRESHOLDS // 8, _NUM_THRESHOLDS + 1) / _NUM_THRESHOLDS
    errors = []
    for threshold in thresholds:
        step = threshold / _MAX_INT8 or 1.0
        quantized = np.clip(np.rint(centers / step), -_MAX_INT8 - 1, _MAX_INT8) * step
        errors.append(float((counts * (centers - quantized) ** 2).sum()))
    best_threshold: np.floating[Any] = thresholds[first_within_tolerance(errors)]
    return best_threshold


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
) -> dict[int, float]:
    """Return the magnitude that maps to the largest quantized value, by `PlannedLayer.weight_id`.

    Layers that share a weight share a range. Layers that no sample reaches are left out.

    Args:
        layers: planned layers; those without activation ranges are ignored.
        samples: calibration samples.
        settings: settings with `calibration_method` and `calibration_percentile`.
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
    ranges = observe_ranges(modules, names, samples, settings, observe) if modules else {}
    return {int(key): observed.largest for key, observed in ranges.items()}


@dataclass(frozen=True)
class ObservedRange:
    """Observed inputs: the magnitude that maps to the largest quantized value; whether any is negative."""

    largest: float
    signed: bool


def observe_ranges(
    modules: Mapping[str, Sequence[nn.Module]],
    names: Mapping[str, str],
    samples: CalibrationSamples,
    settings: QuantizeSettings,
    observe: ObserveInputs,
) -> dict[str, ObservedRange]:
    """Return the input ranges of `modules`, by the caller's keys, without those that no sample reaches.

    Args:
        modules: those of one key share a range.
        names: names for messages, by key.
        samples: calibration samples.
        settings: settings with `calibration_method` and `calibration_percentile`.
        observe: see `calibrate_ranges`.

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
    signed = {key: bool(limits.low < 0) for key, limits in with_samples.items()}
    if settings.calibration_method == "minmax":
        return {
            key: ObservedRange(float(limits.largest), signed[key]) for key, limits in with_samples.items()
        }
    histograms = {key: Histogram(settings.calibration_method, limits) for key, limits in with_samples.items()}

    def count(key: str, x: Tensor) -> None:
        histograms[key].update(x)

    observe({key: modules[key] for key in with_samples}, count)
    return {
        key: ObservedRange(histogram.range_end(settings.calibration_percentile), signed[key])
        for key, histogram in histograms.items()
    }


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
    if family is None or family.conv_and_norm is None or family.conv_chain is None:
        return []
    convolution, norm = family.conv_and_norm
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
) -> tuple[list[PlannedLayer], dict[int, float], dict[str, ObservedRange]]:
    """Calibrate the input ranges of convolutions and rounding points.

    Returns:
        The layers, unsigned if no input is negative; the ranges of the convolutions; and the observed ranges
        of the rounding points by name.
    """
    convolutions = {layer.name: layer for layer in layers if isinstance(layer.module, nn.Conv2d)}
    if not convolutions:
        return list(layers), {}, {}
    points = [point for point in rounding_points(model) if point.convolution in convolutions]
    modules = {name: [layer.module] for name, layer in convolutions.items()} | {
        p.name: [model.get_submodule(p.name)] for p in points if p.range_source not in convolutions
    }
    observed = observe_ranges(modules, {name: name for name in modules}, samples, settings, observe)
    signed = {name: observed_range.signed for name, observed_range in observed.items()}
    updated = [replace(layer, signed=signed.get(layer.name, True)) for layer in layers]
    ranges = {layer.weight_id: observed[n].largest for n, layer in convolutions.items() if n in observed}
    sources = {p.name: p.range_source if p.range_source in convolutions else p.name for p in points}
    return updated, ranges, {name: observed[source] for name, source in sources.items()}


def insert_rounding(model: Any, ranges: Mapping[str, ObservedRange]) -> list[Edit]:
    """Insert rounding before the modules in `ranges`; return the edits."""
    edits: list[Edit] = []
    for name, observed in ranges.items():
        rounding = QuantizedActivation(model.get_submodule(name), observed.signed)
        rounding.set_activation_range_(observed.largest)
        replace_module(model, name, rounding.eval())
        edits.append({"op": "round", "module": name, "signed": observed.signed})
    return edits
