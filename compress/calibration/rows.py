"""The rows that a model is looked at with, drawn by the recipe's seed.

Unless asked for otherwise, rows of equal lengths share a batch, so that nothing is padded and no value has to
be left out; a batch holds a bounded number of tokens. A translator is fed its targets (teacher forcing), a
language model windows of running text.

Shapes: B = batch, L = source length, T = target length.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from smelt.compress.train.data import (
    IGNORE,
    Row,
    TensorBatch,
    collate,
    encode_split,
    group_by_length,
    reader_of,
    spread_out,
)
from smelt.core.artifact import Artifact
from smelt.core.data import Split
from smelt.core.errors import InputError
from smelt.core.stage import Context
from smelt.runtime.models.sentence_model import result_of

# Tokens of a batch, where a single row is not longer: what a layer of 4096 inputs gets is 16 MB then.
_TOKENS = 1024
# Pairs whose scores a loss compares.
_PAIRS = 16


@dataclass(frozen=True)
class CalibrationRows:
    """Inputs of a model, in batches.

    origin: of the split, for messages. rows: how many texts (or pairs of them) or windows. tokens: of all,
    without padding.
    """

    origin: str
    batches: list[TensorBatch]
    rows: int
    tokens: int

    def some(self, rows: int) -> CalibrationRows:
        """Return `rows` rows, spread over the batches: the first of each, or any where these are too few."""
        most = 1 if len(self.batches) >= rows else rows
        single = [
            {name: value[at : at + 1] for name, value in batch.items()}
            for batch in self.batches
            for at in range(min(most, *map(len, batch.values())))
        ]
        chosen = [single[i] for i in spread_out(len(single), rows, 0)]
        return replace(self, batches=chosen, rows=len(chosen), tokens=sum(map(_tokens, chosen)))


def calibration_rows(
    model: Any,
    src: Artifact,
    wanted: int,
    ctx: Context,
    stage: str,
    *,
    labels: bool = False,
    padded: bool = False,
) -> CalibrationRows:
    """Return `wanted` rows of the split `calibration`, else of `train`; all where there are fewer.

    Args:
        model: whose config says how inputs look.
        src: where the tokenizer lies.
        wanted: rows; of running text, windows.
        ctx: data, task, seed; gets a warning of texts that were cut.
        stage: the stage's word, for messages.
        labels: whether batches have their `labels` besides (see `collate`), from which a loss follows. Pairs
            that are read one by one stay together then, and several in a batch, which is padded: their loss
            compares them.
        padded: whether rows of similar lengths share a batch, for who leaves padding out (`observe` does); of
            short texts there are far fewer batches then. Batches have their `labels` besides, which tell the
            padding of a target.

    Raises:
        InputError: there are no such rows.
    """
    split = ctx.data.get("calibration") or ctx.data.get("train")
    if split is None or not len(split):
        raise InputError(
            f"{stage}: it looks at the activations of real rows, and there are none. Name some with data:"
            " {calibration: FILE} or data: {train: FILE}.",
            code="no-calibration-data",
            setting="data.calibration",
        )
    rows = _drawn(split, model, reader_of(src.path), wanted, ctx, stage)
    if labels and any(row.second is not None for row in rows):
        groups = group_by_length(rows, _PAIRS, None, None)
        batches = [collate([rows[i] for i in group], model.config) for group in groups]
    elif padded:
        single = _single(rows)
        groups = group_by_length(single, len(single), 2 * _TOKENS, None)
        batches = [collate([single[i] for i in group], model.config) for group in groups]
    else:
        batches = list(_batches(_single(rows), model.config))
    if not labels and not padded:
        for batch in batches:
            del batch["labels"]
    return CalibrationRows(split.origin, batches, len(rows), sum(map(_tokens, batches)))


def _drawn(split: Split, model: Any, tokenizer: Any, wanted: int, ctx: Context, stage: str) -> list[Row]:
    windows = ctx.task == "language-modeling"  # of one text, which is cut before any are chosen
    if not windows:
        split = split.some(spread_out(len(split), wanted, ctx.seed))
    rows = encode_split(split, model.config, tokenizer, ctx, what=f"{stage}: calibration")
    return [rows[i] for i in spread_out(len(rows), wanted, ctx.seed)] if windows else rows


def _single(rows: Sequence[Row]) -> list[Row]:
    """Return `rows`; of pairs that are read one by one, a row for either text."""
    single = [replace(row, second=None) for row in rows]
    return single + [replace(row, source=row.second, second=None) for row in rows if row.second is not None]


def _batches(rows: Sequence[Row], config: Any) -> Iterator[TensorBatch]:
    alike: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        alike.setdefault(row.tokens, []).append(row)
    for lengths in sorted(alike):
        size = max(1, _TOKENS // max(1, sum(lengths)))
        group = alike[lengths]
        for at in range(0, len(group), size):
            yield collate(group[at : at + size], config)


def _tokens(batch: TensorBatch) -> int:
    """Return how many tokens are in `batch`, those of either side, without padding; of images the images."""
    if "attention_mask" not in batch:
        return len(batch["pixel_values"])
    labels = batch.get("labels")
    targets = batch.get("decoder_input_ids")
    count = int(batch["attention_mask"].sum())
    if targets is None:
        return count
    return count + (targets.numel() if labels is None else int((labels != IGNORE).sum()))


@torch.inference_mode()
def outputs(model: Any, batches: Iterable[Mapping[str, Any]]) -> Iterator[Tensor]:
    """Yield what `model` makes of each batch: logits or vectors, float [..., V]."""
    plain = model.can_generate() and {"use_cache": False}
    for batch in batches:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        yield result_of(model(**inputs, **(plain or {})))
