"""Quantize a large model from file to file, one block at a time, with the result of the whole model.

Methods without calibration treat each matrix alone. GPTQ processes the blocks one by one anyway. AWQ and
SmoothQuant calibrate the float model: each block is run with its original weights, and scaled and quantized
when it is not run any more. If the scaled model is calibrated too (GPTQ, activation ranges), the blocks are
read twice: first to find the scales, then to apply them. Memory holds one block, its inputs, the embedding,
and at the end the output layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from smelt.calibration.samples import CalibrationSamples, load_calibration_samples
from smelt.calibration.sequential import BlockCallback, ObserveInputs, run_blocks
from smelt.compress.quantize.awq import AwqRunner, ScaleTarget, find_scale_targets
from smelt.compress.quantize.calibrate_layers import (
    divide_by_range,
    grid_finder,
    quantizer_factory,
    warn_of_few_activations,
    warn_of_missing_ranges,
)
from smelt.compress.quantize.gptq import GptqRunner
from smelt.compress.quantize.plan_layers import (
    PlannedLayer,
    output_layer,
    plan_layers,
    quantize_layers,
    require_finite_layers,
    scale_underflow_warnings,
    small_weights,
)
from smelt.compress.quantize.ranges import calibrate_ranges
from smelt.compress.quantize.settings import QuantizeSettings
from smelt.compress.quantize.smoothquant import NormGroup, SmoothQuantRunner, smoothing_targets
from smelt.core.artifact import Artifact
from smelt.core.stage import Context
from smelt.models.edits import Edit
from smelt.models.empty_model import stored_dtypes
from smelt.models.families.registry import Block, blocks_of
from smelt.models.streamed_model import StreamedModel, open_streamed
from smelt.quantization.scheme import UnpackedWeights
from smelt.runtimes.device import torch_device


def open_large_model(src: Artifact, settings: QuantizeSettings, ctx: Context) -> StreamedModel | None:
    """Return a large model to be quantized block by block; None if it has to be loaded whole.

    It has to be loaded whole for some settings (`QuantizeSettings.loads_whole_model`), or if scales move
    between blocks (the last norm of an encoder is read by all blocks of the decoder); and where samples are
    used, on a GPU, or if linear layers other than the output layer are outside of all blocks.
    """
    on_samples = settings.needs_calibration
    if settings.loads_whole_model or (on_samples and torch_device(ctx.device) != "cpu"):
        return None
    streamed = open_streamed(src.path, ctx.out)
    if streamed is None or not on_samples:
        return streamed
    model, layers = streamed.model, plan_layers(streamed.model, settings)
    block_of_module, head = _block_modules(model), output_layer(model)
    head_layers = [layer for layer in layers if layer.multiplies and layer.module not in block_of_module]
    if any(layer.module is not head for layer in head_layers):
        return None
    targets: Sequence[ScaleTarget | NormGroup] = []
    if settings.scales_inputs:
        targets = find_scale_targets(model, layers)[0]
    elif settings.smoothquant_alpha is not None:
        targets = smoothing_targets(model, layers)[1]
    block_sets = ({block_of_module.get(module) for module in target.modules(model)} for target in targets)
    return None if any(len(target_blocks) > 1 for target_blocks in block_sets) else streamed


def _block_modules(model: Any) -> dict[nn.Module, str]:
    """Return the path of the block of each module that is in one."""
    return {module: block.module_path for block in blocks_of(model) for module in block.module.modules()}


def quantize_blocks(
    streamed: StreamedModel,
    layers: Sequence[PlannedLayer],
    src: Artifact,
    settings: QuantizeSettings,
    ctx: Context,
) -> list[Edit]:
    """Quantize `layers` of `streamed`; write every block, but not the rest.

    Args:
        streamed: the model with blocks in a file.
        layers: its planned layers.
        src: the artifact of the model.
        settings: settings of `open_large_model`.
        ctx: data, and the details of the methods.

    Returns:
        The edits of the result, in the order of those of the whole model.

    Raises:
        InputError: weights or activations are not finite, there are no samples, or GPTQ cannot invert a
            Hessian.
    """
    state = _BlockwiseState(streamed, layers, settings, ctx)
    if settings.needs_calibration:
        state.run_on_samples(src)
    else:
        for done, block in enumerate(blocks := blocks_of(streamed.model), start=1):
            streamed.load_block(block)
            state.finish_block(block)
            ctx.progress(done, len(blocks), block.module_path)
        streamed.load_head()
    state.quantize(state.layers_outside_blocks)
    warn_of_missing_ranges(state.unseen, ctx)
    return state.ordered_edits()


@dataclass
class _BlockwiseState:
    """State of a block-by-block quantization.

    scaler: AWQ or SmoothQuant. scales_found: whether the blocks are read again, to be scaled when they are
    loaded. edits: of quantized layers. small_weights: of layers that a method may have changed since. seen:
    statistics of the inputs of the scaler's targets in the current block. ranges: of activations, by
    `PlannedLayer.weight_id`. unseen: layers without a range.
    """

    streamed: StreamedModel
    layers: Sequence[PlannedLayer]
    settings: QuantizeSettings
    ctx: Context
    edits: list[dict[str, Any]] = field(default_factory=list)
    rows: CalibrationSamples | None = None
    gptq: GptqRunner | None = None
    scaler: AwqRunner | SmoothQuantRunner | None = None
    scales_found: bool = False
    small_weights: dict[str, Tensor] = field(default_factory=dict)
    seen: Mapping[str, Any] = field(default_factory=dict)
    ranges: dict[int, float] = field(default_factory=dict)
    unseen: list[str] = field(default_factory=list)

    def layers_in(self, block: Block) -> list[PlannedLayer]:
        """Return the layers of `block`."""
        return [layer for layer in self.layers if layer.name.startswith(f"{block.module_path}.")]

    @property
    def layers_outside_blocks(self) -> list[PlannedLayer]:
        """Return the layers that are in no block."""
        prefixes = tuple(f"{block.module_path}." for block in blocks_of(self.streamed.model))
        return [layer for layer in self.layers if not layer.name.startswith(prefixes)]

    def run_on_samples(self, src: Artifact) -> None:
        """Run the methods on the linear layers block by block, and on the head with the blocks' outputs."""
        settings, ctx = self.settings, self.ctx
        samples = load_calibration_samples(
            self.streamed.model, src, settings.calibration_samples, ctx, "quantize"
        )
        self.rows = samples
        ctx.details["calibration"] = {
            "origin": samples.origin,
            "rows": samples.num_samples,
            "tokens": samples.tokens,
        }
        warn_of_few_activations(samples, settings, ctx)
        self.scaler = self._make_scaler(samples, src)
        if self.scaler is not None and (settings.compensates_rounding or settings.needs_activation_ranges):
            self._run(self.streamed.load_block, self._find_scales, self._find_head_scales)
            self.scales_found = True
        if settings.compensates_rounding:
            self.gptq = GptqRunner(samples, grid_finder(settings), ctx)
        self._run(self._enter_block, self.finish_block, self._calibrate_head)
        for runner in (self.scaler, self.gptq):
            if runner is not None:
                runner.report()
        ctx.warnings[:] = dict.fromkeys(ctx.warnings)  # several methods warn about too few samples

    def _make_scaler(self, rows: CalibrationSamples, src: Artifact) -> AwqRunner | SmoothQuantRunner | None:
        """Return the method that moves scales, None if there is none."""
        settings, kind = self.settings, stored_dtypes(src.path).dtype_for
        if settings.scales_inputs:
            clips = settings.clip == "awq"
            return AwqRunner(self.streamed.model, self.layers, rows, clips, kind, self.ctx)
        alpha = settings.smoothquant_alpha
        if alpha is None:
            return None
        return SmoothQuantRunner(self.streamed.model, self.layers, rows, alpha, kind, self.ctx)

    def _run(
        self, enter: BlockCallback, leave: BlockCallback, after_blocks: Callable[[ObserveInputs], None]
    ) -> None:
        """Run the model block by block, and calibrate the layers of each block."""
        assert self.rows is not None
        driven = run_blocks(
            self.streamed.model,
            self.rows,
            self.ctx,
            stage="quantize",
            enter=enter,
            leave=leave,
            after_blocks=after_blocks,
        )
        for step in driven:
            self._calibrate(self.layers_in(step.block), step.observe, step.block)

    def _find_scales(self, block: Block) -> None:
        """Find the scales of a block, and free it."""
        assert self.scaler is not None
        self.scaler.search(self._targets_in(block), self.seen)
        self.streamed.free_block(block)

    def _find_head_scales(self, observe: ObserveInputs) -> None:
        """Find the scales of the output layer, and free it."""
        assert self.scaler is not None
        self.streamed.load_head()
        self._calibrate(self._calibrated_head, observe, None)
        self.scaler.search(self._targets_in(None), self.seen)
        self.streamed.free_head()

    def _enter_block(self, block: Block) -> None:
        self.streamed.load_block(block)
        if self.scaler is not None and self.scales_found:
            self.scaler.apply(self._targets_in(block))

    def _calibrate_head(self, observe: ObserveInputs) -> None:
        """Scale and calibrate the output layer."""
        self.streamed.load_head()
        targets = self._targets_in(None)
        if self.scaler is not None and self.scales_found:
            self.scaler.apply(targets)
        self._calibrate(self._calibrated_head, observe, None)
        if self.scaler is not None and not self.scales_found:
            self.scaler.scale(targets, self.seen)
        self.streamed.changed |= {module for t in targets for module in t.modules(self.streamed.model)}

    @property
    def _calibrated_head(self) -> list[PlannedLayer]:
        """Return the output layer; unless it is an embedding too, except for its range."""
        candidates = self.layers_outside_blocks
        table_weights = {layer.weight_id for layer in self.layers if not layer.multiplies}
        return [
            layer
            for layer in candidates
            if layer.multiplies and (layer.needs_range or layer.weight_id not in table_weights)
        ]

    def _calibrate(self, layers: Sequence[PlannedLayer], observe: ObserveInputs, block: Block | None) -> None:
        """Calibrate `layers`, in `block` or after it.

        They are quantized with GPTQ, or their ranges are found; but first the scaler observes the unscaled
        model.
        """
        if not self.scales_found:
            require_finite_layers(layers)
            self.small_weights |= small_weights(layers)
            if self.scaler is not None:
                self.seen = self.scaler.observe(self._targets_in(block), observe)
                if self.settings.compensates_rounding or self.settings.needs_activation_ranges:
                    return
        if self.gptq is not None:
            self.gptq.calibrate(self._renamed(layers), observe)
        elif self.settings.needs_activation_ranges:
            assert self.rows is not None
            self.ranges |= calibrate_ranges(layers, self.rows, self.settings, observe)

    def _targets_in(self, block: Block | None) -> list[Any]:
        """Return the scaler's targets in `block`, or after all blocks."""
        if self.scaler is None:
            return []
        block_path, block_of_module = None if block is None else block.module_path, self._block_of_module
        model = self.streamed.model
        return [t for t in self.scaler.targets if block_of_module.get(t.modules(model)[0]) == block_path]

    @cached_property
    def _block_of_module(self) -> dict[nn.Module, str]:
        return _block_modules(self.streamed.model)

    def _renamed(self, layers: Sequence[PlannedLayer]) -> Sequence[PlannedLayer]:
        """Return `layers` with their names after scaling."""
        return self.scaler.renamed(layers) if isinstance(self.scaler, AwqRunner) else layers

    def finish_block(self, block: Block) -> None:
        """Scale and quantize the layers of a block that is not run again, and write it."""
        if self.scaler is not None and not self.scales_found:
            self.scaler.scale(self._targets_in(block), self.seen)
            self.seen = {}
        self.quantize(self.layers_in(block))
        self.streamed.save_block(block)

    def quantize(self, layers: Sequence[PlannedLayer]) -> None:
        """Quantize `layers`, whose weights are loaded; their calibration results are released."""
        codes: dict[int, UnpackedWeights] = {}
        if self.gptq is not None:
            codes = self.gptq.codes
        elif isinstance(self.scaler, AwqRunner):
            codes = self.scaler.codes
        layers, without_range = divide_by_range(layers, self.ranges)
        self.unseen += without_range
        renamed = self._renamed(layers)
        self.ctx.warnings.extend(
            scale_underflow_warnings(renamed, small_weights(layers) | self.small_weights)
        )
        self.edits += quantize_layers(
            self.streamed.model, renamed, self.ranges, quantizer_factory(self.settings, codes)
        )
        for layer in layers:  # the plan holds references to the float weights
            layer.module.to("meta")
        codes.clear()  # keys are ids of weights, which new tensors may reuse
        self.ranges.clear()

    def ordered_edits(self) -> list[Edit]:
        """Return all edits in the order of those of the whole model: scales by target, then layers."""
        order = {layer.name: index for index, layer in enumerate(self._renamed(self.layers))}
        edits = sorted(self.edits, key=lambda edit: order[str(edit["module"]).removesuffix(".matrix")])
        return [*self.scaler.ordered_edits(), *edits] if isinstance(self.scaler, AwqRunner) else edits
