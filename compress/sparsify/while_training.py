"""Weights that become zero step by step while the others train: gradual magnitude and movement pruning.

Each linear layer computes with W * M. M is chosen anew before every update from scores of the weights,
and the fraction of zeros rises from 0 along a cubic (Zhu & Gupta 2017, arXiv:1710.01878, equation 1):

    s(t) = s_f (1 - (1 - (t - t0) / (t1 - t0))^3)            t0 <= t <= t1

- magnitude: scores |W|; a weight that is zero in W * M stands behind it and may come back.
- movement: scores S that train with M taken for S (straight-through), so that dL/dS = dL/dW' * W: they rise
  for weights that move away from zero (Sanh et al. 2020, arXiv:2005.07683, equation 2).
- soft-movement: M = 1 where sigmoid(S) > threshold; the threshold rises as s(t) does, a penalty on
  sigmoid(S) drives scores down, and how many zeros come of it differs by layer (their section 3, and
  emmental/modules/binarizer.py: at least 0.5 % of a matrix stay).

Shapes: N = outputs, K = inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smelt.compress.behind_codes import BEHIND_QUANTIZE, IN_TRAINING
from smelt.compress.sparsify.layers import layers_of, products_of
from smelt.compress.sparsify.pattern import Pattern, read_pattern
from smelt.compress.sparsify.while_training_settings import SparsitySettings
from smelt.compress.train.extension import Extension, Group
from smelt.compress.train.terms import Objective, Term, Terms, terms_of
from smelt.core.errors import InputError
from smelt.core.stage import Context
from smelt.families.walk import blocks_of
from smelt.runtime.layers.low_rank import LowRankLinear
from smelt.runtime.layers.shared import SharedLinear
from smelt.runtime.models.structure import keep_zeros, keeps_zeros

_LEAST = 0.005  # of a matrix stays under soft-movement, whatever the scores say


class Masked(torch.autograd.Function):
    """W * M, as if M were the scores that it was made from."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, scores: Tensor, mask: Tensor) -> Tensor:
        """Return W * M, float [N, K]."""
        ctx.save_for_backward(weight, mask)
        return weight * mask

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return dL/dW = dL/dW' * M and dL/dS = dL/dW' * W."""
        weight, mask = ctx.saved_tensors
        return gradients[0] * mask, gradients[0] * weight, None


class Gradual:
    """The masks of one model while it trains.

    Args:
        model: its linear layers compute with masks until `settle`.
        settings: which, how many, when.

    Raises:
        InputError: a layer has integer codes, or none of the blocks fits the pattern.
    """

    def __init__(self, model: Any, settings: SparsitySettings) -> None:
        self.settings = settings
        pattern = None if settings.pattern is None else read_pattern(settings.pattern)
        self.layers = _layers(model, settings, Pattern(0.5, *pattern) if pattern else Pattern(0.5))
        self.held = {n: m.weight.detach() == 0 for n, m in self.layers.items() if keeps_zeros(m)}
        scored = {n: nn.Parameter(torch.zeros_like(m.weight)) for n, m in self.layers.items()}
        self.scores = scored if settings.learns else {}
        self.home = nn.ParameterList(self.scores.values())
        self.masks: dict[str, Tensor] = {}
        self._made_of: dict[str, tuple[Any, ...]] = {}  # masks of a validation: by what they were made of
        self.part, self.end = 0.0, 1  # how much of the way to all zeros; the update that ends it
        for name, layer in self.layers.items():
            layer.forward = partial(self._compute, name, layer)  # type: ignore[method-assign]

    def extension(self) -> Extension:
        """Return what the training needs of it."""
        rate = self.settings.scores_learning_rate
        return Extension(
            modules={"scores": self.home} if self.scores else {},
            groups=[Group(list(self.home), learning_rate=rate, weight_decay=0.0)] if self.scores else (),
            before_step=self._before,
            resumes=True,  # masks follow from the update's number, weights and scores
            eligible=self._eligible,
            stored=self.stored,
        )

    def objective(self, objective: Objective) -> Objective:
        """Return `objective`, while it trains with the penalty on scores that soft-movement has."""
        if self.settings.method != "soft-movement":
            return objective

        def with_penalty(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor | Terms:
            found = objective(model, batch)
            if not model.training:
                return found
            total = sum(scores.numel() for scores in self.home)
            mean = torch.stack([scores.sigmoid().sum() for scores in self.home]).sum() / total
            return {**terms_of(found), "penalty": Term(self.settings.penalty * self.part * mean)}

        return with_penalty

    @torch.no_grad()
    def settle(self, ctx: Context) -> None:
        """Leave the layers as they were, with zeros in their weights that last; say so in `ctx`."""
        self.part = 1.0  # also where the updates were done before, by a run that was stopped
        zeros = weights = 0
        by_layer = {}
        for name, layer in self.layers.items():
            layer.weight.mul_(self._mask(name, layer))
            del layer.forward
            keep_zeros(layer)
            gone = int((layer.weight == 0).sum())
            by_layer[name] = round(gone / layer.weight.numel(), 4)
            zeros, weights = zeros + gone, weights + layer.weight.numel()
        ctx.details["sparsity"] = round(zeros / weights, 4)
        ctx.details["zeros"] = zeros
        ctx.details["sparsity_by_layer"] = by_layer
        if not zeros:
            ctx.warn(
                "no-zeros",
                "sparsify: no weight became zero. Increase sparsify.penalty, sparsify.threshold,"
                " sparsify.scores_learning_rate or the number of updates.",
            )
            return
        ctx.warn(
            "zeros-not-faster",
            f"sparsify: {zeros / weights:.1%} of the weights of {len(by_layer)} layers are zero. They are"
            " stored and multiplied as before: no runtime is faster and no file is smaller.",
        )

    @contextlib.contextmanager
    def stored(self) -> Iterator[None]:
        """Let the model meanwhile be as it would be stored: with zeros in the weights."""
        kept = {name: layer.weight.detach().clone() for name, layer in self.layers.items()}
        with torch.no_grad():
            for name, layer in self.layers.items():
                layer.weight.mul_(self._mask(name, layer))
        try:
            yield
        finally:
            for name, layer in self.layers.items():
                layer.weight.data.copy_(kept[name])

    def _before(self, step: int, total: int) -> None:
        """Choose the masks of an update."""
        first, self.end = self.settings.start * total, max(1, round(self.settings.end * total))
        way = min(1.0, max(0.0, (step - first) / max(1.0, self.end - first)))
        self.part = 1 - (1 - way) ** 3
        self.masks = {name: self._mask(name, layer) for name, layer in self.layers.items()}
        self._made_of.clear()

    def _eligible(self, step: int) -> bool:
        return step >= self.end and self.part == 1.0

    def _compute(self, name: str, layer: nn.Linear, x: Tensor) -> Tensor:
        """Return what a layer makes of `x` [..., K]; validations see masks of the moment."""
        mask = self.masks.get(name) if torch.is_grad_enabled() else self._of_now(name, layer)
        if mask is None:
            mask = self._mask(name, layer)
        if name in self.scores:
            weight = Masked.apply(layer.weight, self.scores[name], mask)  # type: ignore[no-untyped-call]
        else:
            weight = layer.weight * mask
        return F.linear(x, weight, layer.bias)

    def _of_now(self, name: str, layer: nn.Linear) -> Tensor:
        """Return `_mask`, chosen once while weights and scores stay: a text has a call for each token."""
        known = [layer.weight, *([self.scores[name]] if name in self.scores else [])]
        made_of = (self.part, *((tensor._version, tensor.device) for tensor in known))
        if self._made_of.get(name) != made_of:
            self.masks[name], self._made_of[name] = self._mask(name, layer), made_of
        return self.masks[name]

    @torch.no_grad()
    def _mask(self, name: str, layer: nn.Linear) -> Tensor:
        """Return the mask of a layer now, float [N, K]: 1 for what stays."""
        scores = self.scores[name] if name in self.scores else layer.weight.abs()
        held = self.held.get(name)
        if held is not None:
            scores = scores.masked_fill(held.to(scores.device), -torch.inf)
        if self.settings.method == "soft-movement":
            stay = scores.sigmoid() > self.settings.threshold * self.part
            least = max(1, round(_LEAST * scores.numel()))
            if int(stay.sum()) < least:
                best = scores.flatten().topk(least).indices
                stay = stay.flatten().index_fill(0, best, True).view_as(stay)
            return stay.to(layer.weight.dtype)
        return (~self._gone(scores)).to(layer.weight.dtype)

    def _gone(self, scores: Tensor) -> Tensor:
        """Return which weights are zero at this part of the way, bool [N, K]."""
        if self.settings.pattern is None:
            return Pattern(self.part * self.settings.sparsity).gone(scores, "matrix")
        kept, group = read_pattern(self.settings.pattern)
        gone = Pattern(1 - kept / group, kept, group).gone(scores, "matrix")
        if self.part == 1.0:
            return gone
        among = scores.masked_fill(~gone, torch.inf)  # of those that will go, the least first
        few = Pattern(self.part * (1 - kept / group)).gone(among, "matrix")
        return few & gone


def _layers(model: Any, settings: SparsitySettings, pattern: Pattern) -> dict[str, nn.Linear]:
    """Return the layers that get masks by name, each once, also where two share a weight."""
    found: dict[int, tuple[str, nn.Linear]] = {}
    for block in blocks_of(model):
        products = {name: model.get_submodule(name) for name in products_of(block, settings.targets)}
        layers = layers_of(model, block, settings.targets)
        for name, layer in {**products, **layers}.items():
            if not isinstance(layer, LowRankLinear | SharedLinear) and type(layer) is not nn.Linear:
                raise InputError(
                    f"sparsify: '{name}' is a {type(layer).__name__}, whose weights are codes;"
                    f" {IN_TRAINING['sparsify'].replace('WORD', 'finetune')}",
                    code=BEHIND_QUANTIZE,
                )
        for name, layer in layers.items():
            if pattern.fits(layer.in_features):
                found.setdefault(id(layer.weight), (name, layer))
    if not found:
        odd = "" if pattern.group is None else f", or their inputs are no multiple of {pattern.group}"
        raise InputError(
            "sparsify while training: no layer of the blocks can be made sparse; smelt does not know the"
            f" layers of {model.config.model_type}{odd}.",
            code="no-layer-selected",
            setting="sparsify",
        )
    return dict(found.values())
