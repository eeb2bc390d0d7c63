"""Sensitivity and stored size of each matrix of a model by bit width.

Shapes: N = outputs (rows), K = inputs (columns).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from smelt.compress.calibration.samples import CalibrationSamples, model_outputs
from smelt.compress.quantize.plan_layers import PlannedLayer, quantize_layers
from smelt.compress.quantize.sensitivity.layer_sensitivity import output_changes, output_variance
from smelt.compress.quantize.settings import QuantizeSettings
from smelt.compress.quantize.weight_quantizer import WeightQuantizer
from smelt.core.stage import Context
from smelt.runtime.models.structure import replace_layer
from smelt.runtime.schemes.registry import SCHEMES_BY_BITS, stored_bytes


@dataclass
class WeightMatrix:
    """A matrix and its layers; an embedding and an output layer may share one.

    costs: stored bits by width. sensitivities: sensitivity by width, when it alone is quantized.
    """

    layers: list[PlannedLayer]
    costs: dict[int, int] = field(default_factory=dict)
    sensitivities: dict[int, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the first layer."""
        return self.layers[0].name

    @property
    def num_weights(self) -> int:
        """N * K."""
        return int(self.layers[0].module.weight.numel())

    def layers_with_bits(self, bits: int, settings: QuantizeSettings) -> list[PlannedLayer]:
        """Return the layers with a scheme of `bits` bits."""
        scheme = SCHEMES_BY_BITS[bits].name
        return [
            replace(layer, scheme=scheme, options=settings.scheme_options(scheme)) for layer in self.layers
        ]


def weight_matrices(
    layers: Sequence[PlannedLayer], settings: QuantizeSettings, widths: Sequence[int]
) -> list[WeightMatrix]:
    """Return the matrices of `layers` with their stored sizes, in the order of the layers."""
    found: dict[int, WeightMatrix] = {}
    for layer in layers:
        found.setdefault(layer.weight_id, WeightMatrix([])).layers.append(layer)
    for unit in found.values():
        rows, width = unit.layers[0].module.weight.shape
        for bits in widths:
            stored = (
                SCHEMES_BY_BITS[bits]
                .stored_tensors(rows, width, settings.scheme_options(SCHEMES_BY_BITS[bits].name))
                .values()
            )
            unit.costs[bits] = 8 * sum(map(stored_bytes, stored))
    return list(found.values())


def measure_matrix_sensitivities(
    model: Any,
    units: Sequence[WeightMatrix],
    rows: CalibrationSamples,
    settings: QuantizeSettings,
    coder_of: Callable[[PlannedLayer], WeightQuantizer | None],
    ctx: Context,
) -> None:
    """Measure the sensitivity of each matrix at each width, one matrix at a time.

    The sensitivity is defined as in layer_sensitivity.py; embeddings are measured too.

    Args:
        model: not changed.
        units: its matrices; `sensitivities` is filled in.
        rows: calibration samples.
        settings: settings with the scheme options.
        coder_of: returns the quantizer of a layer.
        ctx: reports progress.

    Raises:
        InputError: the model's outputs are not finite.
    """
    whole = [out.clone() for out in model_outputs(model, rows.batches)]
    spread = output_variance(whole, rows) * sum(out.numel() for out in whole)
    total = sum(len(unit.costs) for unit in units)
    done = 0
    for unit, off_by in output_changes(model, units, lambda unit: unit.layers, rows, whole, ctx):
        for bits in unit.costs:
            layers = unit.layers_with_bits(bits, settings)
            quantize_layers(model, layers, {}, coder_of)
            try:
                off = off_by()
            finally:
                for layer in layers:
                    replace_layer(model, [], layer.name, layer.module, {})
            unit.sensitivities[bits] = off / spread
            done += 1
            ctx.progress(done, total, "sensitivity of each layer")
