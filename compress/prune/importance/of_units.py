"""The scores that the settings of `prune` ask for, on the rows that there are."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from smelt.compress.prune.groups import AttentionGroup, FeedForwardGroup
from smelt.compress.prune.importance.at_random import random_scores
from smelt.compress.prune.importance.fisher import fisher_scores
from smelt.compress.prune.importance.magnitude import magnitude_scores
from smelt.compress.prune.importance.scores import Scores
from smelt.compress.prune.importance.taylor import taylor_scores
from smelt.compress.train.data import Row, collate, encode_split, group_by_length, reader_of
from smelt.compress.train.objective import label_objective
from smelt.compress.train.run import scores_lacking
from smelt.core.artifact import Artifact
from smelt.core.data import SIMILARITY
from smelt.core.errors import InputError
from smelt.core.stage import Context
from smelt.runtime.backends.device import torch_device

if TYPE_CHECKING:
    import torch

Scored = TypeVar("Scored")


def score_units(
    model: Any,
    src: Artifact,
    settings: Any,
    ctx: Context,
    *,
    attentions: list[AttentionGroup],
    blocks: list[FeedForwardGroup],
) -> Scores:
    """Score the units of `attentions` and `blocks`, as the PruneSettings `settings` say.

    Raises:
        InputError: there are no rows with labels, and the loss on some is looked at.
    """
    if settings.importance == "magnitude":
        return magnitude_scores(model, attentions, blocks)
    if settings.importance == "random":
        return random_scores(model, attentions, blocks, ctx.seed)
    score = fisher_scores if settings.importance == "fisher" else taylor_scores
    return on_labelled_rows(
        model,
        src,
        settings,
        ctx,
        lambda batches: score(model, attentions, blocks, batches, label_objective()),
    )


def on_labelled_rows(
    model: Any,
    src: Artifact,
    settings: Any,
    ctx: Context,
    score: Callable[[Iterator[dict[str, torch.Tensor]]], Scored],
) -> Scored:
    """Return what `score` makes of batches of rows with labels; `model` is on the device meanwhile.

    Raises:
        InputError: there are none.
    """
    rows = _rows(model, src, settings, ctx)
    # a row at a time, because squares are taken; the loss of pairs compares them, so these stay together
    alone = settings.importance == "fisher" and ctx.task != SIMILARITY
    groups = group_by_length(rows, 1 if alone else settings.batch_size, None, None)
    device = torch_device(ctx.device)
    try:
        return score(_batches(rows, groups, model.to(device), device, ctx))
    finally:
        model.to("cpu")


def _rows(model: Any, src: Artifact, settings: Any, ctx: Context) -> list[Row]:
    split = ctx.data.get("calibration") or ctx.data.get("train")
    if split is None:
        raise InputError(
            f"prune: importance: {settings.importance} needs rows with labels. Name them with data: {{train:"
            " FILE}.",
            code="missing-data",
            setting="data.train",
        )
    if found := scores_lacking(ctx.task, {"rows": split}, ("rows",)):
        raise InputError(
            f"prune: importance: {settings.importance}: {found[0].message} Or take magnitude.",
            code=found[0].code,
            setting="importance",
        )
    draw = random.Random(ctx.seed)
    if ctx.task != "language-modeling":  # whose rows are windows of one text
        drawn = sorted(draw.sample(range(len(split)), min(settings.calibration_samples, len(split))))
        split = split.some(drawn)
    rows = encode_split(split, model.config, reader_of(src.path), ctx, what="prune: calibration")
    if len(rows) > settings.calibration_samples and ctx.task == "language-modeling":
        rows = [rows[i] for i in sorted(draw.sample(range(len(rows)), settings.calibration_samples))]
    return rows


def _batches(
    rows: list[Row], groups: list[list[int]], model: Any, device: str, ctx: Context
) -> Iterator[dict[str, torch.Tensor]]:
    done = 0
    for group in groups:
        batch = collate([rows[i] for i in group], model.config)
        yield {name: value.to(device) for name, value in batch.items()}
        done += len(group)
        ctx.progress(done, len(rows), "importance")
