"""Gradual sparsity during training: each linear layer computes with W * M.

Before every update the mask M is computed from scores of the weights, and the fraction of zeros rises from 0
along a cubic (Zhu & Gupta 2017, arXiv:1710.01878, equation 1):

    s(t) = s_f (1 - (1 - (t - t0) / (t1 - t0))^3)            t0 <= t <= t1

- magnitude: scores |W|; a weight that is zero in W * M keeps its value in W and may return.
- movement: scores S are trained with a straight-through estimator for M, so that dL/dS = dL/dW' * W: they
  rise for weights that move away from zero (Sanh et al. 2020, arXiv:2005.07683, equation 2).
- soft-movement: M = 1 where sigmoid(S) > threshold; the threshold rises as s(t) does, a penalty on
  sigmoid(S) lowers the scores, and the fraction of zeros differs by layer (their section 3, and
  emmental/modules/binarizer.py: at least 0.5 % of a matrix are kept).

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

from smelt.compress.model_input import AFTER_QUANTIZE, TRAINING_BEFORE_QUANTIZE
from smelt.compress.sparsify.pattern import SparsityPattern, parse_pattern
from smelt.compress.sparsify.settings import GradualSparsitySettings
from smelt.compress.sparsify.sparsifier import linear_layer_names, linear_layers
from smelt.core.errors import InputError
from smelt.models.edits import is_masked, mark_masked
from smelt.models.families.registry import blocks_of
from smelt.models.layers import LowRankLinear, SharedLinear
from smelt.stage import Context
from smelt.training.extension import (
    LossTerm,
    LossTerms,
    Objective,
    ParameterGroup,
    TrainingExtension,
    as_loss_terms,
)

_MIN_KEPT_SHARE = 0.005  # of a matrix is always kept by soft-movement


class MaskedWeight(torch.autograd.Function):
    """W * M with a straight-through gradient from M to its scores."""

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


class GradualSparsifier:
    """The masks of one model while it trains.

    Args:
        model: its linear layers compute with masks until `finalize`.
        settings: of gradual sparsity.

    Raises:
        InputError: a layer has quantized weights, or no layer of the blocks fits the pattern.
    """

    def __init__(self, model: Any, settings: GradualSparsitySettings) -> None:
        self.settings = settings
        pattern = None if settings.pattern is None else parse_pattern(settings.pattern)
        self.layers = _layers_with_masks(
            model, settings, SparsityPattern(0.5, *pattern) if pattern else SparsityPattern(0.5)
        )
        self.held = {n: m.weight.detach() == 0 for n, m in self.layers.items() if is_masked(m)}
        score_parameters = {n: nn.Parameter(torch.zeros_like(m.weight)) for n, m in self.layers.items()}
        self.home = nn.ParameterList(score_parameters.values() if settings.trains_scores else ())
        self._numbers = (
            {name: index for index, name in enumerate(self.layers)} if settings.trains_scores else {}
        )
        self.masks: dict[str, Tensor] = {}
        self._made_of: dict[str, tuple[Any, ...]] = {}  # inputs of the cached masks
        self.part, self.end = 0.0, 1  # progress to the final sparsity; its last update
        for name, layer in self.layers.items():
            layer.forward = partial(self._masked_forward, name, layer)  # type: ignore[method-assign]

    @property
    def scores(self) -> dict[str, nn.Parameter]:
        """The trained scores of each layer, float [N, K]; empty if scores are the weights."""
        return {name: self.home[index] for name, index in self._numbers.items()}

    def extension(self) -> TrainingExtension:
        """Return the extension of the training."""
        rate = self.settings.scores_learning_rate
        return TrainingExtension(
            modules={"scores": self.home} if len(self.home) else {},
            groups=[ParameterGroup(list(self.home), learning_rate=rate, weight_decay=0.0)]
            if len(self.home)
            else (),
            before_step=self._before_step,
            supports_resume=True,  # masks depend only on the update's number, weights and scores
            may_be_best=self._may_be_best,
            as_stored=self.as_stored,
        )

    def objective(self, objective: Objective) -> Objective:
        """Return `objective` with the penalty on scores of soft-movement, in training mode only."""
        if not self.settings.uses_threshold:
            return objective

        def with_penalty(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor | LossTerms:
            loss = objective(model, batch)
            if not model.training:
                return loss
            total = sum(scores.numel() for scores in self.home)
            mean = torch.stack([scores.sigmoid().sum() for scores in self.home]).sum() / total
            return {**as_loss_terms(loss), "penalty": LossTerm(self.settings.penalty * self.part * mean)}

        return with_penalty

    @torch.no_grad()
    def finalize(self, ctx: Context) -> None:
        """Set the masked weights to zero, restore the layers, and report to `ctx`."""
        self.part = 1.0  # also if the updates were done before, by an interrupted run
        zeros = weights = 0
        by_layer = {}
        for name, layer in self.layers.items():
            layer.weight.mul_(self._mask(name, layer))
            del layer.forward
            mark_masked(layer)
            num_zeros = int((layer.weight == 0).sum())
            by_layer[name] = round(num_zeros / layer.weight.numel(), 4)
            zeros, weights = zeros + num_zeros, weights + layer.weight.numel()
        ctx.details["sparsity"] = round(zeros / weights, 4)
        ctx.details["zeros"] = zeros
        ctx.details["sparsity_by_layer"] = by_layer
        if not zeros:
            ctx.warn(
                "no-zeros",
                "sparsify: no weight was set to zero. Increase sparsify.penalty, sparsify.threshold,"
                " sparsify.scores_learning_rate or the number of updates.",
            )
            return
        ctx.warn(
            "zeros-not-faster",
            f"sparsify: {zeros / weights:.1%} of the weights of {len(by_layer)} layers are zero. They"
            " are still stored and multiplied, so the model is neither smaller nor faster.",
        )

    @contextlib.contextmanager
    def as_stored(self) -> Iterator[None]:
        """Set the masked weights to zero inside the context, as they would be stored."""
        saved = {name: layer.weight.detach().clone() for name, layer in self.layers.items()}
        with torch.no_grad():
            for name, layer in self.layers.items():
                layer.weight.mul_(self._mask(name, layer))
        try:
            yield
        finally:
            for name, layer in self.layers.items():
                layer.weight.data.copy_(saved[name])

    def _before_step(self, step: int, total: int) -> None:
        """Begin an update: its first forward pass computes the masks."""
        start_step, self.end = self.settings.start * total, max(1, round(self.settings.end * total))
        progress = min(1.0, max(0.0, (step - start_step) / max(1.0, self.end - start_step)))
        self.part = 1 - (1 - progress) ** 3
        self.masks.clear()
        self._made_of.clear()

    def _may_be_best(self, step: int) -> bool:
        return step >= self.end and self.part == 1.0

    def _masked_forward(self, name: str, layer: nn.Linear, x: Tensor) -> Tensor:
        """Return the output of a layer for `x` [..., K]; validations use the current masks."""
        mask = self.masks.get(name) if torch.is_grad_enabled() else self._cached_mask(name, layer)
        if mask is None:
            mask = self.masks[name] = self._mask(name, layer)
        if name in self._numbers:
            scores = self.home[self._numbers[name]]
            weight = MaskedWeight.apply(layer.weight, scores, mask)  # type: ignore[no-untyped-call]
        else:
            weight = layer.weight * mask
        return F.linear(x, weight, layer.bias)

    def _cached_mask(self, name: str, layer: nn.Linear) -> Tensor:
        """Return `_mask`, cached while weights and scores do not change, as in generation."""
        inputs = [layer.weight, *([self.home[self._numbers[name]]] if name in self._numbers else [])]
        version = (self.part, *((tensor._version, tensor.device) for tensor in inputs))
        if self._made_of.get(name) != version:
            self.masks[name], self._made_of[name] = self._mask(name, layer), version
        return self.masks[name]

    @torch.no_grad()
    def _mask(self, name: str, layer: nn.Linear) -> Tensor:
        """Return the current mask of a layer, float [N, K]: 1 for kept weights."""
        scores = self.home[self._numbers[name]] if name in self._numbers else layer.weight.abs()
        zeros = self.held.get(name)
        if zeros is not None:
            scores = scores.masked_fill(zeros.to(scores.device), -torch.inf)
        if self.settings.uses_threshold:
            mask = scores.sigmoid() > self.settings.threshold * self.part
            min_kept = max(1, round(_MIN_KEPT_SHARE * scores.numel()))
            if int(mask.sum()) < min_kept:
                top_indices = scores.flatten().topk(min_kept).indices
                mask = mask.flatten().index_fill(0, top_indices, True).view_as(mask)
            return mask.to(layer.weight.dtype)
        return (~self._zero_mask(scores)).to(layer.weight.dtype)

    def _zero_mask(self, scores: Tensor) -> Tensor:
        """Return the weights that are zero at the current progress, bool [N, K]."""
        if self.settings.pattern is None:
            return SparsityPattern(self.part * self.settings.sparsity).zero_mask(scores, "matrix")
        num_kept, group = parse_pattern(self.settings.pattern)
        pattern_zeros = SparsityPattern(1 - num_kept / group, num_kept, group).zero_mask(scores, "matrix")
        if self.part == 1.0:
            return pattern_zeros
        candidates = scores.masked_fill(
            ~pattern_zeros, torch.inf
        )  # among the weights to remove, the smallest scores first
        smallest = SparsityPattern(self.part * (1 - num_kept / group)).zero_mask(candidates, "matrix")
        return smallest & pattern_zeros


def _layers_with_masks(
    model: Any, settings: GradualSparsitySettings, pattern: SparsityPattern
) -> dict[str, nn.Linear]:
    """Return the layers that get masks by name; layers that share a weight count once."""
    by_weight: dict[int, tuple[str, nn.Linear]] = {}
    for block in blocks_of(model):
        named_layers = {
            name: model.get_submodule(name) for name in linear_layer_names(block, settings.targets)
        }
        layers = linear_layers(model, block, settings.targets)
        for name, layer in {**named_layers, **layers}.items():
            if not isinstance(layer, LowRankLinear | SharedLinear) and type(layer) is not nn.Linear:
                raise InputError(
                    f"sparsify: '{name}' is a {type(layer).__name__}, whose weights are quantized;"
                    f" {TRAINING_BEFORE_QUANTIZE['sparsify'].replace('WORD', 'finetune')}",
                    code=AFTER_QUANTIZE,
                )
        for name, layer in layers.items():
            if pattern.fits(layer.in_features):
                by_weight.setdefault(id(layer.weight), (name, layer))
    if not by_weight:
        reason = (
            "" if pattern.group is None else f", or their input sizes are not multiples of {pattern.group}"
        )
        raise InputError(
            "sparsify: no layer of the blocks can be made sparse: the layers of"
            f" {model.config.model_type} are not supported{reason}. Remove sparsify.",
            code="no-layer-selected",
            setting="sparsify",
        )
    return dict(by_weight.values())
