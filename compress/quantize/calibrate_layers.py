"""Calibration before layers are quantized: selection of layers, ranges, weights and corrections.

A quantized convolution rounds its inputs. So that a runtime can pass integers from one to the next, residual
sums and inputs of max pools are rounded too (`smelt/quantization/layers.py`). Batch norms are folded
before, because the folded kernels are quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from torch import nn

from smelt.calibration.samples import CalibrationSamples, load_calibration_samples, observe_inputs
from smelt.compress.quantize.gptq import apply_gptq
from smelt.compress.quantize.plan_layers import (
    GridFinder,
    PlannedLayer,
    WeightQuantizer,
    require_finite_layers,
    round_on_grid,
    scheme_grid,
)
from smelt.compress.quantize.ranges import (
    MIN_CALIBRATION_TOKENS,
    ObservedRange,
    calibrate_ranges,
    observe_ranges,
)
from smelt.compress.quantize.settings import AUTO, MaxExcluded, QuantizeSettings
from smelt.core.artifact import Artifact
from smelt.core.messages import with_count
from smelt.core.stage import Context
from smelt.models.edits import Edit, replace_module
from smelt.models.empty_model import stored_dtypes
from smelt.models.families.registry import family_of
from smelt.models.layers import conv_end_names
from smelt.quantization.layers import QuantizedActivation
from smelt.quantization.scheme import UnpackedWeights
from smelt.quantization.schemes.registry import SCHEMES, bits_per_weight

if TYPE_CHECKING:
    from smelt.compress.quantize.low_rank_correction import CorrectedWeight


_MIN_SENSITIVITY_TOKENS = 32  # fewer do not measure a layer reliably
_MIN_SENSITIVITY_IMAGES, _MIN_CALIBRATION_IMAGES = 4, 32  # each image has many patches or positions
_SENSITIVITY_TEXT = "Layer sensitivities were"
_CORRECTION_TEXT = "The error metric of low-rank corrections was"
# by measurement: what it compares
_COMPARED = {_SENSITIVITY_TEXT: "layers", _CORRECTION_TEXT: "inputs"}


@dataclass
class CalibrationResult:
    """The layers to quantize, and their calibration results by `PlannedLayer.weight_id`.

    ranges: activation ranges. codes: quantized weights that are not rounded to nearest. corrections: low-rank
    corrections with their quantized weights. edits: edits of the model. rounding_ranges: observed ranges of
    the activations that are rounded before a module, by its name.
    """

    layers: list[PlannedLayer]
    ranges: dict[int, float] = field(default_factory=dict)
    codes: dict[int, UnpackedWeights] = field(default_factory=dict)
    corrections: dict[int, CorrectedWeight] = field(default_factory=dict)
    edits: list[dict[str, Any]] = field(default_factory=list)
    rounding_ranges: dict[str, ObservedRange] = field(default_factory=dict)


def calibrate_layers(
    model: Any, layers: list[PlannedLayer], src: Artifact, settings: QuantizeSettings, ctx: Context
) -> CalibrationResult:
    """Calibrate `layers` on samples as far as `settings` need it, and return the results.

    If weights were quantized on samples, the weights of `model` become the dequantized ones, or nearly.
    """
    if settings.needs_calibration and layers:
        return _calibrate_on_samples(model, layers, src, settings, ctx)
    result = CalibrationResult(layers)
    if settings.correction is not None:
        result.corrections = _find_corrections(model, result, None, src, settings, ctx)
    return result


def _calibrate_on_samples(
    model: Any, layers: list[PlannedLayer], src: Artifact, settings: QuantizeSettings, ctx: Context
) -> CalibrationResult:
    """Calibrate `layers` by running `model` on samples."""
    require_finite_layers(layers)
    samples = load_calibration_samples(model, src, settings.calibration_samples, ctx, "quantize")
    ctx.details["calibration"] = {
        "origin": samples.origin,
        "rows": samples.num_samples,
        "tokens": samples.tokens,
    }
    if settings.calibrates_correction:
        _warn_of_few_tokens(samples, _CORRECTION_TEXT, "calibration_samples", ctx)
    result = CalibrationResult(layers)
    if (
        settings.mixed_precision is not None
    ):  # first, because scales and clipping are searched for the chosen widths
        _choose_bit_widths(model, result, samples, src, settings, ctx)
    _move_scales(model, result, samples, src, settings, ctx)
    if settings.needs_activation_ranges:
        _calibrate_activations(model, result, samples, settings, ctx)
    if AUTO in settings.exclude or settings.needs_activation_ranges or settings.smoothquant_alpha is not None:
        _measure_sensitivity(model, result, samples, settings, ctx)
    if settings.compensates_rounding:
        find_grid = grid_finder(settings)
        result.codes, result.corrections = apply_gptq(
            model, result.layers, samples, find_grid, ctx, settings.correction
        )
        ctx.warnings[:] = dict.fromkeys(ctx.warnings)  # both methods warn about too few samples
    elif settings.correction is not None:
        result.corrections = _find_corrections(model, result, samples, src, settings, ctx)
    return result


def _move_scales(
    model: Any,
    result: CalibrationResult,
    samples: CalibrationSamples,
    src: Artifact,
    settings: QuantizeSettings,
    ctx: Context,
) -> None:
    """Move channel scales between the producers of the layers' inputs and their columns."""
    warn_of_few_activations(samples, settings, ctx)
    kind = stored_dtypes(src.path).dtype_for
    if settings.smoothquant_alpha is not None:
        from smelt.compress.quantize.smoothquant import apply_smoothquant

        apply_smoothquant(model, result.layers, samples, settings.smoothquant_alpha, kind, ctx)
    if settings.scales_inputs:
        from smelt.compress.quantize.awq import apply_awq

        clips = settings.clip == "awq"
        result.layers, result.edits, result.codes = apply_awq(model, result.layers, samples, clips, kind, ctx)


def _calibrate_activations(
    model: Any,
    result: CalibrationResult,
    samples: CalibrationSamples,
    settings: QuantizeSettings,
    ctx: Context,
) -> None:
    """Calibrate activation ranges; layers that no sample reaches stay float."""
    linear_layers = [layer for layer in result.layers if not isinstance(layer.module, nn.Conv2d)]
    observe = partial(observe_inputs, model, samples, ctx=ctx)
    ranges = calibrate_ranges(linear_layers, samples, settings, observe)
    result.layers, result.ranges, result.rounding_ranges = calibrate_convolutions(
        model, result.layers, ranges, samples, settings, ctx
    )
    result.layers, without_range = divide_by_range(result.layers, result.ranges)
    warn_of_missing_ranges(without_range, ctx)


def divide_by_range(
    layers: Sequence[PlannedLayer], ranges: Mapping[int, float]
) -> tuple[list[PlannedLayer], list[str]]:
    """Return the layers that have the range that they need, or need none, and the names of the others."""
    without_range = [layer.name for layer in layers if layer.needs_range and layer.weight_id not in ranges]
    return [layer for layer in layers if layer.name not in without_range], without_range


def warn_of_missing_ranges(unseen: Sequence[str], ctx: Context) -> None:
    """Warn about layers that no sample reaches, by their names; they stay float."""
    if unseen:
        ctx.warn(
            "uncalibrated-layers",
            f"No calibration sample reaches {', '.join(unseen)}; these layers are kept in float. Add"
            " calibration samples that use them, or exclude them.",
        )


def _choose_bit_widths(
    model: Any,
    result: CalibrationResult,
    samples: CalibrationSamples,
    src: Artifact,
    settings: QuantizeSettings,
    ctx: Context,
) -> None:
    """Choose the bits of each layer."""
    from smelt.compress.quantize.mixed_precision import choose_bit_widths

    subset, quantizer_of = samples.subset(settings.sensitivity_samples), quantizer_factory(settings, {})
    _warn_of_few_tokens(subset, _SENSITIVITY_TEXT, "sensitivity_samples and calibration_samples", ctx)
    result.layers = choose_bit_widths(model, result.layers, subset, src, settings, quantizer_of, ctx)


def _measure_sensitivity(
    model: Any,
    result: CalibrationResult,
    samples: CalibrationSamples,
    settings: QuantizeSettings,
    ctx: Context,
) -> None:
    """Measure the sensitivity of each layer, and remove the most sensitive ones from the result."""
    from smelt.compress.quantize.mixed_precision import measure_layer_sensitivities, select_sensitive

    if not settings.sensitivity_samples:
        return
    subset = samples.subset(settings.sensitivity_samples)
    _warn_of_few_tokens(subset, _SENSITIVITY_TEXT, "sensitivity_samples and calibration_samples", ctx)
    sensitivities = measure_layer_sensitivities(model, result.layers, result.ranges, subset, ctx)
    ctx.details["sensitivity"] = {name: float(f"{value:.3g}") for name, value in sensitivities.items()}
    ctx.details["sensitivity_samples"] = subset.num_samples
    excluded = (
        select_sensitive(sensitivities, settings.max_excluded or MaxExcluded())
        if AUTO in settings.exclude
        else []
    )
    result.layers = [layer for layer in result.layers if layer.name not in excluded]


def _find_corrections(
    model: Any,
    result: CalibrationResult,
    samples: CalibrationSamples | None,
    src: Artifact,
    settings: QuantizeSettings,
    ctx: Context,
) -> dict[int, CorrectedWeight]:
    """Return the low-rank corrections with their quantized weights, by `PlannedLayer.weight_id`."""
    from smelt.compress.quantize.low_rank_correction import find_corrections

    coder = partial(round_on_grid, grid_finder(settings))
    return find_corrections(model, result.layers, settings, coder, samples, src, ctx)


def report_corrections(
    result: CalibrationResult, src: Artifact, settings: QuantizeSettings, ctx: Context
) -> None:
    """Write the low-rank corrections to the details and warnings of `ctx`."""
    from smelt.compress.quantize.low_rank_correction import correction_details, oversized_correction_warnings

    assert settings.correction is not None
    ctx.details["low_rank_correction"] = correction_details(
        result.layers, result.corrections, settings.correction.rank
    )
    stored_bits = 8 * stored_dtypes(src.path).default.itemsize
    quantized_bits = bits_per_weight(SCHEMES[settings.scheme], settings.scheme_options(settings.scheme))
    ctx.warnings.extend(
        oversized_correction_warnings(result.layers, result.corrections, quantized_bits, stored_bits)
    )


def grid_finder(settings: QuantizeSettings) -> GridFinder:
    """Return the function that finds the grids of groups."""
    from smelt.compress.quantize.awq import mse_grid, percentile_grid
    from smelt.compress.quantize.hqq import hqq_grid

    if settings.method == "hqq":
        return hqq_grid
    if settings.clip == "percentile":
        return partial(percentile_grid, settings.calibration_percentile)
    return mse_grid if settings.clip == "mse" else scheme_grid


def quantizer_factory(
    settings: QuantizeSettings, codes: Mapping[int, UnpackedWeights]
) -> Callable[[PlannedLayer], WeightQuantizer]:
    """Return a function from layer to quantizer: the calibrated weights `codes`, else rounding to nearest."""
    find_grid = grid_finder(settings)

    def quantizer_of(layer: PlannedLayer) -> WeightQuantizer:
        precomputed = codes.get(layer.weight_id)
        return (
            partial(round_on_grid, find_grid)
            if precomputed is None
            else lambda weight, scheme, options: precomputed
        )

    return quantizer_of


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


def warn_of_few_activations(samples: CalibrationSamples, settings: QuantizeSettings, ctx: Context) -> None:
    """Warn if the extremes of activations are measured on too few tokens."""
    min_tokens = _MIN_CALIBRATION_IMAGES if "pixel_values" in samples.batches[0] else MIN_CALIBRATION_TOKENS
    measured = settings.needs_activation_ranges or settings.smoothquant_alpha is not None
    if not measured or samples.tokens >= min_tokens:
        return
    quantity, effect = "activation ranges", "larger values in other samples will be clipped"
    if not settings.needs_activation_ranges:
        quantity, effect = "largest activations of each channel", "other samples may have larger values"
    ctx.warn(
        "few-calibration-tokens",
        f"Only {with_count(samples.tokens, 'calibration token')}"
        f" ({with_count(samples.num_samples, 'sample')} of {samples.origin}) for the {quantity}; {effect}."
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
    ranges: Mapping[int, float],
    samples: CalibrationSamples,
    settings: QuantizeSettings,
    ctx: Context,
) -> tuple[list[PlannedLayer], dict[int, float], dict[str, ObservedRange]]:
    """Calibrate the input ranges of convolutions and rounding points.

    Returns:
        The layers, unsigned if no input is negative; `ranges` with those of the layers; and the observed
        ranges of the rounding points by name.
    """
    convolutions = {layer.name: layer for layer in layers if isinstance(layer.module, nn.Conv2d)}
    if not convolutions:
        return list(layers), dict(ranges), {}
    points = [point for point in rounding_points(model) if point.convolution in convolutions]
    point_modules = {
        p.name: [model.get_submodule(p.name)] for p in points if p.range_source not in convolutions
    }
    conv_modules = {name: [layer.module] for name, layer in convolutions.items()}
    observe = partial(observe_inputs, model, samples, ctx=ctx)
    observed = observe_ranges(
        conv_modules | point_modules,
        {name: name for name in conv_modules | point_modules},
        samples,
        settings,
        observe,
    )
    signed = {name: measured.signed for name, measured in observed.items()}
    updated = [replace(layer, signed=signed.get(layer.name, True)) for layer in layers]
    measured = {
        convolutions[name].weight_id: observed[name].largest for name in conv_modules if name in observed
    }
    rounding_ranges = {
        p.name: observed[p.range_source if p.range_source in convolutions else p.name] for p in points
    }
    return updated, dict(ranges) | measured, rounding_ranges


def insert_rounding(model: Any, ranges: Mapping[str, ObservedRange]) -> list[Edit]:
    """Insert rounding before the modules in `ranges`; return the edits."""
    edits: list[Edit] = []
    for name, observed in ranges.items():
        rounding = QuantizedActivation(model.get_submodule(name), observed.signed)
        rounding.set_activation_range_(observed.largest)
        replace_module(model, name, rounding.eval())
        edits.append({"op": "round", "module": name, "signed": observed.signed})
    return edits
