"""Wanda: weights times the norms of their inputs, on calibration samples without labels."""

from __future__ import annotations

from torch import nn

from smelt.calibration.samples import CalibrationSamples, load_calibration_samples
from smelt.calibration.statistics import collect_statistics
from smelt.compress.prune.importances.scores import Groups, ScoredModel, UnitScores
from smelt.compress.prune.units import AttentionGroup, FeedForwardGroup, linear_with_inputs, whole_weight
from smelt.stage import Context


def score_units(scored: ScoredModel, groups: Groups) -> UnitScores:
    """Return the scores of heads and neurons."""
    samples = load_calibration_samples(
        scored.model, scored.src, scored.settings.calibration_samples, scored.ctx, "prune", padded=True
    )
    return wanda_scores(scored.model, *groups, samples, scored.ctx)


def wanda_scores(
    model: nn.Module,
    attentions: list[AttentionGroup],
    blocks: list[FeedForwardGroup],
    samples: CalibrationSamples,
    ctx: Context,
) -> UnitScores:
    """Return the sum of |W_ij| * |X_j| over each unit's columns of the layer that reads it as its score.

    W is the matrix of `out` (a head owns several columns j) or `down` (a neuron owns one), |X_j| the L2 norm
    of its input j over all tokens of `samples`. Source: Sun et al. 2023, Wanda, arXiv:2306.11695, equation 1,
    for single weights; summed per unit as Wanda-sp of An et al. 2023, FLAP, arXiv:2312.11983.

    Args:
        model: float32, in eval mode, on the CPU.
        attentions: the attentions to score.
        blocks: the feed-forward blocks to score.
        samples: calibration samples, without labels or with.
        ctx: device, threads, progress.
    """
    readers = {g.name: g.structure.out for g in attentions} | {b.name: b.structure.down for b in blocks}
    layers = {name: [linear_with_inputs(model, reader)] for name, reader in readers.items()}
    with collect_statistics(model, samples, layers, ctx, second=False) as statistics:
        by_column = {
            name: whole_weight(model, reader).double().abs().sum(dim=0) * statistics[name].l2_norms
            for name, reader in readers.items()
        }
    return UnitScores(
        {g.name: by_column[g.name].view(g.count(model), -1).sum(dim=1) for g in attentions},
        {b.name: by_column[b.name] for b in blocks},
    )
