"""Quantization of a large model from file to file, one block at a time.

The result is the same as for the whole model: methods without calibration treat each matrix alone, and GPTQ
processes the blocks one by one anyway. Memory holds one block, its inputs, the embedding, and at the end the
output head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from smelt.calibration.samples import load_calibration_samples
from smelt.calibration.sequential import ObserveInputs, run_blocks
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
from smelt.core.messages import Message
from smelt.core.stage import Context
from smelt.models.families.model_blocks import Block, blocks_of
from smelt.models.streamed_model import StreamedModel, open_streamed
from smelt.models.structure import Edit
from smelt.runtimes.device import torch_device

if TYPE_CHECKING:
    from torch import Tensor


def open_large_model(src: Artifact, settings: QuantizeSettings, ctx: Context) -> StreamedModel | None:
    """Return a large model to be quantized block by block; None if it has to be loaded whole.

    It has to be loaded whole if layers are compared, scales are moved between them, or activation ranges are
    calibrated; and for GPTQ if linear layers other than the output layer are outside of all blocks.
    """
    whole = (
        settings.mixed_precision
        or settings.correction
        or settings.smoothquant_alpha is not None
        or AUTO in settings.exclude
    )
    if whole or settings.needs_activation_ranges or settings.scales_inputs:
        return None
    if settings.method == "gptq" and torch_device(ctx.device) != "cpu":
        return None
    streamed = open_streamed(src.path, ctx.out)
    if streamed is None:
        return None
    layers = plan_layers(streamed.model, settings)
    places, head = tuple(f"{b.module_path}." for b in blocks_of(streamed.model)), output_layer(streamed.model)
    outside = [layer for layer in layers if layer.multiplies and not layer.name.startswith(places)]
    if settings.method == "gptq" and any(layer.module is not head for layer in outside):
        return None
    return streamed


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
        ctx: data, and the details of GPTQ.

    Returns:
        The edits of the result, in the order of `layers`.

    Raises:
        InputError: weights are not finite, there are no samples, or GPTQ cannot invert a Hessian.
    """
    work = _BlockwiseState(streamed, layers, settings, ctx.warnings)
    if settings.method == "gptq":
        work.run_gptq(src, ctx)
    else:
        for done, block in enumerate(blocks := blocks_of(streamed.model), start=1):
            streamed.load_block(block)
            work.finish_block(block)
            ctx.progress(done, len(blocks), block.module_path)
        streamed.load_head()
    work.quantize(work.layers_outside_blocks)
    order = {layer.name: number for number, layer in enumerate(layers)}
    return sorted(work.edits, key=lambda edit: order[str(edit["module"]).removesuffix(".matrix")])


@dataclass
class _BlockwiseState:
    """State of a block-by-block quantization."""

    streamed: StreamedModel
    layers: Sequence[PlannedLayer]
    settings: QuantizeSettings
    warnings: list[Message]
    edits: list[dict[str, Any]] = field(default_factory=list)
    gptq: GptqRunner | None = None
    small_weights: dict[str, Tensor] = field(default_factory=dict)

    def layers_in(self, block: Block) -> list[PlannedLayer]:
        """Return the layers of `block`."""
        return [layer for layer in self.layers if layer.name.startswith(f"{block.module_path}.")]

    @property
    def layers_outside_blocks(self) -> list[PlannedLayer]:
        """Return the layers that are in no block."""
        places = tuple(f"{block.module_path}." for block in blocks_of(self.streamed.model))
        return [layer for layer in self.layers if not layer.name.startswith(places)]

    def run_gptq(self, src: Artifact, ctx: Context) -> None:
        """Run GPTQ on the linear layers block by block, and on the head with their outputs."""
        model, settings = self.streamed.model, self.settings
        rows = load_calibration_samples(model, src, settings.calibration_samples, ctx, "quantize")
        ctx.details["calibration"] = {"origin": rows.origin, "rows": rows.num_samples, "tokens": rows.tokens}
        self.gptq = work = GptqRunner(rows, grid_finder(settings), ctx)
        tables = {layer.weight_id for layer in self.layers if not layer.multiplies}

        def after_blocks(observe: ObserveInputs) -> None:
            self.streamed.load_head()
            products = [
                layer
                for layer in self.layers_outside_blocks
                if layer.multiplies and layer.weight_id not in tables
            ]
            require_finite_layers(products)
            self.small_weights |= small_weights(products)
            work.calibrate(products, observe)

        driven = run_blocks(
            model,
            rows,
            ctx,
            stage="quantize",
            enter=self.streamed.load_block,
            leave=self.finish_block,
            after_blocks=after_blocks,
        )
        for step in driven:
            inside = self.layers_in(step.block)
            require_finite_layers(inside)
            self.small_weights |= small_weights(inside)
            work.calibrate(inside, step.observe)
        work.report()

    def finish_block(self, block: Block) -> None:
        """Quantize the layers of a block that is not run again, and write it."""
        self.quantize(self.layers_in(block))
        self.streamed.save_block(block)

    def quantize(self, layers: Sequence[PlannedLayer]) -> None:
        """Quantize `layers`, whose weights are loaded; their calibration results are released."""
        codes = {} if self.gptq is None else self.gptq.codes
        self.warnings += scale_underflow_warnings(layers, small_weights(layers) | self.small_weights)
        self.edits += quantize_layers(
            self.streamed.model, layers, {}, quantizer_factory(self.settings, codes)
        )
        for layer in layers:  # the plan holds references to the float weights
            layer.module.to("meta")
        codes.clear()  # keys are ids of weights, which new tensors may reuse
