"""Importance scores by the settings of `prune`, on calibration samples."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from smelt.compress.prune.importance.fisher import fisher_scores
from smelt.compress.prune.importance.magnitude import magnitude_scores
from smelt.compress.prune.importance.random_scores import random_scores
from smelt.compress.prune.importance.taylor import taylor_scores
from smelt.compress.prune.importance.unit_scores import UnitScores
from smelt.compress.prune.unit_groups import AttentionGroup, FeedForwardGroup
from smelt.compress.train.encoded_samples import (
    EncodedSample,
    collate,
    encode_split,
    group_by_length,
    load_processor,
)
from smelt.compress.train.objective import label_objective
from smelt.compress.train.train import missing_scores_errors
from smelt.core.artifact import Artifact
from smelt.core.data import SENTENCE_SIMILARITY
from smelt.core.errors import InputError
from smelt.core.stage import Context
from smelt.runtime.backends.device import torch_device

if TYPE_CHECKING:
    import torch

ScoresT = TypeVar("ScoresT")


def score_units(
    model: Any,
    src: Artifact,
    settings: Any,
    ctx: Context,
    *,
    attentions: list[AttentionGroup],
    blocks: list[FeedForwardGroup],
) -> UnitScores:
    """Return the scores of `attentions` and `blocks` by the PruneSettings `settings`.

    Raises:
        InputError: the importance needs labelled samples, and there are none.
    """
    if settings.importance == "magnitude":
        return magnitude_scores(model, attentions, blocks)
    if settings.importance == "random":
        return random_scores(model, attentions, blocks, ctx.seed)
    score = fisher_scores if settings.importance == "fisher" else taylor_scores
    return score_on_labelled_samples(
        model,
        src,
        settings,
        ctx,
        lambda batches: score(model, attentions, blocks, batches, label_objective()),
    )


def score_on_labelled_samples(
    model: Any,
    src: Artifact,
    settings: Any,
    ctx: Context,
    score: Callable[[Iterator[dict[str, torch.Tensor]]], ScoresT],
) -> ScoresT:
    """Return the result of `score` on batches of labelled samples, with `model` on the device.

    Raises:
        InputError: there are no labelled samples.
    """
    rows = _labelled_samples(model, src, settings, ctx)
    # one sample per batch for squared gradients; the loss of sentence pairs compares pairs, so it needs
    # batches
    alone = settings.importance == "fisher" and ctx.task != SENTENCE_SIMILARITY
    groups = group_by_length(rows, 1 if alone else settings.batch_size, None, None)
    device = torch_device(ctx.device)
    try:
        return score(_device_batches(rows, groups, model.to(device), device, ctx))
    finally:
        model.to("cpu")


def _labelled_samples(model: Any, src: Artifact, settings: Any, ctx: Context) -> list[EncodedSample]:
    split = ctx.data.get("calibration") or ctx.data.get("train")
    if split is None:
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
