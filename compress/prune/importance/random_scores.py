"""Random importance: the baseline for the other methods."""

from __future__ import annotations

import torch
from torch import nn

from smelt.compress.prune.importance.unit_scores import UnitScores
from smelt.compress.prune.unit_groups import AttentionGroup, FeedForwardGroup


def random_scores(
    model: nn.Module, attentions: list[AttentionGroup], blocks: list[FeedForwardGroup], seed: int
) -> UnitScores:
    """Return uniform random scores in [0, 1) for all units, from `seed`."""
    draw = torch.Generator().manual_seed(seed)
    heads, neurons = (
        {g.name: torch.rand(g.count(model), generator=draw, dtype=torch.float64) for g in kind}
        for kind in (attentions, blocks)
    )
    return UnitScores(heads, neurons, comparable_across_layers=True)
