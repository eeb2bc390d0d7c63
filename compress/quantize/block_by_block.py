"""Quantize a large model from file to file, one block at a time, with the result of the whole model.

Methods without calibration treat each matrix alone. GPTQ processes the blocks one by one anyway. AWQ
calibrates the float model: each block is run with its original weights, and scaled and quantized when it is
not run any more. Memory holds one block, its inputs, the embedding, and at the end the output layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from smelt.calibration.samples import load_calibration_samples
from smelt.calibration.sequential import ObserveInputs, run_blocks
from smelt.calibration.statistics import InputStatistics, StatisticsCollector, input_width
from smelt.compress.quantize.awq import AwqRunner, ScaleTarget, find_scale_targets
from smelt.compress.quantize.calibrate_layers import grid_finder, quantizer_factory
from smelt.compress.quantize.gptq import GptqRunner
from smelt.compress.quantize.plan_layers import (
    PlannedLayer,
    output_layer,
    plan_layers,
    quantize_layers,
    require_finite_layers,
)
from smelt.compress.quantize.ranges import scale_underflow_warnings, small_weights
from smelt.compress.quantize.settings import AUTO, QuantizeSettings
from smelt.core.artifact import Artifact
from smelt.core.stage import Context
from smelt.models.edits import Edit
from smelt.models.empty_model import stored_dtypes
from smelt.models.families.model_blocks import Block, blocks_of
from smelt.models.streamed_model import StreamedModel, open_streamed
from smelt.quantization.scheme import UnpackedWeights
from smelt.runtimes.device import torch_device


def open_large_model(src: Artifact, settings: QuantizeSettings, ctx: Context) -> StreamedModel | None:
    """Return a large model to be quantized block by block; None if it has to be loaded whole.

    It has to be loaded whole if layers are compared, activation ranges are calibrated, or AWQ moves scales
    between blocks (the last norm of an encoder is read by all blocks of the decoder); and for GPTQ and AWQ if
    linear layers other than the output layer are outside of all blocks.
    """
    whole = (
        settings.mixed_precision
        or settings.correction
        or settings.smoothquant_alpha is not None
        or AUTO in settings.exclude
    )
    if whole or settings.needs_activation_ranges or settings.method == "awq-gptq":
        return None
    if settings.method in ("gptq", "awq") and torch_device(ctx.device) != "cpu":
        return None
    streamed = open_streamed(src.path, ctx.out)
    if streamed is None:
        return None
    model, layers = streamed.model, plan_layers(streamed.model, settings)
    inside, head = _block_modules(model), output_layer(model)
    outside = [layer for layer in layers if layer.multiplies and layer.module not in inside]
    if settings.method in ("gptq", "awq") and any(layer.module is not head for layer in outside):
        return None
    if settings.method == "awq":
        targets = find_scale_targets(model, layers)[0]
        if any(len({inside.get(m) for m in target.modules(model)}) > 1 for target in targets):
            return None
    return streamed


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
        ctx: data, and the details of GPTQ and AWQ.

    Returns:
        The edits of the result, in the order of those of the whole model.

    Raises:
        InputError: weights or activations are not finite, there are no samples, or GPTQ cannot invert a
            Hessian.
    """
    work = _BlockwiseState(streamed, layers, settings, ctx)
    if settings.method in ("gptq", "awq"):
        work.run_on_samples(src)
    else:
        for done, block in enumerate(blocks := blocks_of(streamed.model), start=1):
            streamed.load_block(block)
            work.finish_block(block)
            ctx.progress(done, len(blocks), block.module_path)
        streamed.load_head()
    work.quantize(work.layers_outside_blocks)
    return work.ordered_edits()


@dataclass
class _BlockwiseState:
    """State of a block-by-block quantization.

    edits: of quantized layers. small_weights: of layers that a method may have changed since. seen:
    statistics of the inputs of AWQ's targets in the current block.
    """

    streamed: StreamedModel
    layers: Sequence[PlannedLayer]
    settings: QuantizeSettings
    ctx: Context
    edits: list[dict[str, Any]] = field(default_factory=list)
    gptq: GptqRunner | None = None
    awq: AwqRunner | None = None
    small_weights: dict[str, Tensor] = field(default_factory=dict)
    seen: Mapping[str, InputStatistics] = field(default_factory=dict)

    def layers_in(self, block: Block) -> list[PlannedLayer]:
        """Return the layers of `block`."""
        return [layer for layer in self.layers if layer.name.startswith(f"{block.module_path}.")]

    @property
    def layers_outside_blocks(self) -> list[PlannedLayer]:
        """Return the layers that are in no block."""
        places = tuple(f"{block.module_path}." for block in blocks_of(self.streamed.model))
        return [layer for layer in self.layers if not layer.name.startswith(places)]

    def run_on_samples(self, src: Artifact) -> None:
        """Run GPTQ or AWQ on the linear layers block by block, and on the head with their outputs."""
        model, settings, ctx = self.streamed.model, self.settings, self.ctx
        rows = load_calibration_samples(model, src, settings.calibration_samples, ctx, "quantize")
        ctx.details["calibration"] = {"origin": rows.origin, "rows": rows.num_samples, "tokens": rows.tokens}
        if settings.method == "gptq":
            self.gptq = GptqRunner(rows, grid_finder(settings), ctx)
        else:
            cut, kind = settings.clip == "awq", stored_dtypes(src.path).dtype_for
            self.awq = AwqRunner(model, self.layers, rows, cut, kind, ctx)
        driven = run_blocks(
            model,
            rows,
            ctx,
            stage="quantize",
            enter=self.streamed.load_block,
            leave=self.finish_block,
            after_blocks=self._calibrate_head,
        )
        for step in driven:
            self._calibrate(self.layers_in(step.block), step.observe, step.block)
        if self.gptq is not None:
            self.gptq.report()
        if self.awq is not None:
            self.awq.report()

    def _calibrate_head(self, observe: ObserveInputs) -> None:
        """Calibrate the output layer, unless it is an embedding too."""
        self.streamed.load_head()
        tables = {layer.weight_id for layer in self.layers if not layer.multiplies}
        outside = self.layers_outside_blocks
        products = [layer for layer in outside if layer.multiplies and layer.weight_id not in tables]
        self._calibrate(products, observe, None)
        if self.awq is not None and (targets := self._targets_in(None)):
            self.awq.scale(targets, self.seen)
            self.streamed.changed |= {module for t in targets for module in t.modules(self.streamed.model)}

    def _calibrate(self, layers: Sequence[PlannedLayer], observe: ObserveInputs, block: Block | None) -> None:
        """Quantize `layers` with GPTQ, or collect the statistics of AWQ's targets, in `block` or after it."""
        require_finite_layers(layers)
        self.small_weights |= small_weights(layers)
        if self.gptq is not None:
            self.gptq.calibrate(layers, observe)
        if self.awq is not None and (targets := self._targets_in(block)):
            observed = self.awq.observed_layers(targets)
            collector = StatisticsCollector({name: input_width(found[0]) for name, found in observed.items()})
            observe(observed, collector.update)
            self.seen = collector.statistics

    def _targets_in(self, block: Block | None) -> list[ScaleTarget]:
        """Return AWQ's scale targets in `block`, or after all blocks."""
        assert self.awq is not None
        place, inside = None if block is None else block.module_path, self._block_of_module
        return [target for target in self.awq.targets if inside.get(target.layers[0].module) == place]

    @cached_property
    def _block_of_module(self) -> dict[nn.Module, str]:
        return _block_modules(self.streamed.model)

    def finish_block(self, block: Block) -> None:
        """Scale and quantize the layers of a block that is not run again, and write it."""
        if self.awq is not None:
            self.awq.scale(self._targets_in(block), self.seen)
            self.seen = {}
        self.quantize(self.layers_in(block))
        self.streamed.save_block(block)

    def quantize(self, layers: Sequence[PlannedLayer]) -> None:
        """Quantize `layers`, whose weights are loaded; their calibration results are released."""
        runner = self.gptq or self.awq
        codes: dict[int, UnpackedWeights] = {} if runner is None else runner.codes
        renamed = layers if self.awq is None else self.awq.renamed(layers)
        self.ctx.warnings.extend(
            scale_underflow_warnings(renamed, small_weights(layers) | self.small_weights)
        )
        self.edits += quantize_layers(
            self.streamed.model, renamed, {}, quantizer_factory(self.settings, codes)
        )
        for layer in layers:  # the plan holds references to the float weights
            layer.module.to("meta")
        codes.clear()  # keys are ids of weights, which new tensors may reuse

    def ordered_edits(self) -> list[Edit]:
        """Return all edits in the order of those of the whole model: scales by target, then layers."""
        layers = self.layers if self.awq is None else self.awq.renamed(self.layers)
        order = {layer.name: number for number, layer in enumerate(layers)}
        edits = sorted(self.edits, key=lambda edit: order[str(edit["module"]).removesuffix(".matrix")])
        return edits if self.awq is None else [*self.awq.ordered_edits(), *edits]
