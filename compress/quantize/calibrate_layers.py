"""The parts of calibration that compare layers or correct weights, ranges of convolutions, and warnings.

A quantized convolution rounds its inputs. So that a runtime can pass integers from one to the next, residual
sums and inputs of max pools are rounded too (`smelt/quantization/layers.py`). Batch norms are folded
before, because the folded kernels are quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from torch import nn

from smelt.calibration.samples import CalibrationSamples, ObserveInputs
from smelt.compress.quantize.plan_layers import (
    GridFinder,
    PlannedLayer,
    WeightQuantizer,
    round_on_grid,
    scheme_grid,
)
from smelt.compress.quantize.ranges import (
    MIN_CALIBRATION_TOKENS,
    ObservedRange,
    observe_ranges,
)
from smelt.compress.quantize.settings import AUTO, MaxExcluded, QuantizeSettings
from smelt.core.artifact import Artifact
from smelt.core.messages import with_count
from smelt.models.edits import Edit, replace_module
from smelt.models.empty_model import stored_dtypes
from smelt.models.families.registry import family_of
from smelt.models.layers import conv_end_names
from smelt.quantization.layers import QuantizedActivation
from smelt.quantization.scheme import UnpackedWeights
from smelt.quantization.schemes.registry import SCHEMES, bits_per_weight
from smelt.stage import Context

if TYPE_CHECKING:
    from smelt.compress.quantize.low_rank_correction import CorrectedWeight


_MIN_SENSITIVITY_TOKENS = 32  # fewer do not measure a layer reliably
_MIN_SENSITIVITY_IMAGES, _MIN_CALIBRATION_IMAGES = 4, 32  # each image has many patches or positions
_SENSITIVITY_TEXT = "Layer sensitivities were"
_CORRECTION_TEXT = "The error metric of low-rank corrections was"
# by measurement: what it compares
_COMPARED = {_SENSITIVITY_TEXT: "layers", _CORRECTION_TEXT: "inputs"}


def warn_of_missing_ranges(unseen: Sequence[str], ctx: Context) -> None:
    """Warn about layers that no sample reaches, by their names; they stay float."""
    if unseen:
        ctx.warn(
            "uncalibrated-layers",
            f"No calibration sample reaches {', '.join(unseen)}; these layers are kept in float. Add"
            " calibration samples that use them, or exclude them.",
        )


def choose_layer_widths(
    model: Any,
    layers: Sequence[PlannedLayer],
    samples: CalibrationSamples,
    src: Artifact,
    settings: QuantizeSettings,
    ctx: Context,
) -> list[PlannedLayer]:
    """Return `layers` with the bits that mixed precision chooses for each."""
    from smelt.compress.quantize.mixed_precision import choose_bit_widths

    few = _sensitivity_samples(samples, settings, ctx)
    return choose_bit_widths(model, layers, few, src, settings, quantizer_for(settings, {}), ctx)


def exclude_sensitive(
    model: Any,
    layers: Sequence[PlannedLayer],
    ranges: Mapping[int, float],
    samples: CalibrationSamples,
    settings: QuantizeSettings,
    ctx: Context,
) -> list[PlannedLayer]:
    """Measure the sensitivities of layers; return `layers`, with `exclude: auto` less the most sensitive."""
    from smelt.compress.quantize.mixed_precision import measure_layer_sensitivities, select_sensitive

    automatic = AUTO in settings.exclude
    measured = automatic or settings.needs_activation_ranges or settings.smoothquant_alpha is not None
    if not measured or not settings.sensitivity_samples:
        return list(layers)
    few = _sensitivity_samples(samples, settings, ctx)
    sensitivities = measure_layer_sensitivities(model, layers, ranges, few, ctx)
    ctx.details["sensitivity"] = {name: float(f"{value:.3g}") for name, value in sensitivities.items()}
    ctx.details["sensitivity_samples"] = few.num_samples
    if not automatic:
        return list(layers)
    excluded = select_sensitive(sensitivities, settings.max_excluded or MaxExcluded())
    return [layer for layer in layers if layer.name not in excluded]


def _sensitivity_samples(
    samples: CalibrationSamples, settings: QuantizeSettings, ctx: Context
) -> CalibrationSamples:
    few = samples.subset(settings.sensitivity_samples)
    _warn_of_few_tokens(few, _SENSITIVITY_TEXT, "sensitivity_samples and calibration_samples", ctx)
    return few


def correct_layers(
    model: Any,
    layers: Sequence[PlannedLayer],
    samples: CalibrationSamples | None,
    src: Artifact,
    settings: QuantizeSettings,
    ctx: Context,
) -> dict[int, CorrectedWeight]:
    """Return the low-rank corrections with their quantized weights, by `PlannedLayer.weight_id`."""
    from smelt.compress.quantize.low_rank_correction import find_corrections

    quantizer = partial(round_on_grid, grid_finder(settings))
    return find_corrections(model, layers, settings, quantizer, samples, src, ctx)


def report_corrections(
    layers: Sequence[PlannedLayer],
    corrections: Mapping[int, CorrectedWeight],
    src: Artifact,
    settings: QuantizeSettings,
    ctx: Context,
) -> None:
    """Write the low-rank corrections to the details and warnings of `ctx`."""
    from smelt.compress.quantize.low_rank_correction import correction_details, oversized_correction_warnings

    assert settings.correction is not None
    ctx.details["low_rank_correction"] = correction_details(layers, corrections, settings.correction.rank)
    stored_bits = 8 * stored_dtypes(src.path).default.itemsize
    quantized = bits_per_weight(SCHEMES[settings.scheme], settings.scheme_options(settings.scheme))
    ctx.warnings.extend(oversized_correction_warnings(layers, corrections, quantized, stored_bits))


def grid_finder(settings: QuantizeSettings) -> GridFinder:
    """Return the function that finds the grids of groups."""
    from smelt.compress.quantize.awq import mse_grid, percentile_grid
    from smelt.compress.quantize.hqq import hqq_grid

    if settings.method == "hqq":
        return hqq_grid
    if settings.clip == "percentile":
        return partial(percentile_grid, settings.calibration_percentile)
    return mse_grid if settings.clip == "mse" else scheme_grid


def quantizer_for(
    settings: QuantizeSettings, precomputed: Mapping[int, UnpackedWeights]
) -> Callable[[PlannedLayer], WeightQuantizer]:
    """Return a function from layer to quantizer: the weights in `precomputed`, else rounding to nearest."""
    find_grid = grid_finder(settings)

    def quantizer(layer: PlannedLayer) -> WeightQuantizer:
        weights = precomputed.get(layer.weight_id)
        return partial(round_on_grid, find_grid) if weights is None else lambda *_: weights

    return quantizer


def _warn_of_few_tokens(samples: CalibrationSamples, what: str, which: str, ctx: Context) -> None:
    """Warn if `what` is measured on too few tokens; `which` names the settings to increase."""
    if samples.tokens < (
        _MIN_SENSITIVITY_IMAGES if "pixel_values" in samples.batches[0] else _MIN_SENSITIVITY_TOKENS
    ):
        ctx.warn(
            "few-sensitivity-tokens" if what == _SENSITIVITY_TEXT else "few-calibration-tokens",
            f"{what} measured on {with_count(samples.tokens, 'token')} of {samples.origin}, too few to"
            f" compare {_COMPARED[what]}. Increase {which}, or add data: {{calibration: FILE}}.",
        )


def warn_of_few_samples(samples: CalibrationSamples, settings: QuantizeSettings, ctx: Context) -> None:
    """Warn if the extremes of activations, or the metric of corrections, are measured on too few tokens."""
    if settings.calibrates_correction:
        _warn_of_few_tokens(samples, _CORRECTION_TEXT, "calibration_samples", ctx)
    enough = _MIN_CALIBRATION_IMAGES if "pixel_values" in samples.batches[0] else MIN_CALIBRATION_TOKENS
    measured = settings.needs_activation_ranges or settings.smoothquant_alpha is not None
    if not measured or samples.tokens >= enough:
        return
    what, why = "activation ranges", "larger values in other samples will be clipped"
    if not settings.needs_activation_ranges:
        what, why = "largest activations of each channel", "other samples may have larger values"
    ctx.warn(
        "few-calibration-tokens",
        f"Only {with_count(samples.tokens, 'calibration token')}"
        f" ({with_count(samples.num_samples, 'sample')} of {samples.origin}) for the {what}; {why}."
        f" Use {MIN_CALIBRATION_TOKENS:,} tokens or more: increase calibration_samples, or add data:"
        " {calibration: FILE}.",
    )


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
