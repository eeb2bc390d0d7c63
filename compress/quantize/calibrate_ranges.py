"""Calibration of activation ranges on samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from smelt.compress.calibration.input_hooks import observe_inputs
from smelt.compress.calibration.samples import CalibrationSamples
from smelt.compress.quantize.plan_layers import PlannedLayer
from smelt.compress.quantize.range_methods import Extremes, Histogram
from smelt.compress.quantize.settings import QuantizeSettings
from smelt.core.errors import InputError
from smelt.core.stage import Context

# Fewer tokens are not representative.
MIN_CALIBRATION_TOKENS = 1000


def calibrate_ranges(
    model: Any,
    layers: Sequence[PlannedLayer],
    samples: CalibrationSamples,
    settings: QuantizeSettings,
    ctx: Context,
) -> dict[int, float]:
    """Return the magnitude that maps to the largest quantized value, by `PlannedLayer.weight_id`.

    Layers that share a weight share a range. Layers that no sample reaches are left out.

    Args:
        model: in eval mode.
        layers: its planned layers; those without activation ranges are ignored.
        samples: calibration samples; run twice for methods with histograms.
        settings: settings with `calibration_method` and `calibration_percentile`.
        ctx: reports progress.

    Raises:
        InputError: activations are not finite.
    """
    modules: dict[str, list[nn.Module]] = {}
    names: dict[str, str] = {}
    for layer in layers:
        if layer.needs_range:
            modules.setdefault(str(layer.weight_id), []).append(layer.module)
            names.setdefault(str(layer.weight_id), layer.name)
    found = observe_ranges(model, modules, names, samples, settings, ctx)
    return {int(key): seen.largest for key, seen in found.items()}


@dataclass(frozen=True)
class ObservedRange:
    """Observed inputs: the magnitude that maps to the largest quantized value; whether any is negative."""

    largest: float
    signed: bool


def observe_ranges(
    model: Any,
    modules: Mapping[str, Sequence[nn.Module]],
    names: Mapping[str, str],
    samples: CalibrationSamples,
    settings: QuantizeSettings,
    ctx: Context,
) -> dict[str, ObservedRange]:
    """Return the input ranges of `modules`, by the caller's keys, without those that no sample reaches.

    Args:
        model: in eval mode.
        modules: its modules; those of one key share a range.
        names: names for messages, by key.
        samples: calibration samples; run twice for methods with histograms.
        settings: settings with `calibration_method` and `calibration_percentile`.
        ctx: reports progress.

    Raises:
        InputError: activations are not finite.
    """
    extremes = {key: Extremes() for key in modules}
    observe_inputs(model, samples, modules, lambda key, x: extremes[key].update(x), ctx)
    for key, seen in extremes.items():
        if seen.rows and not float(seen.largest) < float("inf"):
            raise InputError(
                f"quantize: {names[key]}: the layer's inputs on samples of {samples.origin} are not"
                " finite. The training before this step has probably diverged; lower its learning_rate.",
                code="non-finite-activations",
            )
    reached = {key: seen for key, seen in extremes.items() if seen.rows}
    signed = {key: bool(seen.low < 0) for key, seen in reached.items()}
    if settings.calibration_method == "minmax":
        return {key: ObservedRange(float(seen.largest), signed[key]) for key, seen in reached.items()}
    counted = {key: Histogram(settings.calibration_method, seen) for key, seen in reached.items()}

    def count(key: str, x: Tensor) -> None:
        counted[key].update(x)

    observe_inputs(model, samples, {key: modules[key] for key in reached}, count, ctx)
    return {
        key: ObservedRange(found.range_end(settings.calibration_percentile), signed[key])
        for key, found in counted.items()
    }
