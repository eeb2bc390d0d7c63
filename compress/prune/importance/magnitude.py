"""Magnitude importance: norms of the weights, without calibration samples."""

from __future__ import annotations

from torch import nn

from smelt.compress.prune.importance.unit_scores import UnitScores
from smelt.compress.prune.unit_groups import AttentionGroup, FeedForwardGroup, whole_weight


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
        into = value.square().sum(dim=1).view(count, -1).sum(dim=1).sqrt()
        heads[group.name] = into * out.square().sum(dim=0).view(count, -1).sum(dim=1).sqrt()
    neurons = {}
    for block in blocks:
        second = whole_weight(model, block.structure.down).double()
        neurons[block.name] = second.norm(dim=0)
        for name in block.structure.input_layers:
            # one row per neuron, or two if the layer also computes the gate
            rows = whole_weight(model, name).double().norm(dim=1).view(-1, second.shape[1])
            neurons[block.name] = neurons[block.name] * rows.prod(dim=0)
    return UnitScores(heads, neurons)
