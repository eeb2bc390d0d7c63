"""Rows with their labels, of which a loss is made."""

from __future__ import annotations

from typing import Any

from smelt.compress.train.data import TensorBatch, collate, encode_split, group_by_length, spread_out
from smelt.compress.train.run import scores_lacking
from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.stage import Context
from smelt.runtime.models.checkpoint import load_tokenizer


def labelled_batches(
    model: Any, src: Artifact, wanted: int, batch_size: int, ctx: Context
) -> list[TensorBatch]:
    """Return `wanted` rows of the split `calibration`, else of `train`, in batches of similar length.

    Raises:
        InputError: there are no such rows, or the pairs of a sentence embedder have no scores.
    """
    split = ctx.data.get("calibration") or ctx.data.get("train")
    if split is None or not len(split):
        raise InputError(
            "depth: importance: loss needs rows with labels. Name them with data: {train: FILE}, or take"
            " another importance."
        )
    if found := scores_lacking(ctx.task, {"rows": split}, ("rows",)):
        raise InputError(f"depth: importance: loss: {found[0][1]} Or take block-influence.")
    if ctx.task != "language-modeling":  # whose rows are windows of one text
        split = split.some(spread_out(len(split), wanted, ctx.seed))
    rows = encode_split(split, model.config, load_tokenizer(src.path), ctx, what="depth: calibration")
    rows = [rows[i] for i in spread_out(len(rows), wanted, ctx.seed)]
    groups = group_by_length(rows, batch_size, None, None)
    return [collate([rows[i] for i in group], model.config) for group in groups]
