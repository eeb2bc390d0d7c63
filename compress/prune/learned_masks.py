"""Masks of heads, neurons, parts of layers and the hidden width, learned with the weights under a budget.

Each unit (a head, a neuron) and each part (an attention, a feed-forward part) has its own mask, sampled from
a hard concrete distribution (masked_parts.py). A unit counts with the probability that its mask and the mask
of its part are open. A Lagrangian drives the expected number of kept parameters to the budget (CoFi, Xia et
al. 2022, arXiv:2204.00408, equations 1 and 2); its multipliers are trained by gradient ascent:

    s = 1 - h * (sum over parts of P(part) * parameters of a unit * sum over units of P(unit)) / all of them
    lambda1 (s - t) + lambda2 (s - t)^2          s: expected sparsity, t: the target, which rises from 0

h is the mean of P over channels of the hidden width if these have masks (`HiddenWidthMask`), else 1.

Validation and the final cut use deterministic masks: each layer keeps its expected number of units, those
with the largest log alpha (CoFi's l0_module.py), and each stack its expected number of parts of a kind, at
least one. (The reference decides for each part alone whether its probability is above one half; while many
are near one half, all parts or none are removed at once.) Deterministic masks are folded into the linear
layer that reads the units. `cut_masked` then removes masked units from their linear layers, and masked parts
from their blocks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from smelt.compress.prune.masked_parts import (
    INITIAL_LOG_ALPHA,
    HiddenWidthMask,
    MaskedPart,
    deterministic_mask,
    deterministic_mask_at,
    find_masked_parts,
    most_open,
    open_probability,
    sample_mask,
)
from smelt.compress.prune.reconstruct import bias_owner, cut_units
from smelt.compress.prune.settings import LearnedMasksSettings
from smelt.compress.prune.units import FeedForwardGroup, linear_with_inputs, update_config
from smelt.models.edits import Edit
from smelt.models.layers import skip_sublayer
from smelt.stage import Context
from smelt.training.extension import (
    LossTerm,
    LossTerms,
    Objective,
    ParameterGroup,
    TrainingExtension,
    as_loss_terms,
)


def cut_masked(
    model: Any,
    edits: list[Edit],
    masked_parts: Sequence[MaskedPart],
    kept_units: Sequence[Tensor],
    kept_parts: Sequence[bool],
    ctx: Context,
) -> dict[str, Any]:
    """Remove masked units and parts of `model` in place, and append the edits.

    Args:
        model: float32, with the masks folded into the weights.
        edits: the edits of the model.
        masked_parts: the parts with masks.
        kept_units: the kept units of each part, int64, ascending.
        kept_parts: whether each part is kept.
        ctx: device, threads, progress.

    Returns:
        Details: the number of units of each kept part, and the removed parts by stack (if parts had masks).
    """
    for masked, is_kept in zip(masked_parts, kept_parts, strict=True):
        for position in masked.positions if not is_kept else ():
            edits.append(skip_sublayer(model, position.block.module_path, position.index))
    remaining = [
        (m, m.units, k)
        for m, k, is_kept in zip(masked_parts, kept_units, kept_parts, strict=True)
        if m.units and is_kept
    ]
    selection = [(units, lambda k=k: k) for m, units, k in remaining if len(k) < m.count]
    cut_units(model, edits, selection, None, ctx)
    edits[:] = update_config(model, edits)
    details: dict[str, Any] = {"units": {units.name: units.count(model) for _, units, _ in remaining}}
    dropped: dict[str, list[str]] = {
        position.stack: [] for masked in masked_parts for position in masked.positions
    }
    for masked, is_kept in zip(masked_parts, kept_parts, strict=True):
        for position in masked.positions if not is_kept else ():
            dropped[position.stack].append(position.name)
    return details | ({"dropped_parts": dropped} if dropped else {})


_BUDGET_TOLERANCE = 0.01  # fraction of the parameters: checkpoints this close to the budget may be selected


class LearnedMasks:
    """The masks of a model during training.

    Args:
        model: float; changed by `finalize`.
        settings: the targets and the budget.
        edits: the edits of the model; the cuts are appended.

    Raises:
        InputError: the model's family is unknown, or it has quantized layers.
    """

    def __init__(self, model: Any, settings: LearnedMasksSettings, edits: list[Edit]) -> None:
        self.model, self.settings, self.edits = model, settings, edits
        self.masked = find_masked_parts(model, settings)
        self.units = nn.ParameterDict(
            {str(n): _initial_log_alphas(m.count) for n, m in enumerate(self.masked) if m.units is not None}
        )
        self.parts = nn.ParameterDict(
            {str(n): _initial_log_alphas(1) for n, m in enumerate(self.masked) if m.positions}
        )
        self.hidden = HiddenWidthMask(model, settings.multiple_of) if "width" in settings.targets else None
        self._multipliers = nn.ParameterDict({"multipliers": nn.Parameter(torch.zeros(2))})
        self.whole = sum(m.unit_parameters * m.count for m in self.masked)
        self.target = 0.0

    @property
    def multipliers(self) -> nn.Parameter:
        """The multipliers of the budget, float [2]."""
        parameter: nn.Parameter = self._multipliers["multipliers"]
        return parameter

    def extension(self) -> TrainingExtension:
        """Return the extension of the training: parameters, hooks and state."""
        rate = self.settings.learning_rate
        masks = {"units": self.units, "parts": self.parts}
        if self.hidden is not None:
            masks["width"] = self.hidden.home
        log_alphas = [log_alpha for kind in masks.values() for log_alpha in kind.values()]
        return TrainingExtension(
            modules={
                "masks": nn.ModuleDict(masks),
                "multipliers": self._multipliers,
            },
            groups=[
                ParameterGroup(log_alphas, learning_rate=rate, weight_decay=0.0),
                ParameterGroup([self.multipliers], learning_rate=rate, weight_decay=0.0, maximize=True),
            ],
            training_context=self._masked_training,
            as_stored=self.as_stored,
            before_step=self._before_step,
            supports_resume=True,  # the target depends only on the update number
            may_be_best=self._may_be_best,
        )

    def objective(self, objective: Objective) -> Objective:
        """Return `objective` with the Lagrangian of the budget added in training."""

        def with_budget(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor | LossTerms:
            loss = objective(model, batch)
            if not model.training:
                return loss
            over = 1 - self.expected_keep_ratio() - self.target
            linear, quadratic = self.multipliers
            return {**as_loss_terms(loss), "budget": LossTerm(linear * over + quadratic * over**2)}

        return with_budget

    def expected_keep_ratio(self) -> Tensor:
        """Return the expected fraction of kept parameters, a scalar with a gradient."""
        sizes = []
        for index, masked in enumerate(self.masked):
            units, part_alpha = self._log_alphas(index)
            size = masked.unit_parameters * (
                open_probability(units).sum() if units is not None else torch.ones(())
            )
            sizes.append(
                size if part_alpha is None else size * open_probability(part_alpha).squeeze().to(size)
            )
        units = torch.stack([size.to(sizes[0]) for size in sizes]).sum() / self.whole
        return units if self.hidden is None else units * self.hidden.expected_keep_ratio().to(units)

    @torch.no_grad()
    def final_keep_ratio(self) -> float:
        """Return the fraction of the parameters that the present masks would keep."""
        parts_kept = self.kept_parts()
        counts = [len(self.kept_units(n)) if parts_kept[n] else 0 for n in range(len(self.masked))]
        units = (
            sum(m.unit_parameters * count for m, count in zip(self.masked, counts, strict=True)) / self.whole
        )
        return units if self.hidden is None else units * len(self.hidden.kept_channels()) / self.hidden.width

    @torch.no_grad()
    def kept_units(self, number: int) -> Tensor:
        """Return the kept units of a part, int64, ascending; their number is the expected one."""
        units, masked = self._log_alphas(number)[0], self.masked[number]
        if units is None:
            return torch.arange(masked.count)
        return most_open(
            units, self.settings.multiple_of if isinstance(masked.units, FeedForwardGroup) else 1
        )

    @torch.no_grad()
    def kept_parts(self) -> list[bool]:
        """Return whether each part is kept: per stack and kind the expected number, at least one.

        Those with the largest log alpha are kept. A part in several stacks is kept if one of them keeps it.
        """
        kinds: dict[tuple[str, str], list[int]] = {}
        for index, masked in enumerate(self.masked):
            for kind in dict.fromkeys((position.stack, position.kind) for position in masked.positions):
                kinds.setdefault(kind, []).append(index)
        is_kept = [not masked.positions for masked in self.masked]
        for indices in kinds.values():
            log_alpha = torch.cat([self.parts[str(index)] for index in indices]).cpu()
            for position in most_open(log_alpha).tolist():
                is_kept[indices[position]] = True
        return is_kept

    @torch.no_grad()
    def unit_mask(self, number: int) -> Tensor:
        """Return the final, deterministic masks of the units of a part, float [units]."""
        return deterministic_mask_at(self.units[str(number)], self.kept_units(number))

    @torch.no_grad()
    def part_mask(self, number: int) -> Tensor:
        """Return the final, deterministic mask of a whole part, float [1]."""
        return deterministic_mask(self.parts[str(number)]) * self.kept_parts()[number]

    def finalize(self, ctx: Context) -> None:
        """Remove masked units and parts, fold the other masks into the weights, and report to `ctx`."""
        kept_units = [self.kept_units(index) for index in range(len(self.masked))]
        kept_parts, ratio = self.kept_parts(), self.final_keep_ratio()
        with torch.no_grad():
            self._fold_into_weights()
            if self.hidden is not None:
                self.hidden.fold_into_weights()
        details = cut_masked(self.model, self.edits, self.masked, kept_units, kept_parts, ctx)
        details |= self.hidden.cut(self.edits) if self.hidden is not None else {}
        ctx.details["learned_masks"] = {
            "keep_ratio": self.settings.keep_ratio,
            "kept": round(ratio, 4),
            **details,
        }
        target = f"{self.settings.keep_ratio:.1%}"
        if ratio > self.settings.keep_ratio + 0.05:
            ctx.warn(
                "more-kept-than-asked",
                f"learned_masks: {ratio:.1%} of the parameters are kept, more than keep_ratio ({target})."
                " Train longer or increase learned_masks.learning_rate.",
            )
        elif ratio < self.settings.keep_ratio - 0.05:
            ctx.warn(
                "fewer-kept-than-asked",
                f"learned_masks: {ratio:.1%} of the parameters are kept, fewer than keep_ratio ({target})."
                " Train longer or decrease learned_masks.learning_rate.",
            )

    @contextlib.contextmanager
    def as_stored(self) -> Iterator[None]:
        """Fold the final masks into the weights in this context."""
        layers: list[Any] = [linear_with_inputs(self.model, m.output_layer) for m in self.masked]
        tensors = [layer.weight for layer in layers]
        tensors += [b for n in self.parts if (b := self._bias(int(n))) is not None]
        saved = [tensor.detach().clone() for tensor in tensors]
        with torch.no_grad():
            self._fold_into_weights()
        try:
            with self.hidden.as_stored(self.edits) if self.hidden is not None else contextlib.nullcontext():
                yield
        finally:
            for tensor, saved_tensor in zip(tensors, saved, strict=True):
                tensor.data.copy_(saved_tensor)

    def _log_alphas(self, number: int) -> tuple[Tensor | None, Tensor | None]:
        """Return the log alphas of a part's units and of the part itself; None without masks."""
        name = str(number)
        return (
            self.units.get(name),
            self.parts.get(name),
        )

    def _bias(self, number: int) -> Any:
        return bias_owner(self.model.get_submodule(self.masked[number].output_layer)).bias

    def _fold_into_weights(self) -> None:
        for index, masked in enumerate(self.masked):
            layer, (units, part_alpha) = (
                linear_with_inputs(self.model, masked.output_layer),
                self._log_alphas(index),
            )
            if units is not None:
                values = self.unit_mask(index)
                layer.weight.mul_(values.repeat_interleave(layer.in_features // len(values)).to(layer.weight))
            if part_alpha is not None:
                layer.weight.mul_(self.part_mask(index).to(layer.weight))
                if (bias := self._bias(index)) is not None:
                    bias.mul_(self.part_mask(index).to(bias))

    @contextlib.contextmanager
    def _masked_training(self) -> Iterator[None]:
        """Mask the inputs of linear layers and the outputs of parts in this context."""
        handles: list[Any] = []
        for index, masked in enumerate(self.masked):
            if masked.units is not None:
                layer = linear_with_inputs(self.model, masked.output_layer)
                handles.append(layer.register_forward_pre_hook(partial(self._mask_inputs, index)))
            if masked.positions:
                output_layer = self.model.get_submodule(masked.output_layer)
                handles.append(output_layer.register_forward_hook(partial(self._mask_outputs, index)))
        try:
            with self.hidden.masked_training() if self.hidden is not None else contextlib.nullcontext():
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _mask_inputs(self, number: int, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        mask = sample_mask(self.units[str(number)]) if module.training else self.unit_mask(number)
        return (inputs[0] * mask.repeat_interleave(inputs[0].shape[-1] // len(mask)), *inputs[1:])

    def _mask_outputs(self, number: int, module: nn.Module, _: Any, added: Tensor) -> Tensor:
        mask = sample_mask(self.parts[str(number)]) if module.training else self.part_mask(number)
        return added * mask.to(added.dtype)

    def _before_step(self, step: int, total: int) -> None:
        progress = min(1.0, step / max(1.0, self.settings.warmup * total))
        self.target = (1 - self.settings.keep_ratio) * progress
        self._last = step == total

    def _may_be_best(self, step: int) -> bool:
        warmed_up = step > 0 and self.target == 1 - self.settings.keep_ratio
        ratio = float(self.expected_keep_ratio().detach())
        if self.settings.parts:  # whole parts are large, so the budget is only met approximately
            ratio = max(ratio, self.final_keep_ratio())
        return warmed_up and (self._last or ratio <= self.settings.keep_ratio + _BUDGET_TOLERANCE)


def _initial_log_alphas(count: int) -> nn.Parameter:
    return nn.Parameter(torch.full((count,), INITIAL_LOG_ALPHA))
