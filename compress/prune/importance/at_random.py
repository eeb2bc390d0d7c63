"""Random: units are drawn, which every other way has to be better than."""

from __future__ import annotations

import torch
from torch import nn

from smelt.compress.prune.groups import AttentionGroup, FeedForwardGroup
from smelt.compress.prune.importance.scores import Scores


def random_scores(
    model: nn.Module, attentions: list[AttentionGroup], blocks: list[FeedForwardGroup], seed: int
) -> Scores:
    """Score every unit by a number in 0..1 that the seed draws."""
    draw = torch.Generator().manual_seed(seed)
    heads, neurons = (
        {g.name: torch.rand(g.count(model), generator=draw, dtype=torch.float64) for g in kind}
        for kind in (attentions, blocks)
    )
    return Scores(heads, neurons, comparable=True)
