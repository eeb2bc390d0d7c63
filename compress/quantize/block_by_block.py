"""A large model is quantized from file to file, one block at a time.

Each code is the one that the whole model would get: a method that looks at no rows decides matrix by matrix,
and GPTQ goes through the blocks one by one anyway. In memory are one block, what it is fed, the embedding,
and at the end the output head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from smelt.compress.calibration.blocks import Observe, drive
from smelt.compress.calibration.rows import calibration_rows
from smelt.compress.quantize.decided import coders, fit_of
from smelt.compress.quantize.from_schemes.faint import faint, faint_warnings
from smelt.compress.quantize.methods.gptq import GptqWork
from smelt.compress.quantize.planned import (
    Planned,
    output_layer,
    plan_layers,
    quantize_layers,
    require_weights,
)
from smelt.compress.quantize.settings import AUTO, QuantizeSettings
from smelt.core.artifact import Artifact
from smelt.core.messages import Message
from smelt.core.stage import Context
from smelt.families.walk import Block, blocks_of
from smelt.runtime.backends.device import torch_device
from smelt.runtime.models.streamed import StreamedModel, open_streamed
from smelt.runtime.models.structure import Edit

if TYPE_CHECKING:
    from torch import Tensor


def open_large(src: Artifact, settings: QuantizeSettings, ctx: Context) -> StreamedModel | None:
    """Return a large model to be quantized block by block; None where it has to be loaded whole.

    That is where layers are compared with each other, scales are moved between them, or ranges of activations
    are found, and with GPTQ where other products than the output layer are outside of all blocks.
    """
    whole = (
        settings.mixed_precision
        or settings.correction
        or settings.smoothquant_alpha is not None
        or AUTO in settings.exclude
    )
    if whole or settings.observes or settings.scales_inputs:
        return None
    if settings.method == "gptq" and torch_device(ctx.device) != "cpu":
        return None
    streamed = open_streamed(src.path, ctx.out)
    if streamed is None:
        return None
    layers = plan_layers(streamed.model, settings)
    places, head = tuple(f"{b.place}." for b in blocks_of(streamed.model)), output_layer(streamed.model)
    outside = [one for one in layers if one.product and not one.name.startswith(places)]
    if settings.method == "gptq" and any(one.module is not head for one in outside):
        return None
    return streamed


def quantize_blocks(
    streamed: StreamedModel,
    layers: Sequence[Planned],
    src: Artifact,
    settings: QuantizeSettings,
    ctx: Context,
) -> list[Edit]:
    """Quantize `layers` of `streamed`; every block is written, the rest is not yet.

    Args:
        streamed: whose blocks lie in a file.
        layers: of it, as planned.
        src: what is read; its rows are those of `ctx`.
        settings: of `open_large`.
        ctx: its details get what GPTQ says.

    Returns:
        The edits that make room for the result, in the order of `layers`.

    Raises:
        InputError: weights are not finite, there are no rows, or GPTQ cannot invert what a layer is fed.
    """
    work = _Work(streamed, layers, settings, ctx.warnings)
    if settings.method == "gptq":
        work.by_gptq(src, ctx)
    else:
        for done, block in enumerate(blocks := blocks_of(streamed.model), start=1):
            streamed.enter(block)
            work.leave(block)
            ctx.progress(done, len(blocks), block.place)
        streamed.enter_head()
    work.quantize(work.outside)
    order = {layer.name: number for number, layer in enumerate(layers)}
    return sorted(work.edits, key=lambda edit: order[str(edit["module"]).removesuffix(".matrix")])


@dataclass
class _Work:
    """What was made so far."""

    streamed: StreamedModel
    layers: Sequence[Planned]
    settings: QuantizeSettings
    warnings: list[Message]
    edits: list[dict[str, Any]] = field(default_factory=list)
    gptq: GptqWork | None = None
    faint: dict[str, Tensor] = field(default_factory=dict)

    def of(self, block: Block) -> list[Planned]:
        """Return the layers of `block`."""
        return [layer for layer in self.layers if layer.name.startswith(f"{block.place}.")]

    @property
    def outside(self) -> list[Planned]:
        """The layers that are in no block."""
        places = tuple(f"{block.place}." for block in blocks_of(self.streamed.model))
        return [layer for layer in self.layers if not layer.name.startswith(places)]

    def by_gptq(self, src: Artifact, ctx: Context) -> None:
        """Let GPTQ decide the codes of products, block by block, and of the head on what they give."""
        model, settings = self.streamed.model, self.settings
        rows = calibration_rows(model, src, settings.calibration_samples, ctx, "quantize")
        ctx.details["calibration"] = {"origin": rows.origin, "rows": rows.rows, "tokens": rows.tokens}
        self.gptq = work = GptqWork(rows, fit_of(settings), ctx)
        tables = {layer.weight for layer in self.layers if not layer.product}

        def behind(observe: Observe) -> None:
            self.streamed.enter_head()
            products = [one for one in self.outside if one.product and one.weight not in tables]
            require_weights(products)
            self.faint |= faint(products)
            work.look(products, observe)

        driven = drive(
            model, rows, ctx, stage="quantize", enter=self.streamed.enter, leave=self.leave, behind=behind
        )
        for step in driven:
            inside = self.of(step.block)
            require_weights(inside)
            self.faint |= faint(inside)
            work.look(inside, step.observe)
        work.tell()

    def leave(self, block: Block) -> None:
        """Make codes of the layers of a block that is not run any more, and write it."""
        self.quantize(self.of(block))
        self.streamed.leave(block)

    def quantize(self, layers: Sequence[Planned]) -> None:
        """Make codes of `layers`, whose weights are there; what was decided of them is done with."""
        codes = {} if self.gptq is None else self.gptq.codes
        self.warnings += faint_warnings(layers, faint(layers) | self.faint)
        self.edits += quantize_layers(self.streamed.model, layers, {}, coders(self.settings, codes))
        for layer in layers:  # they are held by the plan
            layer.module.to("meta")
        codes.clear()  # by the identity of weights, whose memory others take now
