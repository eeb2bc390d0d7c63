"""Mixed precision: bit widths per matrix for a mean number of bits or a maximum drop of a metric.

Sensitivities of single matrices are added up; interactions are not measured. With `max_drop` whole models are
scored, so interactions count there.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from smelt.compress.calibration.samples import CalibrationSamples
from smelt.compress.candidate import candidate_artifact
from smelt.compress.quantize.plan_layers import PlannedLayer, plan_layers, quantize_layers
from smelt.compress.quantize.sensitivity.bit_widths import (
    WeightMatrix,
    measure_matrix_sensitivities,
    weight_matrices,
)
from smelt.compress.quantize.sensitivity.knapsack import WidthChoice, best_within, pareto_choices
from smelt.compress.quantize.sensitivity.settings import MixedPrecision
from smelt.compress.quantize.settings import QuantizeSettings
from smelt.compress.quantize.weight_quantizer import WeightQuantizer
from smelt.core.artifact import Artifact
from smelt.core.errors import InputError, did_you_mean
from smelt.core.stage import Context

# minimum difference in bits per weight between two scored models
_FINE_DROP = 0.1


def choose_bit_widths(
    model: Any,
    layers: Sequence[PlannedLayer],
    samples: CalibrationSamples,
    src: Artifact,
    settings: QuantizeSettings,
    quantizer_of: Callable[[PlannedLayer], WeightQuantizer | None],
    ctx: Context,
) -> list[PlannedLayer]:
    """Return `layers` with the bit widths that `settings.mixed_precision` asks for; write the details.

    Args:
        model: not changed.
        layers: its planned layers; their schemes are replaced.
        samples: calibration samples for the sensitivities.
        src: the artifact of `model`.
        settings: settings of the stage.
        quantizer_of: returns the quantizer of a layer for sensitivities and scored models.
        ctx: gets details and warnings; its `score` is used for `max_drop`.

    Raises:
        InputError: target_bits is less than the smallest width needs, or the metric is not scored.
    """
    asked = settings.mixed_precision
    assert asked is not None
    widths = sorted(asked.bit_widths)
    units = weight_matrices(layers, settings, widths)
    total = sum(unit.num_weights for unit in units)
    least = sum(unit.costs[widths[0]] for unit in units) / total
    if asked.target_bits is not None and asked.target_bits < least:
        raise InputError(
            f"quantize: mixed_precision: target_bits {asked.target_bits:g} is too small: with"
            f" {widths[0]} bits in all layers, this model needs {least:.3g} bits per weight,"
            " including scales and padding. Increase target_bits.",
            code="budget-too-small",
            setting="mixed_precision.target_bits",
        )
    trial = _ModelScorer(src, settings, quantizer_of, ctx)
    # score the float model first, so that an unknown metric fails before the long part
    whole = trial.float_score() if asked.target_bits is None else 0.0
    measure_matrix_sensitivities(model, units, samples, settings, quantizer_of, ctx)
    found = pareto_choices([[(unit.costs[b], unit.sensitivities[b]) for b in widths] for unit in units])
    told: dict[str, Any] = {}
    if asked.target_bits is not None:
        chosen = best_within(found, asked.target_bits * total)
        assert chosen is not None
    else:
        chosen = _within_drop(found, widths, total, asked, whole, trial, ctx)
        told = {"metric": trial.metric, "score_of_floats": trial.of_floats, "scores": trial.told}
    picked = {unit.name: widths[at] for unit, at in zip(units, chosen.choices, strict=True)}
    ctx.details["mixed_precision"] = {
        "average_bits": round(chosen.cost / total, 3),
        "bits": picked,
        "sensitivity": _sensitivities(units),
        "sensitivity_samples": samples.num_samples,
        **told,
    }
    by_weight = {
        unit.layers[0].weight_id: unit.layers_with_bits(picked[unit.name], settings) for unit in units
    }
    new = {layer.name: layer for several in by_weight.values() for layer in several}
    return [new[layer.name] for layer in layers]


def _sensitivities(units: Sequence[WeightMatrix]) -> dict[str, dict[str, float]]:
    """Return the sensitivity of each matrix by bits, the most sensitive (at the fewest bits) first."""
    worst = sorted(units, key=lambda unit: -unit.sensitivities[min(unit.sensitivities)])
    return {u.name: {str(b): float(f"{d:.3g}") for b, d in sorted(u.sensitivities.items())} for u in worst}


class _ModelScorer:
    """Scores whole models on validation data.

    of_floats: score of the float model. told: mean bits and scores, in the order of scoring.
    """

    def __init__(
        self,
        src: Artifact,
        settings: QuantizeSettings,
        coder_of: Callable[[PlannedLayer], WeightQuantizer | None],
        ctx: Context,
    ) -> None:
        self.src, self.settings, self.coder_of, self.ctx = src, settings, coder_of, ctx
        assert settings.mixed_precision is not None
        self.metric = settings.mixed_precision.metric or ""
        self.of_floats: float | None = None
        self.told: list[dict[str, float]] = []

    def float_score(self) -> float:
        """Return the score of the float model."""
        scores = self.ctx.score(self.src)
        self.metric = self.metric or next(iter(scores), "")
        if self.metric not in scores:
            known = ", ".join(scores) or "none"
            raise InputError(
                f"quantize: mixed_precision: this recipe does not score the metric '{self.metric}'."
                f" Scored metrics: {known}.{did_you_mean(self.metric, scores)} Add it to score:"
                f" {{quality: [...]}}, or set target_bits.",
                code="metric-not-scored",
                setting="mixed_precision.metric",
            )
        self.of_floats = self._sign() * scores[self.metric]
        return float(scores[self.metric])

    def _sign(self) -> int:
        """Return -1 for metrics where lower is better, else 1."""
        return -1 if self.metric in self.ctx.negated_metrics else 1

    def score(self, picks: Sequence[int], average: float) -> float:
        """Return the score of the model with the bit widths `picks`."""
        from smelt.runtime.models.checkpoint import load_model, save_model

        model, edits = load_model(self.src.path)
        units = weight_matrices(plan_layers(model, self.settings), self.settings, ())
        layers = [
            layer
            for unit, b in zip(units, picks, strict=True)
            for layer in unit.layers_with_bits(b, self.settings)
        ]
        new = quantize_layers(model, layers, {}, self.coder_of)
        with tempfile.TemporaryDirectory(prefix="score-", dir=self.ctx.out.parent) as space:
            save_model(model, edits + new, Path(space), self.src.path)
            scores = self.ctx.score(candidate_artifact(Path(space), self.src, self.ctx))
        self.told.append({"average_bits": round(average, 3), self.metric: self._sign() * scores[self.metric]})
        return float(scores[self.metric])


def _within_drop(
    found: Sequence[WidthChoice],
    widths: Sequence[int],
    total: int,
    asked: MixedPrecision,
    whole: float,
    trial: _ModelScorer,
    ctx: Context,
) -> WidthChoice:
    """Return the cheapest scored choice of `found` that loses at most `asked.max_drop`, by bisection."""
    assert asked.max_drop is not None
    limit = whole - asked.max_drop

    def good(at: int) -> bool:
        one = found[at]
        return trial.score([widths[pick] for pick in one.choices], one.cost / total) >= limit

    low, high = -1, len(found) - 1
    if not good(high):
        ctx.warn(
            "max-drop-exceeded",
            f"mixed_precision: even with the most bits ({found[high].cost / total:.3g} per weight),"
            f" the drop is larger than max_drop {asked.max_drop:g} of {trial.metric} on validation"
            " data; this choice is used. Increase max_drop, or add larger bit_widths.",
        )
        return found[high]
    while high - low > 1 and found[high].cost - found[max(low, 0)].cost > _FINE_DROP * total:
        middle = (low + high) // 2 if low >= 0 else 0
        low, high = (low, middle) if good(middle) else (middle, high)
    return found[high]
