"""Taylor: the first-order change of the loss when a unit is removed, on labeled calibration samples.

Shapes: H = heads of a layer, F = neurons of its feed-forward block, C = channels between two convolutions,
D = channels of the hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from smelt.compress.prune.importances.scores import (
    Groups,
    ScoredModel,
    UnitScores,
    hidden_norms,
    mean_squared_gradients,
    score_on_labeled_samples,
    unit_mask_hook,
)
from smelt.compress.prune.units import (
    AttentionGroup,
    ChannelUnits,
    FeedForwardGroup,
    linear_with_inputs,
    linear_with_outputs,
)
from smelt.training.losses import label_objective


def score_units(scored: ScoredModel, groups: Groups) -> UnitScores:
    """Return the scores of heads and neurons; that of a neuron is the mean over its two or three matrices.

    Only so are the two comparable: `taylor_scores` counts a head once, a neuron once per matrix.
    """
    scores = score_on_labeled_samples(
        scored, lambda batches: taylor_scores(scored.model, *groups, batches, label_objective())
    )
    matrices = {block.name: 3 if block.structure.gate else 2 for block in groups[1]}
    neurons = {name: score / matrices[name] for name, score in scores.neurons.items()}
    return UnitScores(scores.heads, neurons)


def score_width(scored: ScoredModel, width: int) -> Tensor:
    """Return the scores of the channels of the hidden states, float64 [D]."""
    return score_on_labeled_samples(
        scored,
        lambda batches: gradient_scores(scored.model, width, batches, label_objective(), squared=False),
    )


def score_channels(scored: ScoredModel, groups: Sequence[ChannelUnits]) -> UnitScores:
    """Return the scores of the channels between convolutions."""
    scores = score_on_labeled_samples(
        scored, lambda batches: gate_scores(scored.model, groups, batches, label_objective())
    )
    return UnitScores({}, scores, comparable_across_layers=True)


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
    device = next(model.parameters()).device
    masks = {g.name: torch.ones(g.count(model), requires_grad=True, device=device) for g in attentions}
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
    for layer in inputs:
        assert layer.weight.grad is not None
        input_terms = (layer.weight * layer.weight.grad).sum(dim=1)
        if layer.bias is not None and layer.bias.grad is not None:
            input_terms = input_terms + layer.bias * layer.bias.grad
        terms = terms + input_terms.abs().view(-1, len(terms)).sum(dim=0)
    return terms.detach().double().cpu()


def gradient_scores(
    model: Any,
    width: int,
    batches: Iterable[Any],
    loss_of: Callable[[nn.Module, Any], Tensor],
    squared: bool,
) -> Tensor:
    """Return the importance of each channel by the gradient of a mask m = 1 on all norm outputs, float64 [D].

    The sum over batches of |dL/dm| (taylor), or their mean of (dL/dm)^2 if `squared` (fisher), as for heads
    and neurons.

    Args:
        model: in eval mode.
        width: D.
        batches: labeled samples, on the device of the model; one sample per batch if squared.
        loss_of: returns the mean loss of a model on a batch.
        squared: whether to compute fisher instead of taylor.
    """
    scores, count = torch.zeros(width, dtype=torch.float64), 0
    with _hidden_mask(model, width) as mask:
        for batch in batches:
            (slope,) = torch.autograd.grad(loss_of(model, batch), [mask])
            scores += (slope.double().square() if squared else slope.double().abs()).cpu()
            count += 1
    return scores / max(1, count) if squared else scores


@contextmanager
def _hidden_mask(model: Any, width: int) -> Iterator[Tensor]:
    mask = torch.ones(width, requires_grad=True, device=next(model.parameters()).device)
    handles = [norm.register_forward_hook(lambda m, x, y: y * mask) for norm in hidden_norms(model)]
    try:
        yield mask
    finally:
        for handle in handles:
            handle.remove()


def gate_scores(
    model: Any,
    groups: Sequence[ChannelUnits],
    batches: Iterable[Any],
    loss_of: Callable[[nn.Module, Any], Tensor],
) -> dict[str, Tensor]:
    """Return the mean over batches of (dL/dg)^2 for a gate g = 1 of each channel.

    This is the squared first-order change of the loss when the channel is removed. Scores are comparable
    between layers.
    Source: Molchanov et al. 2019, Importance Estimation for Neural Network Pruning, arXiv:1906.10771,
    equation 8 and section 3.2 (gates).

    Args:
        model: in eval mode, on any device.
        groups: the channel groups to score.
        batches: labeled images, on the same device.
        loss_of: returns the mean loss of a model on a batch.
    """
    device = next(model.parameters()).device
    gates = {g.name: torch.ones(g.count(model), requires_grad=True, device=device) for g in groups}
    hooks = [hook for group in groups for hook in group.add_gate(model, gates[group.name])]
    return mean_squared_gradients(model, gates, hooks, batches, loss_of)
