"""What parity is asked on: real rows of clearly different lengths, so that padding is part of the question.

Shapes: B = batch, L = tokens of the longest row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from smelt.core.data import IMAGES, SIMILARITY, Split, Task, texts_read
from smelt.runtime.batch import Batch
from smelt.runtime.causal import is_causal
from smelt.runtime.images.batch import ImageBatch
from smelt.runtime.images.inputs import images_of, pack_inputs
from smelt.runtime.models.checkpoint import load_tokenizer
from smelt.runtime.predict import encode_texts, pack
from smelt.runtime.text.limits import length_limit
from smelt.runtime.text.tokenizer import Encoded

ROWS, LENGTH, STEPS = 8, 48, 8
# rows of the data to choose from
_LOOK = 256
# with a position bias that needs long rows; there fewer are enough
_FEW = 3


def rows_for(
    parent: Any,
    folder: Path,
    data: Mapping[str, Split],
    task: Task,
    rows: int = ROWS,
    length: int = LENGTH,
) -> tuple[Batch | ImageBatch, bool]:
    """Return texts for the model of the runner `parent`, and whether they are real; see `parity_batch`.

    Of a model of images: some of those.

    Args:
        parent: whose config says how inputs look.
        folder: where its tokenizer lies.
        data: train, validation, calibration, as far as there are any.
        task: of the recipe.
        rows: how many.
        length: tokens of the longest.
    """
    if task == IMAGES:
        return _images(parent, data, rows)
    tokenizer = load_tokenizer(folder)
    limit = length_limit(tokenizer, parent.config)
    if is_causal(parent.config):
        return causal_batch(data, tokenizer, parent.config, limit, rows, length)
    return parity_batch(data, tokenizer, parent.config, limit, task, rows, length)


def _images(parent: Any, data: Mapping[str, Split], rows: int) -> tuple[ImageBatch, bool]:
    """Return images spread over the data; without any, drawn pixels of the values that a processor gives."""
    split = _split(data)
    if split is None:
        height, width = parent.processor.shape or (224, 224)
        drawn = np.random.default_rng(0).normal(size=(rows, 3, height, width))
        return ImageBatch(drawn.astype(np.float32)), False
    few = split.some(np.linspace(0, len(split) - 1, min(rows, len(split))).astype(int).tolist())
    return ImageBatch(pack_inputs(images_of(few, parent.processor))), True


def parity_batch(
    data: Mapping[str, Split],
    tokenizer: Any,
    config: Mapping[str, Any],
    limit: int,
    task: Task = "text-classification",
    rows: int = ROWS,
    length: int = LENGTH,
) -> tuple[Batch, bool]:
    """Return rows of the data, padded on the right, and whether they are real.

    They are chosen by length, from the shortest to the longest; rows of one length are cut at different
    ones. Where positions count by distance (T5) the longest row holds several texts, so that all distances
    are met. Token types, where there are any, change within each row. Without data that a stage may see,
    token ids are spread over the vocabulary.

    Args:
        data: train, validation, calibration, as far as there are any.
        tokenizer: of transformers.
        config: the model's, config.json.
        limit: tokens that a row may have.
        task: decides whether the texts of a pair are read together.
        rows: how many.
        length: of the longest, at most; beside that of a row for all distances.
    """
    reach = int(config.get("relative_attention_max_distance") or 0)
    encoded = _encoded(data, tokenizer, min(length, limit), task)
    real = encoded is not None and max(map(len, encoded.ids)) > 1
    if encoded is None or not real:
        ids = np.linspace(0, int(config["vocab_size"]) - 1, rows * 12).astype(np.int64).reshape(rows, 12)
        encoded = Encoded(ids[:, : max(2, min(12, limit))].tolist(), None, 0)
    encoded = _of_different_lengths(_chosen(encoded, _FEW if reach and rows == ROWS else rows))
    if reach:
        encoded.ids[-1] = _as_long_as(min(limit, reach + STEPS), encoded.ids)
    pad = tokenizer.pad_token_id
    batch = pack(encoded, range(len(encoded.ids)), 0 if pad is None else pad)
    if task == SIMILARITY:  # whose texts are read one by one
        return Batch(batch.input_ids, batch.attention_mask), real
    return _with_types(batch, config), real


def _encoded(data: Mapping[str, Split], tokenizer: Any, most: int, task: Task) -> Encoded | None:
    split = _split(data)
    if split is None:
        return None
    texts, pairs = texts_read(split.examples[:_LOOK], task)
    return encode_texts(texts, tokenizer, most, pairs)


def _split(data: Mapping[str, Split]) -> Split | None:
    found = (data[n] for n in ("calibration", "validation", "train") if n in data)
    return next((split for split in found if len(split)), None)


def _chosen(encoded: Encoded, rows: int) -> Encoded:
    """Return `rows` rows, the shortest first, the longest last; few ones repeat."""
    order = sorted(range(len(encoded.ids)), key=lambda i: len(encoded.ids[i]))
    places = [order[at] for at in np.linspace(0, len(order) - 1, rows).round().astype(int)]
    types = None if encoded.types is None else [encoded.types[i] for i in places]
    return Encoded([list(encoded.ids[i]) for i in places], types, 0)


def _of_different_lengths(encoded: Encoded) -> Encoded:
    """Cut rows that are all about as long; the last token, which ends a text, stays."""
    lengths = [len(ids) for ids in encoded.ids]
    if 4 * min(lengths) <= 3 * max(lengths):
        return encoded
    rows = len(lengths)
    keep = [max(1, length * (at + 1) // rows) for at, length in enumerate(lengths)]
    types = encoded.types
    return Encoded(
        [_cut(ids, n) for ids, n in zip(encoded.ids, keep, strict=True)],
        None if types is None else [_cut(row, n) for row, n in zip(types, keep, strict=True)],
        0,
    )


def _cut(row: Sequence[int], length: int) -> list[int]:
    return [*row[: length - 1], row[-1]]


def _as_long_as(length: int, rows: list[list[int]]) -> list[int]:
    """Return a row of `length` tokens out of those of `rows`."""
    tokens = [token for row in reversed(rows) for token in row[:-1]] or rows[-1]
    return [*np.resize(tokens, max(1, length - 1)).tolist(), rows[-1][-1]]


def _with_types(batch: Batch, config: Mapping[str, Any]) -> Batch:
    """Let the second half of each row be another text, if the model tells texts apart."""
    if batch.token_type_ids is None or int(config.get("type_vocab_size", 2)) < 2:
        return batch
    lengths = batch.attention_mask.sum(axis=1, keepdims=True)
    second = np.arange(batch.input_ids.shape[1]) * 2 >= lengths
    return Batch(batch.input_ids, batch.attention_mask, second.astype(np.int64) * batch.attention_mask)


def causal_batch(
    data: Mapping[str, Split],
    tokenizer: Any,
    config: Mapping[str, Any],
    limit: int,
    rows: int = ROWS,
    length: int = LENGTH,
) -> tuple[Batch, bool]:
    """Return prompts of different lengths, padded on the left, and whether they come from the data.

    The last one is the longest and has no padding. Arguments as of `parity_batch`.
    """
    from smelt.runtime.generate.prompts import pack_left, pad_of
    from smelt.runtime.text.windows import joined

    most = max(2, min(length, limit - STEPS))
    split = _split(data)
    ids: list[int] = []
    if split is not None:
        text = joined(Split(split.origin, split.examples[: 50 * rows], split.windows))
        ids = tokenizer(text[: 20 * rows * most], verbose=False)["input_ids"]
    real = len(ids) >= 2 * rows
    if not real:
        ids = np.linspace(0, int(config["vocab_size"]) - 1, rows * most).astype(np.int64).tolist()
    size = min(most, len(ids) // rows)
    prompts = [ids[at * size : (at + 1) * size][: max(1, size * (at + 1) // rows)] for at in range(rows)]
    return pack_left(prompts, pad_of(tokenizer)), real
