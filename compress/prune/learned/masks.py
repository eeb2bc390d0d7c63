"""Masks of heads, neurons, parts of layers and the hidden width, learned with the weights under a budget.

Each unit (a head, a neuron) and each part (an attention, a feed-forward part) has a mask of its own, drawn
from a hard concrete distribution (hard_concrete.py). A unit counts with the probability that its mask is open
and that of its part is, and what is expected to stay of all their parameters is driven to the budget by a
Lagrangian (CoFi, Xia et al. 2022, arXiv:2204.00408, equations 1 and 2), whose multipliers rise along the
gradient:

    s = 1 - h * (sum over parts of P(part) * parameters of a unit * sum over units of P(unit)) / all of them
    lambda1 (s - t) + lambda2 (s - t)^2          s: expected sparsity, t: the target, which rises from 0

h is the mean of P over channels of the hidden width where these have masks (hidden.py), else 1.

Validations and the cut see no drawn masks: of a layer as many units stay as are expected to, those of the
largest log alpha (CoFi's l0_module.py), and of a stack as many parts of a kind, one at least. (The reference
asks each part alone whether it is open more often than not: as long as the masks of many are near the half,
all go at once, or none.) Masks without chance go into the product that reads the units.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from smelt.compress.prune.compensate import bias_owner
from smelt.compress.prune.groups import FeedForwardGroup, columns_of
from smelt.compress.prune.learned.cut import cut_masked
from smelt.compress.prune.learned.hard_concrete import (
    OPEN,
    draw_mask,
    likeliest,
    open_chance,
    settled_at,
    settled_mask,
)
from smelt.compress.prune.learned.hidden import HiddenMask
from smelt.compress.prune.learned.masked import find_masked
from smelt.compress.prune.learned.settings import LearnedMasksSettings
from smelt.compress.train.extension import Extension, Group
from smelt.compress.train.terms import Objective, Term, Terms, terms_of
from smelt.core.stage import Context
from smelt.runtime.models.structure import Edit

_NEAR = 0.01  # of the parameters: so near to the budget weights may be those that are kept


class LearnedMasks:
    """The masks of one model while it trains.

    Args:
        model: float, changed when the masks settle.
        settings: of what, and the budget.
        edits: the model's structure, to which the cuts are appended.

    Raises:
        InputError: a family whose parts are not known, or layers with integer codes.
    """

    def __init__(self, model: Any, settings: LearnedMasksSettings, edits: list[Edit]) -> None:
        self.model, self.settings, self.edits = model, settings, edits
        self.masked = find_masked(model, settings)
        self.units = nn.ParameterDict(
            {str(n): _open_at_first(m.count) for n, m in enumerate(self.masked) if m.units is not None}
        )
        self.parts = nn.ParameterDict(
            {str(n): _open_at_first(1) for n, m in enumerate(self.masked) if m.places}
        )
        self.hidden = HiddenMask(model, settings.multiple_of) if "width" in settings.targets else None
        self.multipliers = nn.Parameter(torch.zeros(2))
        self.whole = sum(m.cost * m.count for m in self.masked)
        self.target = 0.0

    def extension(self) -> Extension:
        """Return what the training needs of it."""
        rate = self.settings.learning_rate
        masks = {"units": self.units, "parts": self.parts}
        if self.hidden is not None:
            masks["width"] = nn.ParameterDict({"width": self.hidden.log_alpha})
        log_alphas = [log_alpha for kind in masks.values() for log_alpha in kind.values()]
        return Extension(
            modules={
                "masks": nn.ModuleDict(masks),
                "multipliers": nn.ParameterDict({"multipliers": self.multipliers}),
            },
            groups=[
                Group(log_alphas, learning_rate=rate, weight_decay=0.0),
                Group([self.multipliers], learning_rate=rate, weight_decay=0.0, maximize=True),
            ],
            around=self._around,
            stored=self.stored,
            before_step=self._before,
            resumes=True,  # the target follows from the update's number
            eligible=self._eligible,
        )

    def objective(self, objective: Objective) -> Objective:
        """Return `objective`, while it trains with the Lagrangian of the budget."""

        def with_budget(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor | Terms:
            found = objective(model, batch)
            if not model.training:
                return found
            over = 1 - self.expected() - self.target
            first, second = self.multipliers
            return {**terms_of(found), "budget": Term(first * over + second * over**2)}

        return with_budget

    def expected(self) -> Tensor:
        """Return the fraction of the parameters that is expected to stay, a scalar with a gradient."""
        found = []
        for number, masked in enumerate(self.masked):
            units, part = self._of(number)
            size = masked.cost * (open_chance(units).sum() if units is not None else torch.ones(()))
            found.append(size if part is None else size * open_chance(part).squeeze().to(size))
        units = torch.stack([size.to(found[0]) for size in found]).sum() / self.whole
        return units if self.hidden is None else units * self.hidden.expected().to(units)

    @torch.no_grad()
    def left(self) -> float:
        """Return the fraction of the parameters that would stay if the masks settled now."""
        stay = self.staying()
        counts = [len(self.kept(n)) if stay[n] else 0 for n in range(len(self.masked))]
        units = sum(m.cost * count for m, count in zip(self.masked, counts, strict=True)) / self.whole
        return units if self.hidden is None else units * len(self.hidden.kept()) / self.hidden.width

    @torch.no_grad()
    def kept(self, number: int) -> Tensor:
        """Return the units of a part that stay where it does, int64, rising: as many as are expected to."""
        units, masked = self._of(number)[0], self.masked[number]
        if units is None:
            return torch.arange(masked.count)
        return likeliest(
            units, self.settings.multiple_of if isinstance(masked.units, FeedForwardGroup) else 1
        )

    @torch.no_grad()
    def staying(self) -> list[bool]:
        """Return of each part whether it stays: of a kind in a stack as many as are expected to.

        One at least, and those of the largest log alpha; what stands in several stacks, if one keeps it.
        """
        kinds: dict[tuple[str, str], list[int]] = {}
        for number, masked in enumerate(self.masked):
            for kind in dict.fromkeys((place.stack, place.kind) for place in masked.places):
                kinds.setdefault(kind, []).append(number)
        stay = [not masked.places for masked in self.masked]
        for numbers in kinds.values():
            log_alpha = torch.cat([self.parts[str(number)] for number in numbers]).cpu()
            for place in likeliest(log_alpha).tolist():
                stay[numbers[place]] = True
        return stay

    @torch.no_grad()
    def values(self, number: int) -> Tensor:
        """Return the masks of the units of a part as they will be when they have settled, float [units]."""
        return settled_at(self.units[str(number)], self.kept(number))

    @torch.no_grad()
    def value(self, number: int) -> Tensor:
        """Return the mask of a part itself, likewise, float [1]."""
        return settled_mask(self.parts[str(number)]) * self.staying()[number]

    def settle(self, ctx: Context) -> None:
        """Cut what the masks close, and put the others into the weights; say so in `ctx`."""
        kept = [self.kept(number) for number in range(len(self.masked))]
        stay, left = self.staying(), self.left()
        with torch.no_grad():
            self._into_weights()
            if self.hidden is not None:
                self.hidden.into_weights()
        details = cut_masked(self.model, self.edits, self.masked, kept, stay, ctx)
        details |= self.hidden.cut(self.edits) if self.hidden is not None else {}
        ctx.details["learned_masks"] = {
            "keep_ratio": self.settings.keep_ratio,
            "kept": round(left, 4),
            **details,
        }
        asked = f"{self.settings.keep_ratio:.1%}"
        if left > self.settings.keep_ratio + 0.05:
            ctx.warn(
                "more-kept-than-asked",
                f"learned_masks: {left:.1%} of the parameters are kept, more than the {asked} that"
                f" keep_ratio asks for."
                " Give the masks more updates or a higher learned_masks.learning_rate.",
            )
        elif left < self.settings.keep_ratio - 0.05:
            ctx.warn(
                "fewer-kept-than-asked",
                f"learned_masks: {left:.1%} of the parameters are kept, fewer than the {asked} that"
                f" keep_ratio asks for."
                " Give the masks more updates or a lower learned_masks.learning_rate.",
            )

    @contextlib.contextmanager
    def stored(self) -> Iterator[None]:
        """Let the model meanwhile compute without masks what it computes with them."""
        layers: list[Any] = [columns_of(self.model, m.last) for m in self.masked]
        tensors = [layer.weight for layer in layers]
        tensors += [b for n in self.parts if (b := self._bias(int(n))) is not None]
        kept = [tensor.detach().clone() for tensor in tensors]
        with torch.no_grad():
            self._into_weights()
        try:
            with self.hidden.stored(self.edits) if self.hidden is not None else contextlib.nullcontext():
                yield
        finally:
            for tensor, before in zip(tensors, kept, strict=True):
                tensor.data.copy_(before)

    def _of(self, number: int) -> tuple[Tensor | None, Tensor | None]:
        """Return the log alphas of the units of a part and of itself, as far as they have masks."""
        name = str(number)
        return (
            self.units.get(name),
            self.parts.get(name),
        )

    def _bias(self, number: int) -> Any:
        return bias_owner(self.model.get_submodule(self.masked[number].last)).bias

    def _into_weights(self) -> None:
        for number, masked in enumerate(self.masked):
            layer, (units, part) = columns_of(self.model, masked.last), self._of(number)
            if units is not None:
                values = self.values(number)
                layer.weight.mul_(values.repeat_interleave(layer.in_features // len(values)).to(layer.weight))
            if part is not None:
                layer.weight.mul_(self.value(number).to(layer.weight))
                if (bias := self._bias(number)) is not None:
                    bias.mul_(self.value(number).to(bias))

    @contextlib.contextmanager
    def _around(self) -> Iterator[None]:
        """Let what products read be masked, and what parts add."""
        handles: list[Any] = []
        for number, masked in enumerate(self.masked):
            if masked.units is not None:
                layer = columns_of(self.model, masked.last)
                handles.append(layer.register_forward_pre_hook(partial(self._mask_inputs, number)))
            if masked.places:
                product = self.model.get_submodule(masked.last)
                handles.append(product.register_forward_hook(partial(self._mask_added, number)))
        try:
            with self.hidden.around() if self.hidden is not None else contextlib.nullcontext():
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _mask_inputs(self, number: int, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        mask = draw_mask(self.units[str(number)]) if module.training else self.values(number)
        return (inputs[0] * mask.repeat_interleave(inputs[0].shape[-1] // len(mask)), *inputs[1:])

    def _mask_added(self, number: int, module: nn.Module, _: Any, added: Tensor) -> Tensor:
        mask = draw_mask(self.parts[str(number)]) if module.training else self.value(number)
        return added * mask.to(added.dtype)

    def _before(self, step: int, total: int) -> None:
        way = min(1.0, step / max(1.0, self.settings.warmup * total))
        self.target = (1 - self.settings.keep_ratio) * way
        self._last = step == total

    def _eligible(self, step: int) -> bool:
        full = step > 0 and self.target == 1 - self.settings.keep_ratio
        most = float(self.expected().detach())
        if self.settings.parts:  # they are large, and stay whole
            most = max(most, self.left())
        return full and (self._last or most <= self.settings.keep_ratio + _NEAR)


def _open_at_first(count: int) -> nn.Parameter:
    return nn.Parameter(torch.full((count,), OPEN))
