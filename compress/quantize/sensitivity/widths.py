"""What each matrix of a model does to its outputs with so many bits a weight, and what that takes in a file.

Shapes: N = outputs (rows), K = inputs (columns).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from smelt.compress.calibration.rows import CalibrationRows, outputs
from smelt.compress.quantize.coding import Coder
from smelt.compress.quantize.planned import Planned, quantize_layers
from smelt.compress.quantize.sensitivity.damage import from_their_blocks, spread_of
from smelt.compress.quantize.settings import QuantizeSettings
from smelt.core.stage import Context
from smelt.runtime.models.structure import replace_layer
from smelt.runtime.schemes.registry import WIDTHS, filed_bytes


@dataclass
class Unit:
    """A matrix, and the layers that it serves: an embedding and an output layer may be one.

    costs: bits that it takes in a file, by width. damage: what it does alone, by width.
    """

    layers: list[Planned]
    costs: dict[int, int] = field(default_factory=dict)
    damage: dict[int, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The first layer's."""
        return self.layers[0].name

    @property
    def weights(self) -> int:
        """N * K."""
        return int(self.layers[0].module.weight.numel())

    def at(self, bits: int, settings: QuantizeSettings) -> list[Planned]:
        """Return the layers with codes of `bits`."""
        scheme = WIDTHS[bits].name
        return [replace(layer, scheme=scheme, options=settings.options(scheme)) for layer in self.layers]


def units_of(layers: Sequence[Planned], settings: QuantizeSettings, widths: Sequence[int]) -> list[Unit]:
    """Return the matrices of `layers` with what they take, in the order of the layers."""
    found: dict[int, Unit] = {}
    for layer in layers:
        found.setdefault(layer.weight, Unit([])).layers.append(layer)
    for unit in found.values():
        rows, width = unit.layers[0].module.weight.shape
        for bits in widths:
            stored = WIDTHS[bits].storage(rows, width, settings.options(WIDTHS[bits].name)).values()
            unit.costs[bits] = 8 * sum(map(filed_bytes, stored))
    return list(found.values())


def measure(
    model: Any,
    units: Sequence[Unit],
    rows: CalibrationRows,
    settings: QuantizeSettings,
    coder_of: Callable[[Planned], Coder | None],
    ctx: Context,
) -> None:
    """Quantize one matrix at a time to each width and note what that does to the model's outputs.

    It is the mean squared change of all outputs in parts of their variance, as in damage.py; a table that is
    only looked up is measured too.

    Args:
        model: left as it was.
        units: of it; their `sensitivity` is filled in.
        rows: what the model reads.
        settings: whose options the codes have.
        coder_of: what decides the codes of a layer.
        ctx: its `progress` is told.

    Raises:
        InputError: its outputs are not finite.
    """
    whole = [out.clone() for out in outputs(model, rows.batches)]
    spread = spread_of(whole, rows) * sum(out.numel() for out in whole)
    total = sum(len(unit.costs) for unit in units)
    done = 0
    for unit, off_by in from_their_blocks(model, units, lambda unit: unit.layers, rows, whole, ctx):
        for bits in unit.costs:
            layers = unit.at(bits, settings)
            quantize_layers(model, layers, {}, coder_of)
            try:
                off = off_by()
            finally:
                for layer in layers:
                    replace_layer(model, [], layer.name, layer.module, {})
            unit.damage[bits] = off / spread
            done += 1
            ctx.progress(done, total, "damage of each layer")
