"""Search of a model's shape within one budget: layers, hidden width, heads and neurons.

A candidate is the model without some layers and with a smaller hidden width (`width`), of which heads and
neurons are then pruned to the budget (`heads_and_neurons`). So all candidates cost the same, and they are
compared by their loss on samples (labeled, or windows of text) that are used for nothing else. The search
starts at heads and neurons alone. A step removes one more layer of a stack, the one with the smallest loss
without it, or another eighth of the channels, the least important ones. The step with the smallest loss is
taken if it reduces the loss significantly (paired t-test over the samples), until none does or all heads and
neurons are within the budget. If heads and neurons alone cannot meet it, the search starts at the candidates
of the fewest steps that can.

Source: Minitron, Muralidharan et al. 2024, arXiv:2407.14679, section 2 (candidates of depth, width, heads and
neurons with one number of parameters; importance of channels by activations, of layers by the loss without
them) and Sreenivas et al. 2024, arXiv:2408.11796. There a lightweight training ranks the candidates, here the
loss after the refits does.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from smelt.calibration.samples import (
    LOSS_SAMPLES,
    CalibrationSamples,
    load_calibration_samples,
    warn_of_few_held_back,
)
from smelt.compress.drop_layers.layer_selection import keep_layers
from smelt.compress.drop_layers.select_layers import (
    UnitId,
    ablation_losses,
    drop_units_by_loss,
    keeps_first_layer,
    last_part_test,
    model_on_device,
    without_layers,
)
from smelt.compress.model_input import load_float_model
from smelt.compress.prune.budget import BudgetAllocation
from smelt.compress.prune.heads_and_neurons import cut_groups, target_groups
from smelt.compress.prune.importances.registry import IMPORTANCES
from smelt.compress.prune.importances.scores import ScoredModel
from smelt.compress.prune.reconstruct import load_reconstruction_samples
from smelt.compress.prune.settings import PruneSettings, fixed_heads_warnings, fixed_width_error
from smelt.compress.prune.width import refit_width
from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.data.splits import Example, missing_labels_errors, spread_indices
from smelt.models.checkpoint import count_stored_parameters, save_model
from smelt.models.edits import Edit
from smelt.models.families.registry import family_of
from smelt.models.hidden_width import hidden_width, prune_hidden_width, write_width_to_config
from smelt.stage import Context
from smelt.tasks.encode_split import EncodedSplit, encode_split
from smelt.tasks.samples import IGNORE_INDEX, TensorBatch, load_processor
from smelt.training.extension import mean_loss
from smelt.training.losses import label_objective

# A step of the search removes this fraction of the channels of the hidden states.
_WIDTH_STEPS = 8
# A result that costs less than this part of the budget has a warning.
_SPENT = 0.9
# Samples for the loss without a layer, as `drop-layers` has by default.
_LAYER_SAMPLES = 128
# A smaller shape is taken by chance in so many of the rounds at most, all candidates of a round together.
_CHANCE = 0.025


@dataclass(frozen=True)
class _Shape:
    """The removed layers, and the channels of the hidden states that are kept."""

    removed_layers: frozenset[UnitId]
    width: int


@dataclass(frozen=True)
class _Candidate:
    """A model within the budget, its edits, and its loss.

    ctx: its warnings and details. losses: of each sample, float64 [samples]. keeps_all: whether the budget
    leaves all of its heads and neurons, so that a smaller shape gains nothing.
    """

    shape: _Shape
    model: Any
    edits: list[Edit]
    ctx: Context
    loss: float
    losses: NDArray[np.float64]
    keeps_all: bool


def prune_to_shape(src: Artifact, settings: PruneSettings, ctx: Context) -> None:
    """Search the shape of `src` within the budget, and write the model to `ctx.out`.

    Raises:
        InputError: the model is quantized, its width cannot be pruned, there are no labeled samples, or the
            smallest shape exceeds the budget.
    """
    model, edits = load_float_model(src, "prune")
    ctx.warnings.extend(fixed_heads_warnings(settings.targets, model.config.to_dict()))
    if "width" in settings.targets and (reason := fixed_width_error(model.config.to_dict(), ctx.task)):
        raise InputError(f"prune: {reason.message}", code=reason.code, setting=reason.setting)
    search = _ShapeSearch(model, edits, src, settings, ctx)
    best = search.run()
    ctx.warnings.extend(best.ctx.warnings)
    ctx.details["parameters_before"] = count_stored_parameters(model)
    ctx.details.update(best.ctx.details)
    ctx.details["parameters_after"] = count_stored_parameters(best.model)
    ctx.details["candidates"] = search.results
    budget = ctx.details["budget"]
    if budget["left"] < _SPENT * budget["asked"]:  # a step went beyond it, and its loss is smaller
        ctx.warn(
            "budget-not-spent",
            f"{100 * budget['left']:.1f} % of the {budget['unit']} are left, with a budget of"
            f" {100 * budget['asked']:g} %: the best candidate keeps all of its heads and neurons, and larger"
            " ones have a larger loss. To use the rest, set targets: [heads, ffn], or a larger budget for"
            " more layers or channels.",
            setting=f"budget.{budget['measure']}",
        )
    ctx.warnings.extend(save_model(best.model, best.edits, ctx.out, src.path, settings.dtype))


class _ShapeSearch:
    """The search; results: the layers, width and loss of each candidate, for the report."""

    def __init__(
        self, model: Any, edits: list[Edit], src: Artifact, settings: PruneSettings, ctx: Context
    ) -> None:
        self._model, self._edits, self._src, self._settings = model, edits, src, settings
        self._ctx, samples = _hold_back(model, src, ctx)
        self._rows = _single_samples(samples.batches)
        self._weights = np.array([int((row["labels"] != IGNORE_INDEX).sum()) for row in self._rows])
        family: Any = family_of(model)
        self._stacks = list(family.stacks(model.config.to_dict()))
        groups = target_groups(model, settings)
        self._original = BudgetAllocation(model, groups, src, settings, self._fresh_ctx())
        self._least_cost = self._original.cost_before
        self._width = hidden_width(model) if "width" in settings.targets else 0
        multiple = settings.multiple_of
        self._width_step = max(1, round(self._width / _WIDTH_STEPS / multiple)) * multiple
        self._channels: Tensor | None = None
        self._next_layers: dict[tuple[frozenset[UnitId], str], UnitId | None] = {}
        self.results: list[dict[str, Any]] = []

    def run(self) -> _Candidate:
        """Return the best candidate.

        Raises:
            InputError: no candidate is within the budget.
        """
        self._require_reachable()
        best: _Candidate | None = None
        shapes = [_Shape(frozenset(), self._width)]
        while shapes:
            nearest: _Candidate | None = None
            for shape in shapes:
                candidate = self._prune(shape)
                if candidate is not None and (nearest is None or candidate.loss < nearest.loss):
                    nearest = candidate
            if nearest is not None and (best is None or self._is_better(nearest, best, len(shapes))):
                best = nearest
                shapes = [] if best.keeps_all else self._smaller_shapes([best.shape])
            else:
                shapes = [] if best is not None else self._smaller_shapes(shapes)
        if best is None:
            raise self._too_small_error(self._least_cost)
        return best

    def _is_better(self, candidate: _Candidate, best: _Candidate, num_candidates: int) -> bool:
        """Return whether the loss of `candidate`, the best of `num_candidates`, is smaller significantly.

        A paired t-test over the samples that are held back, corrected for the candidates (Bonferroni).
        """
        from scipy.stats import t

        count = len(self._rows)
        if count < 2:
            return False
        differences = candidate.losses - best.losses
        mean = np.average(differences, weights=self._weights)
        spread = np.linalg.norm(self._weights * (differences - mean)) / self._weights.sum()
        quantile = t.ppf(1 - _CHANCE / num_candidates, count - 1)
        return bool(mean < -quantile * spread * np.sqrt(count / (count - 1)))

    def _smaller_shapes(self, shapes: Iterable[_Shape]) -> list[_Shape]:
        """Return the shapes that are one step smaller than any of `shapes`, each once."""
        smaller: dict[_Shape, None] = {}
        for shape in shapes:
            for stack in self._stacks if "layers" in self._settings.targets else []:
                if (layer := self._next_layer(shape.removed_layers, stack.name)) is not None:
                    smaller[replace(shape, removed_layers=shape.removed_layers | {layer})] = None
            if shape.width > self._width_step:
                smaller[replace(shape, width=shape.width - self._width_step)] = None
        return list(smaller)

    def _require_reachable(self) -> None:
        """Require that the smallest shape is within the budget, before many shapes are tried.

        Raises:
            InputError: it is not.
        """
        removed: set[UnitId] = set()
        if "layers" in self._settings.targets:
            counts = ((stack.name, len(stack.modules(self._model))) for stack in self._stacks)
            removed = {(name, index) for name, count in counts for index in range(1, count)}
        smallest = _Shape(frozenset(removed), (self._width - 1) % self._width_step + 1 if self._width else 0)
        model, _ = self._without_layers(smallest)
        if smallest.width < self._width:
            prune_hidden_width(model, list(range(smallest.width)))
        groups, ctx = target_groups(model, self._settings), self._fresh_ctx()
        allocation = BudgetAllocation(model, groups, self._src, self._settings, ctx, self._original)
        if allocation.least > allocation.limit:
            raise self._too_small_error(allocation.least)

    def _without_layers(self, shape: _Shape) -> tuple[Any, list[Edit]]:
        """Return a copy of the model without the removed layers of `shape`, and its edits."""
        model, edits, layers = copy.deepcopy(self._model), list(self._edits), self._kept_layers(shape)
        for stack in self._stacks:
            if len(layers[stack.name]) < len(stack.modules(model)):
                edits, _ = keep_layers(model, edits, stack.name, layers[stack.name], "first", stage="prune")
        return model, edits

    def _next_layer(self, removed: frozenset[UnitId], stack_name: str) -> UnitId | None:
        """Return `_find_next_layer`, which shapes with other widths share."""
        if (removed, stack_name) not in self._next_layers:
            self._next_layers[removed, stack_name] = self._find_next_layer(removed, stack_name)
        return self._next_layers[removed, stack_name]

    def _find_next_layer(self, removed: frozenset[UnitId], stack_name: str) -> UnitId | None:
        """Return the layer of a stack with the smallest loss without it and `removed`, if one can go."""
        counts = {stack.name: len(stack.modules(self._model)) for stack in self._stacks}
        count, num_removed = counts[stack_name], sum(name == stack_name for name, _ in removed)
        if num_removed == count - 1:
            return None
        plain_modules: set[torch.nn.Module] = set()
        required = {(stack_name, 0)} if keeps_first_layer(self._model) else set()
        ctx = self._fresh_ctx()
        batches = load_calibration_samples(
            self._model, self._src, _LAYER_SAMPLES, ctx, "prune", labels=True, padded=True
        ).batches

        def without(units: Iterable[UnitId]) -> Any:
            return without_layers(self._model, self._stacks, {*units, *removed}, plain_modules)

        with ablation_losses(self._model, batches, without, ctx, count - num_removed) as loss_without:
            dropped, _ = drop_units_by_loss(
                {stack_name: count - 1},
                {stack_name: count},
                required | removed,
                loss_without,
                last_part_test(self._model, self._stacks, removed),
            )
        return dropped[0] if dropped else None

    def _prune(self, shape: _Shape) -> _Candidate | None:
        """Return the model of this shape within the budget; None if it cannot be reached."""
        settings, ctx = self._settings, self._fresh_ctx()
        layers, width = self._kept_layers(shape), {"width": shape.width} if self._width else {}
        self.results.append({"kept_layers": layers, **width, "loss": None})
        model, edits = self._without_layers(shape)
        channels: Tensor | None = None
        if shape.width < self._width:
            original, channels = copy.deepcopy(model), self._kept_channels(shape.width)
            width_edit = prune_hidden_width(model, channels.tolist())
        groups = target_groups(model, settings)
        allocation = BudgetAllocation(model, groups, self._src, settings, ctx, self._original)
        self._least_cost = min(self._least_cost, allocation.least)
        if allocation.least > allocation.limit:
            return None
        errors: dict[str, float] = {}
        if channels is not None:
            samples = load_reconstruction_samples(model, self._src, settings, ctx)
            if samples is not None:
                errors = refit_width(original, model, channels, samples, ctx)
            del original
            edits = write_width_to_config(model, edits, width_edit)
        edits = cut_groups(model, edits, groups, allocation, self._src, settings, ctx)
        ctx.details["reconstruction_error"] = errors | ctx.details["reconstruction_error"]
        ctx.details.update({"kept_layers": layers, **width})
        with model_on_device(model, ctx) as device:
            losses = [mean_loss(model, [row], label_objective(), "fp32", device) for row in self._rows]
        loss = float(np.average(losses, weights=self._weights))
        self.results[-1]["loss"] = round(loss, 6)
        counts = ", ".join(f"{len(indices)} {name.replace('_', ' ')}" for name, indices in layers.items())
        shape_text = f"{counts}, width {shape.width}" if self._width else counts
        ctx.log(f"prune: candidate with {shape_text}: loss {loss:.4f}")
        return _Candidate(
            shape, model, edits, ctx, loss, np.array(losses), allocation.costs.total <= allocation.limit
        )

    def _kept_layers(self, shape: _Shape) -> dict[str, list[int]]:
        """Return the indices of the kept layers by stack."""
        return {
            stack.name: [
                index
                for index in range(len(stack.modules(self._model)))
                if (stack.name, index) not in shape.removed_layers
            ]
            for stack in self._stacks
        }

    def _kept_channels(self, width: int) -> Tensor:
        """Return the `width` channels of the hidden states with the largest activations, int64, ascending."""
        if self._channels is None:
            score = IMPORTANCES["activation"].scorer("width")
            scored = ScoredModel(self._model, self._src, self._settings, self._fresh_ctx())
            self._channels = score(scored, self._width).argsort(descending=True, stable=True)
        return self._channels[:width].sort().values

    def _fresh_ctx(self) -> Context:
        """Return the context of one candidate, so that only the best one's warnings are reported."""
        return replace(self._ctx, warnings=[], details={})

    def _too_small_error(self, least_cost: float) -> InputError:
        assert self._settings.budget is not None
        budget = self._settings.budget
        minimum = math.ceil(1000 * least_cost / self._original.cost_before) / 1000
        return InputError(
            f"prune: budget: {budget.measure}: {budget.keep_ratio:g} of the model cannot be reached: with the"
            f" fewest {', '.join(self._settings.targets)} it costs {minimum:g}."
            f" Set at least {minimum:g}, or remove tokens (trim-vocabulary).",
            code="budget-too-small",
            setting=f"budget.{budget.measure}",
        )


def _single_samples(batches: Sequence[TensorBatch]) -> list[TensorBatch]:
    """Return batches of one sample; a batch of pairs, whose sides are rows of their own, stays whole."""
    rows: list[TensorBatch] = []
    for batch in batches:
        counts = {len(value) for value in batch.values()}
        size = counts.pop()
        rows += [batch] if counts else [{k: v[i : i + 1] for k, v in batch.items()} for i in range(size)]
    return rows


def _hold_back(model: Any, src: Artifact, ctx: Context) -> tuple[Context, CalibrationSamples]:
    """Return the context without the samples that compare the candidates, and these samples, with labels.

    A tenth of the samples at most, and `LOSS_SAMPLES`; of running text the last windows. Of fewer than ten
    samples all are used for both.

    Raises:
        InputError: there are no samples, or they have no labels.
    """
    name = "calibration" if ctx.data.get("calibration") else "train"
    split, judging_ctx = ctx.data.get(name), ctx
    if split is not None and (errors := missing_labels_errors(ctx.task, ctx.data, (name,))):
        raise InputError(f"prune: {errors[0].message}", code=errors[0].code, setting=errors[0].setting)
    if split is not None:
        is_text = ctx.traits.samples == "running-text"
        if is_text:
            windows = encode_split(split, model.config, load_processor(src.path), ctx)
            split = EncodedSplit(split.origin, (Example(""),) * len(windows), encoded=tuple(windows))
        total, count = len(split), min(len(split) // 10, LOSS_SAMPLES)
        held_back = list(range(total - count, total)) if is_text else spread_indices(total, count, ctx.seed)
        others = sorted({*range(total)}.difference(held_back))
        ctx = replace(ctx, data={**ctx.data, name: split.select(others)})
        judging_ctx = replace(ctx, data={**ctx.data, name: split.select(held_back or others)})
        warn_of_few_held_back(count, "The candidates are compared", ctx)
    samples = load_calibration_samples(
        model, src, LOSS_SAMPLES, judging_ctx, "prune", labels=True, padded=True
    )
    return ctx, samples
