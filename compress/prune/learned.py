"""Masks of heads and neurons that are learned with the weights, under a budget; then what they close is cut.

Each unit's mask z is drawn from a hard concrete distribution (Louizos et al. 2018, arXiv:1712.01312, section
2.2), whose log alpha trains; u is uniform, beta 2/3, gamma -0.1, zeta 1.1:

    s = sigmoid((log u - log(1 - u) + log alpha) / beta)        z = clamp(s (zeta - gamma) + gamma, 0, 1)
    P(z > 0) = sigmoid(log alpha - beta log(-gamma / zeta))

The part of the units' parameters that is expected to stay is driven to the budget by a Lagrangian (CoFi, Xia
et al. 2022, arXiv:2204.00408, equation 2), whose multipliers rise along the gradient:

    lambda1 (s - t) + lambda2 (s - t)^2          s: expected sparsity, t: the target, which rises from 0

Validations and the cut see no drawn masks: of a layer as many units stay as are expected to, those of the
largest log alpha (CoFi's l0_module.py), and z = clamp(sigmoid(log alpha) (zeta - gamma) + gamma, 0, 1) goes
into the product that reads them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from smelt.compress.prune.compensate import cut_units
from smelt.compress.prune.cut import say_in_config
from smelt.compress.prune.groups import AttentionGroup, FeedForwardGroup, columns_of, find_groups, rows_of
from smelt.compress.train.extension import Extension, Group
from smelt.compress.train.settings import MasksSettings
from smelt.compress.train.terms import Objective, Term, Terms, terms_of
from smelt.core.errors import InputError
from smelt.core.stage import Context
from smelt.runtime.layers.low_rank import LowRankLinear
from smelt.runtime.layers.shared import SharedLinear
from smelt.runtime.models.structure import Edit

_BETA, _GAMMA, _ZETA = 2 / 3, -0.1, 1.1
_OPEN = 3.0  # log alpha at first: a mask is 1 in four of five draws, and 0 in one of a hundred
_NEAR = 0.01  # of the parameters: so near to the budget weights may be those that are kept

Unit: TypeAlias = AttentionGroup | FeedForwardGroup


def draw_mask(log_alpha: Tensor) -> Tensor:
    """Return hard concrete masks, float as `log_alpha`, with a gradient."""
    u = torch.rand_like(log_alpha).clamp(1e-6, 1 - 1e-6)
    s = ((u.log() - (1 - u).log() + log_alpha) / _BETA).sigmoid()
    return (s * (_ZETA - _GAMMA) + _GAMMA).clamp(0, 1)


def open_chance(log_alpha: Tensor) -> Tensor:
    """Return the probability that a mask is not 0."""
    return (log_alpha - _BETA * math.log(-_GAMMA / _ZETA)).sigmoid()


class LearnedMasks:
    """The masks of one model while it trains.

    Args:
        model: float, changed when the masks settle.
        settings: of which units, and the budget.
        edits: the model's structure, to which the cuts are appended.

    Raises:
        InputError: a family whose units are not known, or layers with integer codes.
    """

    def __init__(self, model: Any, settings: MasksSettings, edits: list[Edit]) -> None:
        self.model, self.settings, self.edits = model, settings, edits
        attentions, blocks = find_groups(model)
        self.groups: list[Unit] = [*(attentions if "heads" in settings.what else [])]
        self.groups += blocks if "ffn" in settings.what else []
        if not self.groups:
            raise InputError(
                f"masks: a {model.config.model_type} model has no {settings.what[0]} that can go."
            )
        for group in self.groups:
            _require_float(model, group)
        self.log_alphas = nn.ParameterList(
            nn.Parameter(torch.full((group.count(model),), _OPEN)) for group in self.groups
        )
        self.multipliers = nn.Parameter(torch.zeros(2))
        self.home = nn.ParameterDict({"multipliers": self.multipliers})
        self.costs = [_cost(model, group) for group in self.groups]  # parameters of one unit
        self.whole = sum(c * g.count(model) for c, g in zip(self.costs, self.groups, strict=True))
        self.target = 0.0

    def extension(self) -> Extension:
        """Return what the training needs of it."""
        rate = self.settings.learning_rate
        return Extension(
            modules={"masks": self.log_alphas, "multipliers": self.home},
            groups=[
                Group(list(self.log_alphas), learning_rate=rate, weight_decay=0.0),
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
        """Return the part of the units' parameters that is expected to stay, a scalar with a gradient."""
        parts = [c * open_chance(a).sum() for c, a in zip(self.costs, self.log_alphas, strict=True)]
        return torch.stack(parts).sum() / self.whole

    @torch.no_grad()
    def kept(self, number: int) -> Tensor:
        """Return the units of a group that stay, int64, rising: as many as are expected to."""
        log_alpha, group = self.log_alphas[number].cpu(), self.groups[number]
        step = self.settings.round_to if isinstance(group, FeedForwardGroup) else 1
        wanted = math.floor(float(open_chance(log_alpha).sum()) / step + 0.5) * step
        count = min(len(log_alpha), max(step, wanted))
        stay: Tensor = log_alpha.topk(count).indices.sort().values
        return stay

    @torch.no_grad()
    def values(self, number: int) -> Tensor:
        """Return the masks of a group as they will be when they have settled, float [units]."""
        log_alpha = self.log_alphas[number]
        soft = (log_alpha.sigmoid() * (_ZETA - _GAMMA) + _GAMMA).clamp(0, 1)
        stay = self.kept(number).to(soft.device)
        return torch.zeros_like(soft).index_copy(0, stay, soft[stay])

    @torch.no_grad()
    def settle(self, ctx: Context, stage: str) -> None:
        """Cut what the masks close, and put the others into the weights; say so in `ctx`."""
        stay = [self.kept(number) for number in range(len(self.groups))]
        self._into_weights()
        left = sum(c * len(s) for c, s in zip(self.costs, stay, strict=True)) / self.whole
        chosen = [
            (group, partial(_same, kept))
            for group, kept in zip(self.groups, stay, strict=True)
            if len(kept) < group.count(self.model)
        ]
        cut_units(self.model, self.edits, chosen, None, ctx)
        self.edits[:] = say_in_config(self.model, self.edits)
        counts = {group.name: group.count(self.model) for group in self.groups}
        ctx.facts["masks"] = {"keep": self.settings.keep, "kept": round(left, 4), "units": counts}
        if left > self.settings.keep + 0.05:
            ctx.warnings.append(
                f"{stage}: masks: {left:.1%} of the units' parameters stay where {self.settings.keep:.1%}"
                " were asked for; give the masks more updates or a higher learning rate (masks.learning_rate)"
            )
        elif left < self.settings.keep - 0.05:
            ctx.warnings.append(
                f"{stage}: masks: {left:.1%} of the units' parameters stay, fewer than the"
                f" {self.settings.keep:.1%} that were asked for; give the masks more updates or a lower"
                " learning rate (masks.learning_rate)"
            )

    @contextlib.contextmanager
    def stored(self) -> Iterator[None]:
        """Let the model meanwhile compute without masks what it computes with them."""
        names = [group.parts.products[-1] for group in self.groups]
        kept = {name: columns_of(self.model, name).weight.detach().clone() for name in names}
        with torch.no_grad():
            self._into_weights()
        try:
            yield
        finally:
            for name, weight in kept.items():
                columns_of(self.model, name).weight.data.copy_(weight)

    def _into_weights(self) -> None:
        for number, group in enumerate(self.groups):
            layer, values = columns_of(self.model, group.parts.products[-1]), self.values(number)
            layer.weight.mul_(values.repeat_interleave(layer.in_features // len(values)).to(layer.weight))

    @contextlib.contextmanager
    def _around(self) -> Iterator[None]:
        """Let what products read be masked."""
        handles = [
            columns_of(self.model, group.parts.products[-1]).register_forward_pre_hook(
                partial(self._mask_inputs, number)
            )
            for number, group in enumerate(self.groups)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _mask_inputs(self, number: int, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        mask = draw_mask(self.log_alphas[number]) if module.training else self.values(number)
        return (inputs[0] * mask.repeat_interleave(inputs[0].shape[-1] // len(mask)), *inputs[1:])

    def _before(self, step: int, total: int) -> None:
        way = min(1.0, step / max(1.0, self.settings.warmup * total))
        self.target = (1 - self.settings.keep) * way
        self._last = step == total

    def _eligible(self, step: int) -> bool:
        full = step > 0 and self.target == 1 - self.settings.keep
        return full and (self._last or float(self.expected().detach()) <= self.settings.keep + _NEAR)


def _same(stay: Tensor) -> Tensor:
    return stay


def _require_float(model: Any, group: Unit) -> None:
    for name in group.parts.products:
        module = model.get_submodule(name)
        if isinstance(module, SharedLinear):
            raise InputError(
                f"masks: '{name}' has a matrix that layers share and a difference of its own: what goes from"
                " one goes from all. Put the step before 'share', or share without difference."
            )
        for layer in (module.down, module.up) if isinstance(module, LowRankLinear) else (module,):
            if type(layer) is not nn.Linear:
                raise InputError(
                    f"masks: '{name}' is a {type(layer).__name__}, whose weights are codes. Put the step"
                    " before 'quantize'."
                )


def _cost(model: Any, group: Unit) -> float:
    """Return the parameters that one unit of `group` owns: rows with their biases, and columns."""
    count = group.count(model)
    rows = group.row_places(model, torch.arange(count))
    owned = sum(
        len(places) * (layer.in_features + (layer.bias is not None))
        for name, places in rows.items()
        for layer in [rows_of(model, name)]
    )
    return (owned + columns_of(model, group.parts.products[-1]).weight.numel()) / count
