"""Magnitude: the norms of a unit's weights, without samples.

Shapes: S, T = channels in and out of a convolution, D = its taps, or channels of the hidden states; C =
channels between two convolutions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from smelt.compress.prune.importances.scores import Groups, ScoredModel, UnitScores
from smelt.compress.prune.units import AttentionGroup, ChannelUnits, FeedForwardGroup, whole_weight
from smelt.models.hidden_width import hidden_axes


def score_units(scored: ScoredModel, groups: Groups) -> UnitScores:
    """Return the scores of heads and neurons."""
    return magnitude_scores(scored.model, *groups)


def score_width(scored: ScoredModel, width: int) -> Tensor:
    """Return the scores of the channels of the hidden states, float64 [D]."""
    return channel_magnitudes(scored.model)


def score_channels(scored: ScoredModel, groups: Sequence[ChannelUnits]) -> UnitScores:
    """Return the scores of the channels between convolutions."""
    return UnitScores({}, filter_magnitudes(scored.model, groups))


def magnitude_scores(
    model: nn.Module, attentions: list[AttentionGroup], blocks: list[FeedForwardGroup]
) -> UnitScores:
    """Return the product of the norms of each unit's input and output weights as its score.

    A head: |rows of v| * |columns of out|; a neuron: |row of fc1| * |column of fc2| (L2, biases not
    counted), times |row of the gate| where there is one. The product does not change when a scale moves
    from one side to the other. A factorized layer counts as the product of its factors, whose own norms
    are arbitrary: any scale can move between them, along any direction of the rank.
    """
    heads = {}
    for group in attentions:
        value = group.value_weight(model).double()
        out = whole_weight(model, group.structure.out).double()
        count = group.count(model)
        input_norms = value.square().sum(dim=1).view(count, -1).sum(dim=1).sqrt()
        heads[group.name] = input_norms * out.square().sum(dim=0).view(count, -1).sum(dim=1).sqrt()
    neurons = {}
    for block in blocks:
        down_weight = whole_weight(model, block.structure.down).double()
        neurons[block.name] = down_weight.norm(dim=0)
        for name in block.structure.input_layers:
            # one row per neuron, or two if the layer also computes the gate
            neuron_norms = whole_weight(model, name).double().norm(dim=1).view(-1, down_weight.shape[1])
            neurons[block.name] = neurons[block.name] * neuron_norms.prod(dim=0)
    return UnitScores(heads, neurons)


def channel_magnitudes(model: Any) -> Tensor:
    """Return the L2 norm of all weights that read, output or normalize each channel, float64 [D]."""
    squares: list[Tensor] = []
    visited: set[tuple[str, int]] = set()
    for axis in hidden_axes(model):
        if axis.stream != "hidden" or (axis.name, axis.dim) in visited:
            continue
        visited.add((axis.name, axis.dim))
        owner, _, attribute = axis.name.rpartition(".")
        tensor: Tensor = getattr(model.get_submodule(owner), attribute)
        squares.append(tensor.detach().double().transpose(0, axis.dim).flatten(1).square().sum(dim=1)
                       if tensor.dim() > 1 else tensor.detach().double().square())  # fmt: skip
    return torch.stack(squares).sum(dim=0).sqrt()


def filter_magnitudes(model: Any, groups: Sequence[ChannelUnits]) -> dict[str, Tensor]:
    """Return the L1 norm of the filter of every channel, float64 [C] by group.

    Source: Li et al. 2017, Pruning Filters for Efficient ConvNets, arXiv:1608.08710, section 3.1.
    """
    return {group.name: group.filter_norms(model) for group in groups}
