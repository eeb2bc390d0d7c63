"""Fisher: the squared gradient of the loss by a mask of ones on a unit, one labeled sample at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from smelt.compress.prune.importances.scores import (
    Groups,
    ScoredModel,
    UnitScores,
    mean_squared_gradients,
    score_on_labeled_samples,
    unit_mask_hook,
)
from smelt.compress.prune.importances.taylor import gate_scores, gradient_scores
from smelt.compress.prune.units import AttentionGroup, ChannelUnits, FeedForwardGroup, linear_with_inputs
from smelt.training.losses import label_objective


def score_units(scored: ScoredModel, groups: Groups) -> UnitScores:
    """Return the scores of heads and neurons."""
    return score_on_labeled_samples(
        scored,
        lambda batches: fisher_scores(scored.model, *groups, batches, label_objective()),
        single=True,
    )


def score_width(scored: ScoredModel, width: int) -> Tensor:
    """Return the scores of the channels of the hidden states, float64 [D]."""
    return score_on_labeled_samples(
        scored,
        lambda batches: gradient_scores(scored.model, width, batches, label_objective(), squared=True),
        single=True,
    )


def score_channels(scored: ScoredModel, groups: Sequence[ChannelUnits]) -> UnitScores:
    """Return the scores of the channels between convolutions."""
    scores = score_on_labeled_samples(
        scored,
        lambda batches: gate_scores(scored.model, groups, batches, label_objective()),
        single=True,
    )
    return UnitScores({}, scores, comparable_across_layers=True)


def fisher_scores(
    model: nn.Module,
    attentions: list[AttentionGroup],
    blocks: list[FeedForwardGroup],
    rows: Iterable[Any],
    loss_of: Callable[[nn.Module, Any], Tensor],
) -> UnitScores:
    """Return the diagonal of the empirical Fisher information of each unit's mask as its score.

    This is the mean over samples of (dL/dm)^2 for a mask m = 1 on the unit's output to the next linear layer:
    twice the second-order change of the loss when the unit is removed. Scores are comparable between layers.
    Source: Kwon et al. 2022, A Fast Post-Training Pruning Framework for Transformers, arXiv:2204.09656.

    Args:
        model: in eval mode, on any device.
        attentions: the attentions to score.
        blocks: the feed-forward blocks to score.
        rows: batches of one sample each, on the same device; the square of a mean over several is smaller.
        loss_of: returns the loss of a model on a batch.
    """
    device = next(model.parameters()).device
    masked_layers = [
        (g.name, g.count(model), linear_with_inputs(model, g.structure.out), g.head_dim(model))
        for g in attentions
    ]
    masked_layers += [
        (b.name, b.count(model), linear_with_inputs(model, b.structure.down), 1) for b in blocks
    ]
    masks = {
        name: torch.ones(units, requires_grad=True, device=device) for name, units, _, _ in masked_layers
    }
    hooks = [
        layer.register_forward_pre_hook(unit_mask_hook(masks[name], width))
        for name, _, layer, width in masked_layers
    ]
    means = mean_squared_gradients(model, masks, hooks, rows, loss_of)
    return UnitScores(
        {g.name: means[g.name] for g in attentions},
        {b.name: means[b.name] for b in blocks},
        comparable_across_layers=True,
    )
