"""Allocation of a recipe's budget to the units of a model, with the requested and reached values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from smelt.compress.calibration.samples import load_calibration_samples
from smelt.compress.float_model import count_stored_parameters
from smelt.compress.prune.budget.allocate import allocate_units
from smelt.compress.prune.budget.costs import UnitCosts, count_multiplications, flop_costs, parameter_costs
from smelt.compress.prune.budget.latency_costs import latency_costs
from smelt.compress.prune.budget.shapes import UnitGroup
from smelt.compress.prune.importance.magnitude import magnitude_scores
from smelt.compress.prune.importance.unit_scores import UnitScores
from smelt.compress.prune.settings import Budget, PruneSettings
from smelt.compress.prune.unit_groups import AttentionGroup, FeedForwardGroup
from smelt.core.artifact import Artifact
from smelt.core.data import IMAGE_CLASSIFICATION
from smelt.core.stage import Context

# Number of samples for the mean length.
_LENGTH_SAMPLES = 256


class BudgetAllocation:
    """The number of units of each group that are kept within a budget.

    kept: by group name.
    """

    def __init__(
        self,
        model: Any,
        groups: Sequence[UnitGroup],
        scores: UnitScores | None,
        src: Artifact,
        settings: PruneSettings,
        ctx: Context,
    ) -> None:
        """Determine the costs of units, and choose the kept ones.

        Args:
            model: float, on the CPU, before pruning.
            groups: groups that may lose units.
            scores: scores of all groups; None to use weight magnitudes.
            src: the artifact with the tokenizer.
            settings: settings with a budget.
            ctx: data, threads, progress.

        Raises:
            InputError: the minimum that is always kept exceeds the budget.
        """
        assert settings.budget is not None
        self._budget: Budget = settings.budget
        steps = {g.name: 1 if isinstance(g, AttentionGroup) else settings.multiple_of for g in groups}
        steps = {g.name: min(steps[g.name], g.count(model)) for g in groups}
        self.costs = _unit_costs(model, groups, src, self._budget, steps, ctx)
        found = _comparable_scores(model, groups, scores, settings, self.costs)
        self.kept = allocate_units(found, self.costs, self._budget.keep_ratio, steps, self._budget.measure)

    def details(self, model: Any) -> dict[str, Any]:
        """Return the requested and reached values for the pruned `model`.

        Parameters and multiplications are counted in the model; latency is the sum of the timings.
        """
        costs, measure = self.costs, self._budget.measure
        reached = costs.fixed + sum(float(cost[self.kept[name]]) for name, cost in costs.by_group.items())
        if measure == "parameters":
            reached = float(count_stored_parameters(model))
        elif measure == "flops":
            reached = float(count_multiplications(model, costs.details["sequence_length"]))
        found = {"before": _round_value(costs.total), "reached": _round_value(reached), "unit": costs.unit}
        share = {"asked": self._budget.keep_ratio, "left": round(reached / costs.total, 4)}
        return {"measure": measure, **share, **found, **costs.details}


def _unit_costs(
    model: Any,
    groups: Sequence[UnitGroup],
    src: Artifact,
    budget: Budget,
    steps: dict[str, int],
    ctx: Context,
) -> UnitCosts:
    if budget.measure == "parameters":
        return parameter_costs(model, groups)
    length = budget.sequence_length or _mean_length(model, src, ctx)
    if budget.measure == "flops":
        return flop_costs(model, groups, length)
    return latency_costs(model, groups, length, budget.measure_on or "ort-cpu", steps, ctx)


def _mean_length(model: Any, src: Artifact, ctx: Context) -> int | None:
    """Return the mean number of tokens per sample, for translation the mean of both sides.

    None for images, running text, or without data.
    """
    split = ctx.data.get("calibration") or ctx.data.get("train")
    if ctx.task in (IMAGE_CLASSIFICATION, "language-modeling") or not split:
        return None
    rows = load_calibration_samples(model, src, _LENGTH_SAMPLES, ctx, "prune", padded=True)
    texts = sum(len(batch["attention_mask"]) for batch in rows.batches)
    return max(1, round(rows.tokens / (texts * (2 if model.config.is_encoder_decoder else 1))))


def _comparable_scores(
    model: Any,
    groups: Sequence[UnitGroup],
    scores: UnitScores | None,
    settings: PruneSettings,
    costs: UnitCosts,
) -> Mapping[str, Tensor]:
    """Return scores of heads and neurons on one scale: the change of the loss without the unit.

    Taylor counts a neuron once per linear layer, and a head once. Random scores are scaled by the cost of a
    unit. Magnitudes are only compared within one kind, as in `scope: global`.
    """
    heads = [group for group in groups if isinstance(group, AttentionGroup)]
    blocks = [group for group in groups if isinstance(group, FeedForwardGroup)]
    if scores is None or settings.importance == "magnitude":
        among = (scores or magnitude_scores(model, heads, blocks)).normalized()
        return among.heads | among.neurons
    found = dict(scores.heads | scores.neurons)
    if settings.importance == "taylor":
        found |= {b.name: found[b.name] / (3 if b.structure.gate else 2) for b in blocks}
    if settings.importance == "random":
        found = {name: score * float(costs.by_group[name][-1]) / len(score) for name, score in found.items()}
    return found


def _round_value(value: float) -> float | int:
    return int(value) if value == int(value) else round(value, 3)
