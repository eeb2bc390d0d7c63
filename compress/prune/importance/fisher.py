"""Fisher: the mean squared gradient of a mask on the units, row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from smelt.compress.prune.groups import AttentionGroup, FeedForwardGroup, columns_of
from smelt.compress.prune.importance.masks import masking
from smelt.compress.prune.importance.scores import Scores


def fisher_scores(
    model: nn.Module,
    attentions: list[AttentionGroup],
    blocks: list[FeedForwardGroup],
    rows: Iterable[Any],
    loss_of: Callable[[nn.Module, Any], Tensor],
) -> Scores:
    """Score every unit by the diagonal of the empirical Fisher information of its mask.

    The mean over rows of (dL/dm)^2 for a mask m = 1 on what the unit hands to the product behind it: twice
    the second-order change of the loss when the unit goes. Layers can be compared as they are. Source: Kwon
    et al. 2022, A Fast Post-Training Pruning Framework for Transformers, arXiv:2204.09656.

    Args:
        model: in eval mode, on any device.
        attentions: what to score.
        blocks: what to score.
        rows: batches of one row each, on that device; the square of a mean over several is smaller.
        loss_of: the mean loss of model and row.
    """
    there = next(model.parameters()).device
    places: list[tuple[AttentionGroup | FeedForwardGroup, nn.Linear, int]] = []
    places += [(g, columns_of(model, g.parts.out), g.head_dim(model)) for g in attentions]
    places += [(b, columns_of(model, b.parts.down), 1) for b in blocks]
    masks = {
        group.name: torch.ones(group.count(model), requires_grad=True, device=there) for group, _, _ in places
    }
    hooks = [
        product.register_forward_pre_hook(masking(masks[group.name], width))
        for group, product, width in places
    ]
    found = {name: torch.zeros(len(mask), dtype=torch.float64) for name, mask in masks.items()}
    count = 0
    try:
        for row in rows:
            gradients = torch.autograd.grad(loss_of(model, row), list(masks.values()))
            for name, gradient in zip(masks, gradients, strict=True):
                found[name] += gradient.double().square().cpu()
            count += 1
    finally:
        for hook in hooks:
            hook.remove()
    means = {name: total / max(1, count) for name, total in found.items()}
    return Scores(
        {g.name: means[g.name] for g in attentions}, {b.name: means[b.name] for b in blocks}, comparable=True
    )
