"""Mixed precision: bit widths per matrix for a mean number of bits or a maximum drop of a metric.

The sensitivity of the model's outputs to each matrix is measured alone at each bit width. Sensitivities are
added up; interactions are not measured. With `max_degradation` whole models are scored, so interactions count
there.

One bit width per matrix with the least total sensitivity for the total bits is a multiple-choice knapsack.
The states of all matrices so far are visited in the order of their bits, and only Pareto-optimal ones are
kept (Nemhauser & Ullmann 1969, Discrete Dynamic Programming and Capital Allocation): exact while there are
few states. The matrices of a transformer have few shapes, so many choices take the same bits. Above
`_MAX_STATES`, one state is kept per interval of bits.

Shapes: N = outputs (rows), K = inputs (columns).
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from smelt.calibration.prefix_cache import Change, PrefixCachedModel
from smelt.calibration.samples import CalibrationSamples, model_outputs
from smelt.compress.quantize.nested_settings import MaxExcluded, MixedPrecision
from smelt.compress.quantize.plan_layers import (
    ActivationRange,
    PlannedLayer,
    WeightQuantizer,
    plan_layers,
    quantize_layers,
    quantize_planned,
)
from smelt.compress.quantize.settings import QuantizeSettings
from smelt.core.artifact import Artifact
from smelt.core.errors import InputError, did_you_mean
from smelt.core.near_ties import round_significant
from smelt.models.edits import replace_layer
from smelt.models.families.registry import blocks_of
from smelt.quantization.schemes.registry import SCHEMES_BY_BITS
from smelt.stage import Context, candidate_artifact

KeyT = TypeVar("KeyT")

# default of max_excluded.layers, as a fraction of all layers
_DEFAULT_EXCLUDED_SHARE = 0.1


def measure_layer_sensitivities(
    model: Any,
    layers: Sequence[PlannedLayer],
    ranges: Mapping[int, ActivationRange],
    samples: CalibrationSamples,
    ctx: Context,
) -> dict[str, float]:
    """Return the sensitivity of each linear layer when it alone is quantized, the most sensitive first.

    The sensitivity is the mean squared change of all outputs (logits, vectors) relative to their variance:
    0.01 is noise of a tenth of their standard deviation.

    Args:
        model: not changed.
        layers: its planned layers; embeddings are left out.
        ranges: activation ranges, as in `quantize_layers`.
        samples: calibration samples.
        ctx: reports progress.

    Raises:
        InputError: the model's outputs are not finite.
    """
    reference_outputs = [out.clone() for out in model_outputs(model, samples.batches)]
    spread = output_variance(reference_outputs, samples)
    linear_layers = [layer for layer in layers if layer.multiplies]
    sensitivities = dict.fromkeys((layer.name for layer in linear_layers), 0.0)

    @contextmanager
    def quantized(layer: PlannedLayer) -> Iterator[None]:
        replace_layer(model, [], layer.name, quantize_planned(layer, ranges), {})
        try:
            yield
        finally:
            replace_layer(model, [], layer.name, layer.module, {})

    changes = [LayerChange([layer], partial(quantized, layer), layer.name) for layer in linear_layers]
    errors = output_errors(model, changes, samples, reference_outputs, ctx)
    for count, (name, error) in enumerate(errors, start=1):
        sensitivities[name] = round_significant(
            error / sum(right.numel() for right in reference_outputs) / spread
        )
        ctx.progress(count, len(linear_layers), "sensitivity of each layer")
    return dict(sorted(sensitivities.items(), key=lambda item: -item[1]))


@dataclass(frozen=True)
class LayerChange(Generic[KeyT]):
    """A change of `layers`, inside the context that `apply` returns; `key` identifies it."""

    layers: Sequence[PlannedLayer]
    apply: Change
    key: KeyT


def output_errors(
    model: Any,
    changes: Sequence[LayerChange[KeyT]],
    samples: CalibrationSamples,
    reference_outputs: Sequence[Tensor],
    ctx: Context,
) -> Iterator[tuple[KeyT, float]]:
    """Yield the key of each change with the sum of the squared changes of all outputs.

    The model runs from the changed block on, since nothing before it changes, and later blocks compute
    several changes at once (see `PrefixCachedModel`).

    Args:
        model: unchanged outside of the changes.
        changes: yielded in the order of their blocks; changes in no block, or in several, first.
        samples: calibration samples.
        reference_outputs: outputs of the unchanged model on each batch.
        ctx: for a temporary folder next to `ctx.out` if memory is short.
    """
    blocks = blocks_of(model)

    def block_of(change: LayerChange[KeyT]) -> int:
        block_indices = [
            next((index for index, b in enumerate(blocks) if layer.name.startswith(f"{b.module_path}.")), -1)
            for layer in change.layers
        ]
        return block_indices[0] if len(set(block_indices)) == 1 else -1

    def squared_error(number: int, output: Tensor) -> float:
        return float((output - reference_outputs[number]).square().sum(dtype=torch.float64))

    with tempfile.TemporaryDirectory(dir=ctx.out.parent) as folder:
        cached_model = PrefixCachedModel(model, samples.batches, Path(folder))
        for block, group in groupby(sorted(changes, key=block_of), key=block_of):
            if block >= 0:
                cached_model.start_at(blocks[block].stack.name, blocks[block].index)
            in_block = list(group)
            applied = [change.apply for change in in_block]
            errors = cached_model.outputs_of_changes(applied, squared_error)
            yield from zip((change.key for change in in_block), errors, strict=True)


def output_variance(outputs: Sequence[Tensor], samples: CalibrationSamples) -> float:
    """Return the variance of `outputs` on `samples`, the unit of sensitivities.

    Raises:
        InputError: outputs are not finite.
    """
    result = variance(outputs)
    if not math.isfinite(result):
        raise InputError(
            f"quantize: the model's outputs on samples of {samples.origin} are not finite, so"
            " sensitivities cannot be measured. The training before this step has probably"
            " diverged; lower its learning_rate.",
            code="non-finite-outputs",
        )
    return result


def variance(parts: Sequence[Tensor]) -> float:
    """Return the variance of all values of `parts`; 1 if they are all equal."""
    count = sum(tensor.numel() for tensor in parts)
    mean = sum(float(tensor.sum(dtype=torch.float64)) for tensor in parts) / count
    return sum(float((tensor.double() - mean).square().sum()) for tensor in parts) / count or 1.0


def select_sensitive(sensitivities: Mapping[str, float], max_excluded: MaxExcluded) -> list[str]:
    """Return the layers to keep in float: the most sensitive ones, within `max_excluded`.

    Args:
        sensitivities: by layer, the most sensitive first.
        max_excluded: the maximum number, and the share of the total sensitivity allowed for the others.
    """
    max_layers = max_excluded.layers
    if max_layers is None:
        max_layers = (
            len(sensitivities)
            if max_excluded.sensitivity is not None
            else math.ceil(_DEFAULT_EXCLUDED_SHARE * len(sensitivities))
        )
    remaining, total = sum(sensitivities.values()), sum(sensitivities.values())
    excluded: list[str] = []
    for name, value in sensitivities.items():
        if len(excluded) >= max_layers or remaining <= (max_excluded.sensitivity or 0.0) * total:
            break
        excluded.append(name)
        remaining -= value
    return excluded


_MAX_STATES = 4000


@dataclass(frozen=True)
class WidthChoice:
    """One choice per matrix. cost: total bits. sensitivity: the sum. choices: index by matrix."""

    cost: int
    sensitivity: float
    choices: tuple[int, ...]


def pareto_choices(choices: Sequence[Sequence[tuple[int, float]]]) -> list[WidthChoice]:
    """Return the Pareto-optimal choices in bits and sensitivity, the cheapest first.

    Args:
        choices: bits and sensitivity of each possible choice, by matrix.
    """
    states: list[tuple[int, float, Any]] = [(0, 0.0, None)]
    for options in choices:
        candidates = [
            (cost + extra_cost, damage + extra_damage, (previous, index))
            for cost, damage, previous in states
            for index, (extra_cost, extra_damage) in enumerate(options)
        ]
        states = _thin_states(_pareto_states(candidates))
    return [WidthChoice(cost, damage, _trace_choices(previous)) for cost, damage, previous in states]


def best_within(choices: Sequence[WidthChoice], cost: float) -> WidthChoice | None:
    """Return the choice with the least sensitivity within `cost` bits; None if all take more."""
    return next((choice for choice in reversed(choices) if choice.cost <= cost), None)


def _pareto_states(states: list[tuple[int, float, Any]]) -> list[tuple[int, float, Any]]:
    optimal, least_damage = [], math.inf
    for state in sorted(states, key=lambda state: state[:2]):
        if state[1] < least_damage:
            optimal.append(state)
            least_damage = state[1]
    return optimal


def _thin_states(states: list[tuple[int, float, Any]]) -> list[tuple[int, float, Any]]:
    """Return the cheapest state and the last (least sensitive) one of each interval of bits."""
    if len(states) <= _MAX_STATES:
        return states
    first, step = states[0][0], (states[-1][0] - states[0][0]) / (_MAX_STATES - 1)
    by_interval = {math.ceil((state[0] - first) / step): state for state in states}
    return [state for _, state in sorted(by_interval.items())]


def _trace_choices(before: Any) -> tuple[int, ...]:
    choices: list[int] = []
    while before is not None:
        before, index = before
        choices.append(index)
    return tuple(reversed(choices))


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
    matrices: dict[int, WeightMatrix] = {}
    for layer in layers:
        matrices.setdefault(layer.weight_id, WeightMatrix([])).layers.append(layer)
    for unit in matrices.values():
        rows, width = unit.layers[0].module.weight.shape
        for bits in widths:
            stored = (
                SCHEMES_BY_BITS[bits]
                .stored_tensors(rows, width, settings.scheme_options(SCHEMES_BY_BITS[bits].name))
                .values()
            )
            unit.costs[bits] = 8 * sum(tensor.size_bytes for tensor in stored)
    return list(matrices.values())


def measure_matrix_sensitivities(
    model: Any,
    units: Sequence[WeightMatrix],
    samples: CalibrationSamples,
    settings: QuantizeSettings,
    quantizer: WeightQuantizer,
    ctx: Context,
) -> None:
    """Measure the sensitivity of each matrix at each width, one matrix at a time.

    The sensitivity is defined and rounded as in `measure_layer_sensitivities`; embeddings are measured too.

    Args:
        model: not changed.
        units: its matrices; `sensitivities` is filled in.
        samples: calibration samples.
        settings: settings with the scheme options.
        quantizer: chooses the quantized weights.
        ctx: reports progress.

    Raises:
        InputError: the model's outputs are not finite.
    """
    reference_outputs = [out.clone() for out in model_outputs(model, samples.batches)]
    spread = output_variance(reference_outputs, samples) * sum(out.numel() for out in reference_outputs)

    @contextmanager
    def quantized(unit: WeightMatrix, bits: int) -> Iterator[None]:
        layers = unit.layers_with_bits(bits, settings)
        quantize_layers(model, layers, {}, quantizer)
        try:
            yield
        finally:
            for layer in layers:
                replace_layer(model, [], layer.name, layer.module, {})

    changes = [
        LayerChange(unit.layers, partial(quantized, unit, bits), (unit, bits))
        for unit in units
        for bits in unit.costs
    ]
    errors = output_errors(model, changes, samples, reference_outputs, ctx)
    for count, ((unit, bits), error) in enumerate(errors, start=1):
        unit.sensitivities[bits] = round_significant(error / spread)
        ctx.progress(count, len(changes), "sensitivity of each layer")


# minimum difference in bits per weight between two scored models
_FINE_DROP = 0.1


def choose_bit_widths(
    model: Any,
    layers: Sequence[PlannedLayer],
    samples: CalibrationSamples,
    src: Artifact,
    settings: QuantizeSettings,
    quantizer: WeightQuantizer,
    ctx: Context,
) -> list[PlannedLayer]:
    """Return `layers` with the bit widths that `settings.mixed_precision` requires; write the details.

    Args:
        model: not changed.
        layers: its planned layers; their schemes are replaced.
        samples: calibration samples for the sensitivities.
        src: the artifact of `model`.
        settings: settings of the stage.
        quantizer: chooses the quantized weights for sensitivities and scored models.
        ctx: gets details and warnings; its `score` is used for `max_degradation`.

    Raises:
        InputError: target_bits is less than the smallest width needs, or the metric is not scored.
    """
    precision = settings.mixed_precision
    assert precision is not None
    widths = sorted(precision.bit_widths)
    units = weight_matrices(layers, settings, widths)
    total = sum(unit.num_weights for unit in units)
    min_bits = sum(unit.costs[widths[0]] for unit in units) / total
    if precision.target_bits is not None and precision.target_bits < min_bits:
        raise InputError(
            f"quantize: mixed_precision: target_bits {precision.target_bits:g} is too small: with"
            f" {widths[0]} bits in all layers, this model needs {min_bits:.3g} bits per weight,"
            " including scales and padding. Increase target_bits.",
            code="budget-too-small",
            setting="mixed_precision.target_bits",
        )
    trial = _ModelScorer(src, settings, quantizer, ctx)
    # score the float model first, so that an unknown metric fails before the long part
    float_score = trial.float_score() if precision.target_bits is None else 0.0
    measure_matrix_sensitivities(model, units, samples, settings, quantizer, ctx)
    choices = pareto_choices([[(unit.costs[b], unit.sensitivities[b]) for b in widths] for unit in units])
    trial_details: dict[str, Any] = {}
    if precision.target_bits is not None:
        choice = best_within(choices, precision.target_bits * total)
        assert choice is not None
    else:
        choice = _within_drop(choices, widths, total, precision, float_score, trial, ctx)
        trial_details = {"metric": trial.metric, "score_of_floats": trial.of_floats, "scores": trial.history}
    picked = {unit.name: widths[index] for unit, index in zip(units, choice.choices, strict=True)}
    ctx.details["mixed_precision"] = {
        "average_bits": round(choice.cost / total, 3),
        "bits": picked,
        "sensitivity": _sensitivities(units),
        "sensitivity_samples": samples.num_samples,
        **trial_details,
    }
    by_weight = {
        unit.layers[0].weight_id: unit.layers_with_bits(picked[unit.name], settings) for unit in units
    }
    updated = {layer.name: layer for several in by_weight.values() for layer in several}
    return [updated[layer.name] for layer in layers]


def _sensitivities(units: Sequence[WeightMatrix]) -> dict[str, dict[str, float]]:
    """Return the sensitivity of each matrix by bits, the most sensitive (at the fewest bits) first."""
    worst = sorted(units, key=lambda unit: -unit.sensitivities[min(unit.sensitivities)])
    return {u.name: {str(b): d for b, d in sorted(u.sensitivities.items())} for u in worst}


class _ModelScorer:
    """Scores whole models on validation data.

    of_floats: score of the float model. history: mean bits and scores, in the order of scoring.
    """

    def __init__(
        self,
        src: Artifact,
        settings: QuantizeSettings,
        quantizer: WeightQuantizer,
        ctx: Context,
    ) -> None:
        self.src, self.settings, self.quantizer, self.ctx = src, settings, quantizer, ctx
        assert settings.mixed_precision is not None
        self.metric = settings.mixed_precision.metric or ""
        self.of_floats: float | None = None
        self.history: list[dict[str, float]] = []

    def float_score(self) -> float:
        """Return the score of the float model."""
        scores = self.ctx.score(self.src)
        self.metric = self.metric or next(iter(scores), "")
        if self.metric not in scores:
            available = ", ".join(scores) or "none"
            raise InputError(
                f"quantize: mixed_precision: this recipe does not score the metric '{self.metric}'."
                f" Scored metrics: {available}.{did_you_mean(self.metric, scores)} Add it to score:"
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
        from smelt.models.checkpoint import load_model, save_model

        model, edits = load_model(self.src.path)
        units = weight_matrices(plan_layers(model, self.settings), self.settings, ())
        layers = [
            layer
            for unit, b in zip(units, picks, strict=True)
            for layer in unit.layers_with_bits(b, self.settings)
        ]
        new_edits = quantize_layers(model, layers, {}, self.quantizer)
        with tempfile.TemporaryDirectory(prefix="score-", dir=self.ctx.out.parent) as folder:
            save_model(model, edits + new_edits, Path(folder), self.src.path)
            scores = self.ctx.score(candidate_artifact(Path(folder), self.src, self.ctx))
        self.history.append(
            {"average_bits": round(average, 3), self.metric: self._sign() * scores[self.metric]}
        )
        return float(scores[self.metric])


def _within_drop(
    choices: Sequence[WidthChoice],
    widths: Sequence[int],
    total: int,
    asked: MixedPrecision,
    float_score: float,
    trial: _ModelScorer,
    ctx: Context,
) -> WidthChoice:
    """Return the cheapest scored choice that loses at most `asked.max_degradation`, by bisection."""
    assert asked.max_degradation is not None
    limit = float_score - asked.max_degradation

    def good(index: int) -> bool:
        candidate = choices[index]
        return trial.score([widths[pick] for pick in candidate.choices], candidate.cost / total) >= limit

    low, high = -1, len(choices) - 1
    if not good(high):
        ctx.warn(
            "max-degradation-exceeded",
            f"mixed_precision: even with the most bits ({choices[high].cost / total:.3g} per weight),"
            f" {trial.metric} on validation data is worse by more than max_degradation"
            f" {asked.max_degradation:g}; this choice is used. Increase max_degradation, or add larger"
            " bit_widths.",
        )
        return choices[high]
    while high - low > 1 and choices[high].cost - choices[max(low, 0)].cost > _FINE_DROP * total:
        middle = (low + high) // 2 if low >= 0 else 0
        low, high = (low, middle) if good(middle) else (middle, high)
    return choices[high]
