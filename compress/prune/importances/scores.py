"""What importances of `prune` share: scores, the model that is scored, and batches of labeled samples.

Shapes: H = heads of a layer, F = neurons of its feed-forward block.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from smelt.calibration.samples import LOSS_SAMPLES
from smelt.compress.prune.units import AttentionGroup, FeedForwardGroup
from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.data.splits import missing_labels_errors
from smelt.models.families.registry import family_of, hidden_norm_names
from smelt.runtimes.device import torch_device
from smelt.stage import Context
from smelt.tasks.encode_split import encode_split
from smelt.tasks.samples import EncodedSample, collate, group_by_length, load_processor


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
            {name: values / values.norm().clamp_min(1e-300) for name, values in kind.items()}
            for kind in (self.heads, self.neurons)
        )
        return UnitScores(heads, neurons, comparable_across_layers=True)


def unit_mask_hook(mask: Tensor, width: int) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
    """Return a hook that multiplies a layer's inputs by `mask` [units], `width` columns per unit."""

    def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0] * mask.repeat_interleave(width), *inputs[1:])

    return hook


Groups = tuple[list[AttentionGroup], list[FeedForwardGroup]]
ScoresT = TypeVar("ScoresT")


@dataclass(frozen=True)
class ScoredModel:
    """The model that is scored, the artifact it comes from, and the stage's settings (PruneSettings)."""

    model: Any
    src: Artifact
    settings: Any
    ctx: Context


def mean_squared_gradients(
    model: nn.Module,
    masks: Mapping[str, Tensor],
    hooks: Sequence[RemovableHandle],
    batches: Iterable[Any],
    loss_of: Callable[[nn.Module, Any], Tensor],
) -> dict[str, Tensor]:
    """Return the mean over batches of (dL/dm)^2 for masks m, float64, by name.

    Args:
        model: in eval mode, on any device.
        masks: by the name of a group of units; they require gradients.
        hooks: apply the masks in the model; removed afterwards.
        batches: labeled samples, on the same device.
        loss_of: returns the mean loss of a model on a batch.
    """
    totals = {name: torch.zeros(len(mask), dtype=torch.float64) for name, mask in masks.items()}
    count = 0
    try:
        for batch in batches:
            gradients = torch.autograd.grad(loss_of(model, batch), list(masks.values()))
            for name, gradient in zip(masks, gradients, strict=True):
                totals[name] += gradient.double().square().cpu()
            count += 1
    finally:
        for hook in hooks:
            hook.remove()
    return {name: total / max(1, count) for name, total in totals.items()}


def hidden_norms(model: Any) -> list[nn.Module]:
    """Return the norms of the hidden states of `model`, each once, in the order of computation."""
    family: Any = family_of(model)
    return [model.get_submodule(name) for name in hidden_norm_names(model) if name not in family.head_modules]


def distance_norms(model: Any) -> list[nn.Module]:
    """Return those of them that norm embeddings of distances, not states of a sample (DeBERTa)."""
    family: Any = family_of(model)
    streams = [stack.stream for stack in family.stacks(model.config.to_dict())]
    return [model.get_submodule(stream.distance_norm) for stream in streams if stream.distance_norm]


def score_on_labeled_samples(
    scored: ScoredModel,
    score: Callable[[Iterator[dict[str, torch.Tensor]]], ScoresT],
    *,
    single: bool = False,
) -> ScoresT:
    """Return the result of `score` on batches of labeled samples, with the model on the device.

    Args:
        scored: its `settings.batch_size` is the size of the batches.
        score: a function of the batches.
        single: whether each batch is one sample, for squared gradients; the loss of embedders compares
            pairs, so it needs batches anyway.

    Raises:
        InputError: there are no labeled samples.
    """
    model, settings, ctx = scored.model, scored.settings, scored.ctx
    samples = _labeled_samples(model, scored.src, settings, ctx)
    one_by_one = single and not ctx.traits.embeds
    groups = group_by_length(samples, 1 if one_by_one else settings.batch_size, None, None)
    device = torch_device(ctx.device)
    try:
        return score(_device_batches(samples, groups, model.to(device), device, ctx))
    finally:
        model.to("cpu")


def _labeled_samples(model: Any, src: Artifact, settings: Any, ctx: Context) -> list[EncodedSample]:
    split = ctx.data.get("calibration") or ctx.data.get("train")
    if split is None or not len(split):
        raise InputError(
            f"prune: importance: {settings.importance} needs labeled samples. Add data: {{train: FILE}}.",
            code="missing-data",
            setting="data.train",
        )
    if errors := missing_labels_errors(ctx.task, {"rows": split}, ("rows",)):
        raise InputError(
            f"prune: importance: {settings.importance}: {errors[0].message} Or set importance: magnitude.",
            code=errors[0].code,
            setting="importance",
        )
    rng, count = random.Random(ctx.seed), settings.calibration_samples or LOSS_SAMPLES
    if ctx.traits.samples != "running-text":  # language modeling samples are windows of one text
        indices = sorted(rng.sample(range(len(split)), min(count, len(split))))
        split = split.select(indices)
    samples = encode_split(
        split, model.config, load_processor(src.path), ctx, split_name="prune: calibration"
    )
    if len(samples) > count and ctx.traits.samples == "running-text":
        samples = [samples[i] for i in sorted(rng.sample(range(len(samples)), count))]
    return samples


def _device_batches(
    samples: list[EncodedSample], groups: list[list[int]], model: Any, device: str, ctx: Context
) -> Iterator[dict[str, torch.Tensor]]:
    done = 0
    for group in groups:
        batch = collate([samples[i] for i in group], model.config)
        yield {name: value.to(device) for name, value in batch.items()}
        done += len(group)
        ctx.progress(done, len(samples), "importance")
