"""Magnitude: the norms of the weights alone; no rows are looked at."""

from __future__ import annotations

from torch import nn

from smelt.compress.prune.groups import AttentionGroup, FeedForwardGroup, whole_weight
from smelt.compress.prune.importance.scores import Scores


def magnitude_scores(
    model: nn.Module, attentions: list[AttentionGroup], blocks: list[FeedForwardGroup]
) -> Scores:
    """Score every unit by the product of the norms of what goes in and what comes out of it.

    A head: |rows of v| * |columns of out|; a neuron: |row of fc1| * |column of fc2| (L2, biases not
    counted), times |row of the gate| where there is one. The product does not change when a scale moves
    from one side to the other. A factorized layer counts as the product of its two halves, whose own norms
    say nothing: any scale can move between them, along any direction of the rank.
    """
    heads = {}
    for group in attentions:
        value = group.value_rows(model).double()
        out = whole_weight(model, group.parts.out).double()
        count = group.count(model)
        into = value.square().sum(dim=1).view(count, -1).sum(dim=1).sqrt()
        heads[group.name] = into * out.square().sum(dim=0).view(count, -1).sum(dim=1).sqrt()
    neurons = {}
    for block in blocks:
        second = whole_weight(model, block.parts.down).double()
        neurons[block.name] = second.norm(dim=0)
        for name in block.parts.inputs:
            # a row for each neuron, or two where one product makes the gate too
            rows = whole_weight(model, name).double().norm(dim=1).view(-1, second.shape[1])
            neurons[block.name] = neurons[block.name] * rows.prod(dim=0)
    return Scores(heads, neurons)
