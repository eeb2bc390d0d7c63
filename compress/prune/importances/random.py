"""Random scores from the step's seed: the control that an importance has to beat."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from smelt.compress.prune.importances.scores import Groups, ScoredModel, UnitScores
from smelt.compress.prune.units import AttentionGroup, ChannelUnits, FeedForwardGroup


def score_units(scored: ScoredModel, groups: Groups) -> UnitScores:
    """Return the scores of heads and neurons."""
    return random_scores(scored.model, *groups, scored.ctx.seed)


def score_width(scored: ScoredModel, width: int) -> Tensor:
    """Return the scores of the channels of the hidden states, float64 [D]."""
    return torch.rand(width, generator=torch.Generator().manual_seed(scored.ctx.seed), dtype=torch.float64)


def score_channels(scored: ScoredModel, groups: Sequence[ChannelUnits]) -> UnitScores:
    """Return the scores of the channels between convolutions."""
    generator = torch.Generator().manual_seed(scored.ctx.seed)
    scores = {
        g.name: torch.rand(g.count(scored.model), generator=generator, dtype=torch.float64) for g in groups
    }
    return UnitScores({}, scores, comparable_across_layers=True)


def random_scores(
    model: nn.Module, attentions: list[AttentionGroup], blocks: list[FeedForwardGroup], seed: int
) -> UnitScores:
    """Return uniform random scores in [0, 1) for all units, from `seed`."""
    generator = torch.Generator().manual_seed(seed)
    heads, neurons = (
        {g.name: torch.rand(g.count(model), generator=generator, dtype=torch.float64) for g in kind}
        for kind in (attentions, blocks)
    )
    return UnitScores(heads, neurons, comparable_across_layers=True)
