"""Calibration samples, drawn with the recipe's seed.

By default samples of equal lengths share a batch, so that there is no padding to ignore; the tokens of a
batch are limited. A translation model gets its targets as decoder inputs (teacher forcing), a language model
windows of running text.

Shapes: B = batch, L = source length, T = target length.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from smelt.compress.train.encoded_samples import (
    IGNORE_INDEX,
    EncodedSample,
    TensorBatch,
    collate,
    encode_split,
    group_by_length,
    load_processor,
    spread_indices,
)
from smelt.core.artifact import Artifact
from smelt.core.data import Split
from smelt.core.errors import InputError
from smelt.core.stage import Context
from smelt.runtime.models.sentence_model import encoder_result

# Tokens of a batch, unless one sample is longer: inputs of a layer of width 4096 take 16 MB then.
_MAX_BATCH_TOKENS = 1024
# Pairs per batch for a loss on their scores.
_PAIRS_PER_BATCH = 16


@dataclass(frozen=True)
class CalibrationSamples:
    """Inputs of a model, in batches.

    origin: of the split, for messages. num_samples: number of texts (or pairs), or windows. tokens: of all,
    without padding.
    """

    origin: str
    batches: list[TensorBatch]
    num_samples: int
    tokens: int

    def subset(self, rows: int) -> CalibrationSamples:
        """Return `rows` samples, spread over the batches: the first of each, or more if these are too few."""
        most = 1 if len(self.batches) >= rows else rows
        single = [
            {name: value[at : at + 1] for name, value in batch.items()}
            for batch in self.batches
            for at in range(min(most, *map(len, batch.values())))
        ]
        chosen = [single[i] for i in spread_indices(len(single), rows, 0)]
        return replace(self, batches=chosen, num_samples=len(chosen), tokens=sum(map(_count_tokens, chosen)))


def load_calibration_samples(
    model: Any,
    src: Artifact,
    count: int,
    ctx: Context,
    stage: str,
    *,
    labels: bool = False,
    padded: bool = False,
) -> CalibrationSamples:
    """Return `count` samples of the split `calibration`, else of `train`; all if there are fewer.

    Args:
        model: its config defines the inputs.
        src: the artifact with the tokenizer.
        count: number of samples; of running text, windows.
        ctx: data, task, seed; receives a warning about truncated texts.
        stage: the name of the stage, for messages.
        labels: whether batches also have `labels` (see `collate`), for a loss. Pairs of texts that are
            embedded separately are kept together then, several in a padded batch: their loss compares
            them.
        padded: whether samples of similar lengths share a batch, if the caller ignores padding (as
            `observe_inputs` does); short texts then need far fewer batches. Batches also have `labels`,
            which mark the padding of a target.

    Raises:
        InputError: there are no samples.
    """
    split = ctx.data.get("calibration") or ctx.data.get("train")
    if split is None or not len(split):
        raise InputError(
            f"{stage}: calibration requires samples, and the recipe has none. Add data:"
            f" {{calibration: FILE}} or data: {{train: FILE}}.",
            code="no-calibration-data",
            setting="data.calibration",
        )
    rows = _draw_samples(split, model, load_processor(src.path), count, ctx, stage)
    if labels and any(row.second_ids is not None for row in rows):
        groups = group_by_length(rows, _PAIRS_PER_BATCH, None, None)
        batches = [collate([rows[i] for i in group], model.config) for group in groups]
    elif padded:
        single = _split_pairs(rows)
        groups = group_by_length(single, len(single), 2 * _MAX_BATCH_TOKENS, None)
        batches = [collate([single[i] for i in group], model.config) for group in groups]
    else:
        batches = list(_make_batches(_split_pairs(rows), model.config))
    if not labels and not padded:
        for batch in batches:
            del batch["labels"]
    return CalibrationSamples(split.origin, batches, len(rows), sum(map(_count_tokens, batches)))


def _draw_samples(
    split: Split, model: Any, tokenizer: Any, wanted: int, ctx: Context, stage: str
) -> list[EncodedSample]:
    windows = ctx.task == "language-modeling"  # cut from one text before any are selected
    if not windows:
        split = split.select(spread_indices(len(split), wanted, ctx.seed))
    rows = encode_split(split, model.config, tokenizer, ctx, split_name=f"{stage}: calibration")
    return [rows[i] for i in spread_indices(len(rows), wanted, ctx.seed)] if windows else rows


def _split_pairs(samples: Sequence[EncodedSample]) -> list[EncodedSample]:
    """Return `samples`; pairs of texts that are embedded separately become two samples."""
    single = [replace(row, second_ids=None) for row in samples]
    return single + [
        replace(row, input_ids=row.second_ids, second_ids=None)
        for row in samples
        if row.second_ids is not None
    ]


def _make_batches(samples: Sequence[EncodedSample], config: Any) -> Iterator[TensorBatch]:
    alike: dict[tuple[int, int], list[EncodedSample]] = {}
    for row in samples:
        alike.setdefault(row.token_counts, []).append(row)
    for lengths in sorted(alike):
        size = max(1, _MAX_BATCH_TOKENS // max(1, sum(lengths)))
        group = alike[lengths]
        for at in range(0, len(group), size):
            yield collate(group[at : at + size], config)


def _count_tokens(batch: TensorBatch) -> int:
    """Return the number of tokens in `batch`, source and target, without padding; of images, the images."""
    if "attention_mask" not in batch:
        return len(batch["pixel_values"])
    labels = batch.get("labels")
    targets = batch.get("decoder_input_ids")
    count = int(batch["attention_mask"].sum())
    if targets is None:
        return count
    return count + (targets.numel() if labels is None else int((labels != IGNORE_INDEX).sum()))


@torch.inference_mode()
def model_outputs(model: Any, batches: Iterable[Mapping[str, Any]]) -> Iterator[Tensor]:
    """Yield the outputs of `model` for each batch: logits or embeddings, float [..., V]."""
    plain = model.can_generate() and {"use_cache": False}
    for batch in batches:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        yield encoder_result(model(**inputs, **(plain or {})))
