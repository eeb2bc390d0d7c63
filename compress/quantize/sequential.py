"""Calibrate and quantize the layers of a model in memory, or of an offloaded one block by block.

Each method passes over the samples once, in this order: SmoothQuant, AWQ, activation ranges, GPTQ or a method
that tunes blocks. The last two go block by block; for the other methods a model in memory is one part. The
blocks of an offloaded model are read in each pass. SmoothQuant and AWQ calibrate the float model, so each
block is run with its original weights, and scaled when it is not run any more, or loaded again. It is
quantized and written in the last pass: the result equals that of the model in memory. Memory holds one block,
its inputs, the embedding, and at the end the output layer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from smelt.calibration.run_blocks import run_parts, visit_blocks
from smelt.calibration.samples import CalibrationSamples, load_calibration_samples
from smelt.calibration.sequential import ModelPart, RunningBlock
from smelt.compress.quantize.aqlm import Aqlm
from smelt.compress.quantize.autoround import AutoRound
from smelt.compress.quantize.awq import AwqRunner, mse_grid, percentile_grid
from smelt.compress.quantize.block_tuning import BlockTuner
from smelt.compress.quantize.gptq import GptqRunner
from smelt.compress.quantize.hqq import hqq_grid
from smelt.compress.quantize.low_rank_correction import (
    CorrectedWeight,
    correction_details,
    find_corrections,
    layers_to_correct,
    oversized_correction_warnings,
)
from smelt.compress.quantize.methods import supports_scheme
from smelt.compress.quantize.mixed_precision import (
    choose_bit_widths,
    measure_layer_sensitivities,
    select_sensitive,
)
from smelt.compress.quantize.nested_settings import MaxExcluded
from smelt.compress.quantize.plan_layers import (
    ActivationRange,
    GridFinder,
    PlannedLayer,
    WeightQuantizer,
    output_layer,
    plan_layers,
    quantize_layers,
    require_finite_layers,
    round_on_grid,
    scale_underflow_warnings,
    scheme_grid,
    small_weights,
)
from smelt.compress.quantize.ranges import (
    MIN_CALIBRATION_TOKENS,
    calibrate_convolutions,
    calibrate_ranges,
    has_symmetric_ranges,
    insert_rounding,
)
from smelt.compress.quantize.scale_targets import ScaleRunner, ScaleTarget, find_scale_targets
from smelt.compress.quantize.settings import AUTO, QuantizeSettings
from smelt.compress.quantize.smoothquant import SmoothQuantRunner, smoothing_targets
from smelt.core.artifact import Artifact
from smelt.core.messages import with_count
from smelt.models.edits import Edit
from smelt.models.empty_model import stored_dtypes
from smelt.models.families.registry import Block, blocks_of
from smelt.models.streamed_model import StreamedModel, open_streamed
from smelt.quantization.scheme import UnpackedWeights
from smelt.quantization.schemes.registry import SCHEMES, bits_per_weight, find_scheme
from smelt.runtimes.device import torch_device
from smelt.stage import Context

_TUNERS: dict[str, type[BlockTuner]] = {"autoround": AutoRound, "aqlm": Aqlm}
_MIN_SENSITIVITY_TOKENS = 32  # fewer do not measure a layer reliably
_MIN_SENSITIVITY_IMAGES, _MIN_CALIBRATION_IMAGES = 4, 32  # each image has many patches or positions
_SENSITIVITY_TEXT = "Layer sensitivities were"
_CORRECTION_TEXT = "The error metric of low-rank corrections was"
# by measurement: what it compares
_COMPARED = {_SENSITIVITY_TEXT: "layers", _CORRECTION_TEXT: "inputs"}


def open_large_model(src: Artifact, settings: QuantizeSettings, ctx: Context) -> StreamedModel | None:
    """Return a large model to be quantized block by block; None if it has to be loaded whole.

    It has to be loaded whole for some settings (`QuantizeSettings.loads_whole_model`), or if scales move
    between blocks (the last norm of an encoder is read by all blocks of the decoder); and where samples are
    used, on a GPU, or if linear layers other than the output layer are outside of all blocks.
    """
    on_samples = settings.needs_calibration
    if settings.loads_whole_model or (on_samples and torch_device(ctx.device) != "cpu"):
        return None
    offloaded = open_streamed(src.path, ctx.out)
    if offloaded is None or not on_samples:
        return offloaded
    model, layers = offloaded.model, plan_layers(offloaded.model, settings)
    inside, head = _block_by_module(model), output_layer(model)
    outside = [layer for layer in layers if layer.multiplies and layer.module not in inside]
    if any(layer.module is not head for layer in outside):
        return None
    targets: Sequence[ScaleTarget] = []
    if settings.scales_inputs:
        targets = find_scale_targets(model, layers)[0]
    elif settings.smoothquant_alpha is not None:
        targets = smoothing_targets(model, layers, settings.smoothquant_targets)
    paths = ({inside.get(module) for module in target.modules(model)} for target in targets)
    return None if any(len(blocks) > 1 for blocks in paths) else offloaded


def _block_by_module(model: Any) -> dict[nn.Module, str]:
    """Return the path of the first block with each module."""
    blocks = reversed(blocks_of(model))
    return {module: block.module_path for block in blocks for module in block.module.modules()}


def grid_finder(settings: QuantizeSettings) -> GridFinder:
    """Return the function that finds the grids of groups."""
    if settings.method == "hqq":
        return hqq_grid
    if settings.clip == "percentile":
        return partial(percentile_grid, settings.calibration_percentile)
    return mse_grid if settings.clip == "mse" else scheme_grid


def weight_quantizer(settings: QuantizeSettings) -> WeightQuantizer:
    """Return the function that rounds weights to nearest on the grid that `settings` choose."""
    return partial(round_on_grid, grid_finder(settings))


class SequentialQuantizer:
    """Calibrates and quantizes the planned layers of a model.

    Args:
        model: float32, in eval mode, on the CPU; changed in place.
        layers: its planned layers.
        src: the artifact of the model.
        settings: those of `open_large_model` for an offloaded model.
        ctx: data; receives details and warnings.
        offloaded: the model, if its blocks are in a file; every block is written, but not the rest.

    Attributes:
        layers: the layers to quantize.
        ranges: activation ranges by `PlannedLayer.weight_id`.
        codes: quantized weights that are not rounded to nearest, by `PlannedLayer.weight_id`.
        corrections: low-rank corrections with their quantized weights, by `PlannedLayer.weight_id`.
    """

    def __init__(
        self,
        model: Any,
        layers: Sequence[PlannedLayer],
        src: Artifact,
        settings: QuantizeSettings,
        ctx: Context,
        offloaded: StreamedModel | None = None,
    ) -> None:
        self.layers = list(layers)
        self.ranges: dict[int, ActivationRange] = {}
        self.codes: dict[int, UnpackedWeights] = {}
        self.corrections: dict[int, CorrectedWeight] = {}
        self._model, self._src, self._settings, self._ctx = model, src, settings, ctx
        self._offloaded, self._block_of = offloaded, _block_by_module(model)
        self._num_passes, self._pass = 0, -1
        self._scalers: list[ScaleRunner] = []
        self._small_weights: dict[str, Tensor] = {}
        self._rounding_ranges: dict[str, ActivationRange] = {}
        self._edits: list[Edit] = []

    def quantize(self) -> list[Edit]:
        """Calibrate and quantize the layers; return the edits: of scales, layers, and inserted rounding.

        Raises:
            InputError: weights or activations are not finite, there are no samples, or GPTQ cannot invert a
                Hessian.
        """
        self.calibrate()
        if self._offloaded is None:
            self._quantize(self.layers)
        if self.corrections:
            _report_corrections(self.layers, self.corrections, self._src, self._settings, self._ctx)
        order = {layer.name: number for number, layer in enumerate(self._renamed(self.layers))}
        edits = sorted(self._edits, key=lambda edit: order[_planned_name(edit, order)])
        scales = [edit for scaler in self._scalers for edit in scaler.ordered_edits()]
        rounding = insert_rounding(self._model, self._rounding_ranges, has_symmetric_ranges(self.layers))
        return [*scales, *edits, *rounding]

    def calibrate(self) -> None:
        """Calibrate the layers on samples as far as the settings need it; quantize an offloaded model.

        If weights were quantized on samples, the weights of a model in memory become the dequantized ones, or
        nearly.
        """
        settings = self._settings
        if self._offloaded is None:
            self._check_weights(self.layers)
        if settings.needs_calibration and self.layers:
            self._calibrate_on_samples()
        elif settings.correction is not None:
            self.corrections = _correct_layers(self._model, self.layers, None, self._src, settings, self._ctx)
        if self._offloaded is not None and not self._num_passes:
            for block in visit_blocks(self._model, self._ctx, self._offloaded):
                self._load(block)
                self._finish(block)
            self._load(None)
            self._finish(None)

    def _calibrate_on_samples(self) -> None:
        settings, ctx = self._settings, self._ctx
        reports_errors = settings.rounds_in_blocks or settings.scales_inputs
        samples = load_calibration_samples(
            self._model,
            self._src,
            settings.calibration_samples,
            ctx,
            "quantize",
            padded=settings.tunes_blocks,
            held_back=reports_errors or settings.calibrates_correction,
        )
        ctx.details["calibration"] = samples.details
        context = samples, self._src, settings, ctx
        if settings.mixed_precision is not None:  # first: scales and clipping depend on the widths
            self.layers = _choose_layer_widths(self._model, self.layers, *context)
        _warn_of_few_samples(samples, settings, ctx)
        self._scalers = self._make_scalers(samples)
        self._num_passes = len(self._scalers)
        self._num_passes += settings.needs_activation_ranges + settings.rounds_in_blocks
        for scaler in self._scalers:
            self._move_scales(scaler, samples)
        if settings.needs_activation_ranges:
            self._calibrate_ranges(samples)
        self.layers = _exclude_sensitive(self._model, self.layers, self.ranges, samples, settings, ctx)
        rounder = self._round_in_blocks(samples) if settings.rounds_in_blocks else None
        if rounder is None and settings.correction is not None:
            self.corrections = _correct_layers(self._model, self.layers, *context)
        for runner in (*self._scalers, rounder):
            if runner is not None:
                runner.report()
        ctx.warnings[:] = dict.fromkeys(ctx.warnings)  # several methods warn about too few samples

    def _make_scalers(self, samples: CalibrationSamples) -> list[ScaleRunner]:
        """Return the methods that move scales between channels."""
        settings, dtype_of = self._settings, stored_dtypes(self._src.path).dtype_for
        scalers: list[ScaleRunner] = []
        if (alpha := settings.smoothquant_alpha) is not None:
            smoothing = alpha, settings.smoothquant_targets, dtype_of, self._ctx
            scalers.append(SmoothQuantRunner(self._model, self.layers, samples, *smoothing))
        if settings.scales_inputs:
            clip = settings.clip == "awq"
            context = self._model, self.layers, samples, clip, settings.duo_scaling, dtype_of, self._ctx
            scalers.append(AwqRunner(*context))
        return scalers

    def _parts(
        self, samples: CalibrationSamples, by_block: bool = False, with_reference: bool = False
    ) -> Iterator[tuple[ModelPart, list[PlannedLayer]]]:
        """Yield the parts of the model with their layers, for one pass.

        by_block: whether a model in memory is divided, too. with_reference: see `run_parts`.
        """
        model, ctx = self._model, self._ctx
        self._pass += 1
        if self._offloaded is None and not by_block:
            yield ModelPart(model, samples, ctx), self._renamed(self.layers)
            return
        for part in run_parts(
            model, samples, ctx, stage="quantize", offloaded=self._offloaded, save=self._is_last_pass,
            with_reference=with_reference,
        ):  # fmt: skip
            block = part.block if isinstance(part, RunningBlock) else None
            self._load(block)
            # layers outside of blocks may also be before them; in an offloaded model they are not
            outside = self._offloaded is None and block is None
            yield ModelPart(model, samples, ctx) if outside else part, self._renamed(self._layers_in(block))
            part.run()
            self._finish(block)

    def _load(self, block: Block | None) -> None:
        """Apply the scales of earlier passes to a loaded block; None: load the output layer before."""
        if self._offloaded is None:
            return
        if block is None:
            self._offloaded.load_head()
        layers = self._layers_in(block)
        if self._pass <= 0:
            self._check_weights(layers)
        for scaler in self._scalers[: max(0, self._pass)]:
            scaler.apply(_targets_of(scaler, layers))

    def _finish(self, block: Block | None) -> None:
        """Quantize an offloaded block in the last pass; None: the layers outside of blocks."""
        if self._offloaded is None:
            return
        layers = self._layers_in(block)
        if self._is_last_pass:
            self._quantize(layers)
        if block is None:
            for target in [target for scaler in self._scalers for target in _targets_of(scaler, layers)]:
                self._offloaded.changed |= set(target.modules(self._model))
            if not self._is_last_pass:
                self._offloaded.free_head()

    def _move_scales(self, scaler: ScaleRunner, samples: CalibrationSamples) -> None:
        """Move channel scales between the producers of the layers' inputs and their columns."""
        if isinstance(scaler, AwqRunner):
            self.codes = scaler.codes
        for part, layers in self._parts(samples):
            is_loaded_again = self._offloaded is not None and not self._is_last_pass
            scaler.calibrate(_targets_of(scaler, layers), part, apply=not is_loaded_again)
        self.layers = self._renamed(self.layers)

    def _calibrate_ranges(self, samples: CalibrationSamples) -> None:
        """Calibrate activation ranges; layers that no sample reaches are kept in float."""
        settings = self._settings
        missing: list[str] = []
        for part, layers in self._parts(samples):
            plain = [layer for layer in layers if not isinstance(layer.module, nn.Conv2d)]
            self.ranges |= calibrate_ranges(plain, samples, settings, part.observe)
            ranges, self._rounding_ranges = calibrate_convolutions(
                self._model, layers, samples, settings, part.observe
            )
            self.ranges |= ranges
            unseen = {n.module: n.name for n in layers if n.needs_range and n.weight_id not in self.ranges}
            missing += unseen.values()
            self.layers = [layer for layer in self.layers if layer.module not in unseen]
        _warn_of_missing_ranges(missing, self._ctx)

    def _round_in_blocks(self, samples: CalibrationSamples) -> GptqRunner | BlockTuner:
        """Quantize the linear layers that the method supports, except matrices that are also embeddings.

        It minimizes the error of products, which does not apply to embedding lookups.
        """
        settings = self._settings
        runner: GptqRunner | BlockTuner
        if settings.compensates_rounding:
            runner = self._make_gptq(samples)
        else:
            runner = _TUNERS[settings.method](samples, settings.iterations, self._ctx)
        self.codes = runner.codes
        with_reference = settings.tunes_blocks or settings.gptaq_alpha is not None
        for part, layers in self._parts(samples, by_block=True, with_reference=with_reference):
            tables = {layer.weight_id for layer in self.layers if not layer.multiplies}
            linear = [layer for layer in layers if layer.multiplies and layer.weight_id not in tables]
            supported = [n for n in linear if supports_scheme(settings.method, find_scheme(n.scheme))]
            runner.calibrate(supported, part)
        return runner

    def _make_gptq(self, samples: CalibrationSamples) -> GptqRunner:
        settings = self._settings
        gptq = GptqRunner(samples, grid_finder(settings), settings.act_order, settings.gptaq_alpha, self._ctx)
        if (correction := settings.correction) is not None:
            corrected = layers_to_correct(self._model, self.layers)
            gptq.corrections = {layer.weight_id: correction for layer in corrected}
        self.corrections = gptq.pairs
        return gptq

    def _quantize(self, layers: Sequence[PlannedLayer]) -> None:
        """Quantize `layers`, whose weights are loaded; those of an offloaded model are released."""
        layers = self._renamed(layers)
        codes = self.codes | {weight: pair.codes for weight, pair in self.corrections.items()}
        corrections = {weight: (pair.up, pair.down) for weight, pair in self.corrections.items()}
        self._ctx.warnings.extend(scale_underflow_warnings(layers, self._small_weights))
        self._edits += quantize_layers(
            self._model, layers, self.ranges, weight_quantizer(self._settings), codes, corrections
        )
        if self._offloaded is not None:
            for layer in layers:  # the plan holds references to the float weights
                layer.module.to("meta")
            self.codes.clear()  # keys are ids of weights, which new tensors may reuse
            self.ranges.clear()

    def _check_weights(self, layers: Sequence[PlannedLayer]) -> None:
        """Check that the unchanged weights of `layers` are finite, and store small ones."""
        if self._settings.needs_calibration:
            require_finite_layers(layers)
        self._small_weights |= small_weights(layers)

    def _layers_in(self, block: Block | None) -> list[PlannedLayer]:
        """Return the layers in `block`, or outside of all blocks."""
        path = None if block is None else block.module_path
        return [layer for layer in self.layers if self._block_of.get(layer.module) == path]

    def _renamed(self, layers: Sequence[PlannedLayer]) -> list[PlannedLayer]:
        """Return `layers` with their names after scaling."""
        for scaler in self._scalers:
            layers = scaler.renamed(layers)
        return list(layers)

    @property
    def _is_last_pass(self) -> bool:
        return self._pass == self._num_passes - 1


def _planned_name(edit: Edit, names: Collection[str]) -> str:
    """Return the planned layer of `edit`: a layer that several blocks share is planned under one name."""
    name = str(edit["module"]).removesuffix(".matrix")
    return name if name in names else str(edit["with"])


def _targets_of(scaler: ScaleRunner, layers: Sequence[PlannedLayer]) -> list[ScaleTarget]:
    """Return the scaler's targets with some of `layers`."""
    modules = {layer.module for layer in layers}
    return [t for t in scaler.targets if not modules.isdisjoint(t.modules(scaler.model))]


def _choose_layer_widths(
    model: Any,
    layers: Sequence[PlannedLayer],
    samples: CalibrationSamples,
    src: Artifact,
    settings: QuantizeSettings,
    ctx: Context,
) -> list[PlannedLayer]:
    """Return `layers` with the bits that mixed precision chooses for each."""
    few = _sensitivity_samples(samples, settings, ctx)
    return choose_bit_widths(model, layers, few, src, settings, weight_quantizer(settings), ctx)


def _exclude_sensitive(
    model: Any,
    layers: Sequence[PlannedLayer],
    ranges: Mapping[int, ActivationRange],
    samples: CalibrationSamples,
    settings: QuantizeSettings,
    ctx: Context,
) -> list[PlannedLayer]:
    """Measure the sensitivities of layers; return `layers`, with `exclude: auto` less the most sensitive."""
    if settings.mixed_precision is not None or not settings.num_sensitivity_samples:
        return list(layers)
    few = _sensitivity_samples(samples, settings, ctx)
    sensitivities = measure_layer_sensitivities(model, layers, ranges, few, ctx)
    ctx.details["sensitivity"] = {name: float(f"{value:.3g}") for name, value in sensitivities.items()}
    ctx.details["sensitivity_samples"] = few.num_samples
    if AUTO not in settings.exclude:
        return list(layers)
    excluded = select_sensitive(sensitivities, settings.max_excluded or MaxExcluded())
    return [layer for layer in layers if layer.name not in excluded]


def _sensitivity_samples(
    samples: CalibrationSamples, settings: QuantizeSettings, ctx: Context
) -> CalibrationSamples:
    few = samples.subset(settings.num_sensitivity_samples)
    _warn_of_few_tokens(few, _SENSITIVITY_TEXT, "sensitivity_samples and calibration_samples", ctx)
    return few


def _correct_layers(
    model: Any,
    layers: Sequence[PlannedLayer],
    samples: CalibrationSamples | None,
    src: Artifact,
    settings: QuantizeSettings,
    ctx: Context,
) -> dict[int, CorrectedWeight]:
    """Return the low-rank corrections with their quantized weights, by `PlannedLayer.weight_id`."""
    return find_corrections(model, layers, settings, weight_quantizer(settings), samples, src, ctx)


def _report_corrections(
    layers: Sequence[PlannedLayer],
    corrections: Mapping[int, CorrectedWeight],
    src: Artifact,
    settings: QuantizeSettings,
    ctx: Context,
) -> None:
    """Write the low-rank corrections to the details and warnings of `ctx`."""
    assert settings.correction is not None
    ctx.details["low_rank_correction"] = correction_details(layers, corrections, settings.correction.rank)
    stored_bits = 8 * stored_dtypes(src.path).default.itemsize
    (scheme,) = settings.linear_schemes
    quantized = bits_per_weight(SCHEMES[scheme], settings.scheme_options(scheme))
    ctx.warnings.extend(oversized_correction_warnings(layers, corrections, quantized, stored_bits))


def _warn_of_missing_ranges(unseen: Sequence[str], ctx: Context) -> None:
    """Warn about layers that no sample reaches, by their names; they stay float."""
    if unseen:
        ctx.warn(
            "uncalibrated-layers",
            f"No calibration sample reaches {', '.join(unseen)}; these layers are kept in float. Add"
            " calibration samples that use them, or exclude them.",
        )


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


def _warn_of_few_samples(samples: CalibrationSamples, settings: QuantizeSettings, ctx: Context) -> None:
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
