"""Taylor importance: the first-order change of the loss when a unit is removed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from smelt.compress.prune.importance.unit_mask import unit_mask_hook
from smelt.compress.prune.importance.unit_scores import UnitScores
from smelt.compress.prune.unit_groups import (
    AttentionGroup,
    FeedForwardGroup,
    linear_with_inputs,
    linear_with_outputs,
)


def taylor_scores(
    model: nn.Module,
    attentions: list[AttentionGroup],
    blocks: list[FeedForwardGroup],
    batches: Iterable[Any],
    loss_of: Callable[[nn.Module, Any], Tensor],
) -> UnitScores:
    """Return the first-order change of the loss when each unit is removed, summed over batches.

    A head: |dL/dm| for a mask m = 1 on its output (Michel et al. 2019, arXiv:1905.10650). A neuron:
    |sum(w1 * g1) + b1 * gb1| + |sum(w2 * g2)| with its row w1 and bias b1 of the first linear layer, its
    column w2 of the second, and their gradients (DynaBERT, Hou et al. 2020, arXiv:2004.04037,
    run_glue.py, compute_neuron_head_importance); a gate counts like w1.

    Args:
        model: in eval mode, on any device.
        attentions: the attentions to score.
        blocks: the feed-forward blocks to score.
        batches: calibration batches, on the same device.
        loss_of: returns the mean loss of a model on a batch.
    """
    there = next(model.parameters()).device
    masks = {g.name: torch.ones(g.count(model), requires_grad=True, device=there) for g in attentions}
    heads = {name: torch.zeros(len(mask), dtype=torch.float64) for name, mask in masks.items()}
    neurons = {b.name: torch.zeros(b.count(model), dtype=torch.float64) for b in blocks}
    hooks = [
        linear_with_inputs(model, g.structure.out).register_forward_pre_hook(
            unit_mask_hook(masks[g.name], g.head_dim(model))
        )
        for g in attentions
    ]
    try:
        for batch in batches:
            model.zero_grad(set_to_none=True)
            loss_of(model, batch).backward()
            for name, mask in masks.items():
                assert mask.grad is not None
                heads[name] += mask.grad.abs().double().cpu()
                mask.grad = None
            for block in blocks:
                inputs = [linear_with_outputs(model, name) for name in block.structure.input_layers]
                neurons[block.name] += _neuron_terms(inputs, linear_with_inputs(model, block.structure.down))
    finally:
        for hook in hooks:
            hook.remove()
        model.zero_grad(set_to_none=True)
    return UnitScores(heads, neurons)


def _neuron_terms(inputs: list[nn.Linear], second: nn.Linear) -> Tensor:
    """Return |sum(w1 * g1) + b1 * gb1|, summed over `inputs`, + |sum(w2 * g2)| per neuron, float64 [F]."""
    assert second.weight.grad is not None
    terms = (second.weight * second.weight.grad).sum(dim=0).abs()
    for first in inputs:
        assert first.weight.grad is not None
        into = (first.weight * first.weight.grad).sum(dim=1)
        if first.bias is not None and first.bias.grad is not None:
            into = into + first.bias * first.bias.grad
        terms = terms + into.abs().view(-1, len(terms)).sum(dim=0)
    return terms.detach().double().cpu()
