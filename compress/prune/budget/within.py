"""A budget of the recipe, spent on the units of a model; what was asked, and what was reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from smelt.compress.calibration.rows import calibration_rows
from smelt.compress.float_model import stored_parameters
from smelt.compress.prune.budget.choose import kept_within
from smelt.compress.prune.budget.costs import Costs, count_operations, operation_costs, parameter_costs
from smelt.compress.prune.budget.latency import latency_costs
from smelt.compress.prune.budget.sizes import Group
from smelt.compress.prune.groups import AttentionGroup, FeedForwardGroup
from smelt.compress.prune.importance.magnitude import magnitude_scores
from smelt.compress.prune.importance.scores import Scores
from smelt.compress.prune.settings import Budget, PruneSettings
from smelt.core.artifact import Artifact
from smelt.core.data import IMAGES
from smelt.core.stage import Context

# Texts whose mean length is that of a text.
_ROWS = 256


class Spent:
    """How many units of each group stay within a budget.

    kept: by the name of a group.
    """

    def __init__(
        self,
        model: Any,
        groups: Sequence[Group],
        scores: Scores | None,
        src: Artifact,
        settings: PruneSettings,
        ctx: Context,
    ) -> None:
        """Find what units cost, and choose.

        Args:
            model: float, on the CPU, before anything is cut.
            src: where its tokenizer lies.
            groups: those that may lose units.
            scores: of all of them; None where the weights say it.
            settings: with a budget.
            ctx: data, threads, progress.

        Raises:
            InputError: what stays in any case is more than the budget.
        """
        assert settings.budget is not None
        self._budget: Budget = settings.budget
        steps = {g.name: 1 if isinstance(g, AttentionGroup) else settings.multiple_of for g in groups}
        steps = {g.name: min(steps[g.name], g.count(model)) for g in groups}
        self.costs = _costs(model, groups, src, self._budget, steps, ctx)
        found = _comparable(model, groups, scores, settings, self.costs)
        self.kept = kept_within(found, self.costs, self._budget.share, steps, self._budget.measure)

    def details(self, model: Any) -> dict[str, Any]:
        """Return what was asked and what was reached; `model` is the one that is left.

        Values and multiplications are counted in it; its time is the sum of the timings.
        """
        costs, measure = self.costs, self._budget.measure
        reached = costs.fixed + sum(float(cost[self.kept[name]]) for name, cost in costs.of.items())
        if measure == "parameters":
            reached = float(stored_parameters(model))
        elif measure == "flops":
            reached = float(count_operations(model, costs.measured["sequence_length"]))
        found = {"before": _short(costs.whole), "reached": _short(reached), "unit": costs.unit}
        share = {"asked": self._budget.share, "left": round(reached / costs.whole, 4)}
        return {"measure": measure, **share, **found, **costs.measured}


def _costs(
    model: Any,
    groups: Sequence[Group],
    src: Artifact,
    budget: Budget,
    steps: dict[str, int],
    ctx: Context,
) -> Costs:
    if budget.measure == "parameters":
        return parameter_costs(model, groups)
    length = budget.sequence_length or _mean_length(model, src, ctx)
    if budget.measure == "flops":
        return operation_costs(model, groups, length)
    return latency_costs(model, groups, length, budget.measure_on or "ort-cpu", steps, ctx)


def _mean_length(model: Any, src: Artifact, ctx: Context) -> int | None:
    """Return how many tokens a text of the data has, of a translator the mean of both sides.

    None where there are no texts: images, running text, no data.
    """
    split = ctx.data.get("calibration") or ctx.data.get("train")
    if ctx.task in (IMAGES, "language-modeling") or not split:
        return None
    rows = calibration_rows(model, src, _ROWS, ctx, "prune", padded=True)
    texts = sum(len(batch["attention_mask"]) for batch in rows.batches)
    return max(1, round(rows.tokens / (texts * (2 if model.config.is_encoder_decoder else 1))))


def _comparable(
    model: Any, groups: Sequence[Group], scores: Scores | None, settings: PruneSettings, costs: Costs
) -> Mapping[str, Tensor]:
    """Return scores of heads and neurons that say the same: by how much the loss changes without the unit.

    Taylor looks at a neuron from each of its products, and at a head once. What was drawn is drawn for each
    value that a unit costs. Magnitudes are only compared within one kind, as in `scope: global`.
    """
    heads = [group for group in groups if isinstance(group, AttentionGroup)]
    blocks = [group for group in groups if isinstance(group, FeedForwardGroup)]
    if scores is None or settings.importance == "magnitude":
        among = (scores or magnitude_scores(model, heads, blocks)).across_layers()
        return among.heads | among.neurons
    found = dict(scores.heads | scores.neurons)
    if settings.importance == "taylor":
        found |= {b.name: found[b.name] / (3 if b.parts.gate else 2) for b in blocks}
    if settings.importance == "random":
        found = {name: score * float(costs.of[name][-1]) / len(score) for name, score in found.items()}
    return found


def _short(value: float) -> float | int:
    return int(value) if value == int(value) else round(value, 3)
