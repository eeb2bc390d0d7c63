"""Importance scores of units (heads and neurons), and their normalization across layers.

The scores are Fisher, Taylor, Wanda, magnitude (without samples) or random (the baseline). Fisher and Taylor
use the gradient of a mask of ones on the units, on labelled calibration samples; Wanda uses the inputs of
layers, without labels.

Shapes: H = heads of a layer, F = neurons of its feed-forward block.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from smelt.calibration.samples import CalibrationSamples, load_calibration_samples
from smelt.calibration.statistics import collect_statistics
from smelt.compress.prune.units import (
    AttentionGroup,
    FeedForwardGroup,
    linear_with_inputs,
    linear_with_outputs,
    whole_weight,
)
from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.stage import Context
from smelt.data.splits import SENTENCE_SIMILARITY, missing_scores_errors
from smelt.runtimes.device import torch_device
from smelt.training.losses import label_objective
from smelt.training.samples import EncodedSample, collate, encode_split, group_by_length, load_processor


@dataclass(frozen=True)
class UnitScores:
    """Importance by group name: float64 [H] per attention, [F] per feed-forward block.

    comparable_across_layers: whether scores can be compared between layers without normalization; else the
    scores of each layer are divided by their norm first (Molchanov et al. 2017, arXiv:1611.06440, equation
    9).
    """

    heads: dict[str, Tensor]
    neurons: dict[str, Tensor]
    comparable_across_layers: bool = False

    def normalized(self) -> UnitScores:
        """Return scores that are comparable between layers, for units of one kind."""
        if self.comparable_across_layers:
            return self
        heads, neurons = (
            {name: found / found.norm().clamp_min(1e-300) for name, found in kind.items()}
            for kind in (self.heads, self.neurons)
        )
        return UnitScores(heads, neurons, comparable_across_layers=True)


def unit_mask_hook(mask: Tensor, width: int) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
    """Return a hook that multiplies a layer's inputs by `mask` [units], `width` columns per unit."""

    def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0] * mask.repeat_interleave(width), *inputs[1:])

    return hook


def fisher_scores(
    model: nn.Module,
    attentions: list[AttentionGroup],
    blocks: list[FeedForwardGroup],
    rows: Iterable[Any],
    loss_of: Callable[[nn.Module, Any], Tensor],
) -> UnitScores:
    """Return the diagonal of the empirical Fisher information of each unit's mask as its score.

    This is the mean over samples of (dL/dm)^2 for a mask m = 1 on the unit's output to the next linear layer:
    twice the second-order change of the loss when the unit is removed. Scores are comparable between layers.
    Source: Kwon et al. 2022, A Fast Post-Training Pruning Framework for Transformers, arXiv:2204.09656.

    Args:
        model: in eval mode, on any device.
        attentions: the attentions to score.
        blocks: the feed-forward blocks to score.
        rows: batches of one sample each, on the same device; the square of a mean over several is smaller.
        loss_of: returns the loss of a model on a batch.
    """
    device = next(model.parameters()).device
    places = [
        (g.name, g.count(model), linear_with_inputs(model, g.structure.out), g.head_dim(model))
        for g in attentions
    ]
    places += [(b.name, b.count(model), linear_with_inputs(model, b.structure.down), 1) for b in blocks]
    masks = {name: torch.ones(units, requires_grad=True, device=device) for name, units, _, _ in places}
    hooks = [
        product.register_forward_pre_hook(unit_mask_hook(masks[name], width))
        for name, _, product, width in places
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
    return UnitScores(
        {g.name: means[g.name] for g in attentions},
        {b.name: means[b.name] for b in blocks},
        comparable_across_layers=True,
    )


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
    with collect_statistics(model, samples, layers, ctx, second=False) as found:
        by_column = {
            name: whole_weight(model, reader).double().abs().sum(dim=0) * found[name].l2_norms
            for name, reader in readers.items()
        }
    return UnitScores(
        {g.name: by_column[g.name].view(g.count(model), -1).sum(dim=1) for g in attentions},
        {b.name: by_column[b.name] for b in blocks},
    )


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
    for first in inputs:
        assert first.weight.grad is not None
        into = (first.weight * first.weight.grad).sum(dim=1)
        if first.bias is not None and first.bias.grad is not None:
            into = into + first.bias * first.bias.grad
        terms = terms + into.abs().view(-1, len(terms)).sum(dim=0)
    return terms.detach().double().cpu()


Groups = tuple[list[AttentionGroup], list[FeedForwardGroup]]
ScoresT = TypeVar("ScoresT")


@dataclass(frozen=True)
class ScoredModel:
    """The model that is scored, the artifact it comes from, and the stage's settings (PruneSettings)."""

    model: Any
    src: Artifact
    settings: Any
    ctx: Context


# By importance: a function that returns the scores of attentions and feed-forward blocks. Functions raise
# InputError if they need samples that do not exist.
UNIT_SCORES: Mapping[str, Callable[[ScoredModel, Groups], UnitScores]] = {
    "taylor": lambda scored, groups: score_on_labelled_samples(
        scored, lambda batches: taylor_scores(scored.model, *groups, batches, label_objective())
    ),
    "fisher": lambda scored, groups: score_on_labelled_samples(
        scored,
        lambda batches: fisher_scores(scored.model, *groups, batches, label_objective()),
        single=True,
    ),
    "wanda": lambda scored, groups: wanda_scores(
        scored.model,
        *groups,
        load_calibration_samples(
            scored.model, scored.src, scored.settings.calibration_samples, scored.ctx, "prune", padded=True
        ),
        scored.ctx,
    ),
    "magnitude": lambda scored, groups: magnitude_scores(scored.model, *groups),
    "random": lambda scored, groups: random_scores(scored.model, *groups, scored.ctx.seed),
}


def score_on_labelled_samples(
    scored: ScoredModel,
    score: Callable[[Iterator[dict[str, torch.Tensor]]], ScoresT],
    *,
    single: bool = False,
) -> ScoresT:
    """Return the result of `score` on batches of labelled samples, with the model on the device.

    Args:
        scored: its `settings.batch_size` is the size of the batches.
        score: a function of the batches.
        single: whether each batch is one sample, for squared gradients; the loss of sentence pairs compares
            pairs, so it needs batches anyway.

    Raises:
        InputError: there are no labelled samples.
    """
    model, settings, ctx = scored.model, scored.settings, scored.ctx
    rows = _labelled_samples(model, scored.src, settings, ctx)
    alone = single and ctx.task != SENTENCE_SIMILARITY
    groups = group_by_length(rows, 1 if alone else settings.batch_size, None, None)
    device = torch_device(ctx.device)
    try:
        return score(_device_batches(rows, groups, model.to(device), device, ctx))
    finally:
        model.to("cpu")


def _labelled_samples(model: Any, src: Artifact, settings: Any, ctx: Context) -> list[EncodedSample]:
    split = ctx.data.get("calibration") or ctx.data.get("train")
    if split is None or not len(split):
        raise InputError(
            f"prune: importance: {settings.importance} needs labelled samples. Add data: {{train: FILE}}.",
            code="missing-data",
            setting="data.train",
        )
    if found := missing_scores_errors(ctx.task, {"rows": split}, ("rows",)):
        raise InputError(
            f"prune: importance: {settings.importance}: {found[0].message} Or set importance: magnitude.",
            code=found[0].code,
            setting="importance",
        )
    draw = random.Random(ctx.seed)
    if ctx.task != "language-modeling":  # language modeling samples are windows of one text
        drawn = sorted(draw.sample(range(len(split)), min(settings.calibration_samples, len(split))))
        split = split.select(drawn)
    rows = encode_split(split, model.config, load_processor(src.path), ctx, split_name="prune: calibration")
    if len(rows) > settings.calibration_samples and ctx.task == "language-modeling":
        rows = [rows[i] for i in sorted(draw.sample(range(len(rows)), settings.calibration_samples))]
    return rows


def _device_batches(
    samples: list[EncodedSample], groups: list[list[int]], model: Any, device: str, ctx: Context
) -> Iterator[dict[str, torch.Tensor]]:
    done = 0
    for group in groups:
        batch = collate([samples[i] for i in group], model.config)
        yield {name: value.to(device) for name, value in batch.items()}
        done += len(group)
        ctx.progress(done, len(samples), "importance")
