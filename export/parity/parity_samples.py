"""Return samples for parity checks: real ones of clearly different lengths, so that padding is checked too.

Shapes: B = batch, L = tokens of the longest row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from smelt.core.data import IMAGE_CLASSIFICATION, SENTENCE_SIMILARITY, Split, Task, input_texts
from smelt.runtime.batch import Batch
from smelt.runtime.causal import is_causal
from smelt.runtime.images.image_batch import ImageBatch
from smelt.runtime.images.image_inputs import split_images, stack_image_inputs
from smelt.runtime.models.checkpoint import load_tokenizer
from smelt.runtime.predict_texts import encode_texts, pad_batch
from smelt.runtime.text.length_limits import max_input_length
from smelt.runtime.text.tokenizer import EncodedTexts

PARITY_ROWS, PARITY_LENGTH, PARITY_STEPS = 8, 48, 8
# samples of the data to choose from
_MAX_CANDIDATES = 256
# with a position bias that needs long rows; fewer are sufficient there
_MIN_LENGTHS = 3


def parity_samples(
    parent: Any,
    folder: Path,
    data: Mapping[str, Split],
    task: Task,
    rows: int = PARITY_ROWS,
    length: int = PARITY_LENGTH,
) -> tuple[Batch | ImageBatch, bool]:
    """Return texts for the model of the runner `parent`, and whether they are real; see `parity_batch`.

    For an image model the samples are images.

    Args:
        parent: its config describes the inputs.
        folder: of its tokenizer.
        data: train, validation, calibration, as far as they exist.
        task: of the recipe.
        rows: number of samples.
        length: tokens of the longest.
    """
    if task == IMAGE_CLASSIFICATION:
        return _image_samples(parent, data, rows)
    tokenizer = load_tokenizer(folder)
    limit = max_input_length(tokenizer, parent.config)
    if is_causal(parent.config):
        return causal_batch(data, tokenizer, parent.config, limit, rows, length)
    return parity_batch(data, tokenizer, parent.config, limit, task, rows, length)


def _image_samples(parent: Any, data: Mapping[str, Split], rows: int) -> tuple[ImageBatch, bool]:
    """Return images spread over the data; without any, random pixels in a processor's range."""
    split = _select_split(data)
    if split is None:
        height, width = parent.processor.shape or (224, 224)
        drawn = np.random.default_rng(0).normal(size=(rows, 3, height, width))
        return ImageBatch(drawn.astype(np.float32)), False
    few = split.select(np.linspace(0, len(split) - 1, min(rows, len(split))).astype(int).tolist())
    return ImageBatch(stack_image_inputs(split_images(few, parent.processor))), True


def parity_batch(
    data: Mapping[str, Split],
    tokenizer: Any,
    config: Mapping[str, Any],
    limit: int,
    task: Task = "text-classification",
    rows: int = PARITY_ROWS,
    length: int = PARITY_LENGTH,
) -> tuple[Batch, bool]:
    """Return samples of the data, padded on the right, and whether they are real.

    They are chosen by length, from the shortest to the longest; rows of one length are truncated to different
    ones. If positions are relative (T5) the longest row joins several texts, so that all distances occur.
    Token types, if there are any, change within each row. Without data that a stage may use, token ids are
    spread over the vocabulary.

    Args:
        data: train, validation, calibration, as far as they exist.
        tokenizer: of transformers.
        config: the model's, config.json.
        limit: maximum number of tokens of a row.
        task: decides whether the texts of a pair are encoded together.
        rows: number of samples.
        length: maximum length, except of a row for all distances.
    """
    reach = int(config.get("relative_attention_max_distance") or 0)
    encoded = _encode_split(data, tokenizer, min(length, limit), task)
    real = encoded is not None and max(map(len, encoded.ids)) > 1
    if encoded is None or not real:
        ids = np.linspace(0, int(config["vocab_size"]) - 1, rows * 12).astype(np.int64).reshape(rows, 12)
        encoded = EncodedTexts(ids[:, : max(2, min(12, limit))].tolist(), None, 0)
    encoded = _vary_lengths(_select_rows(encoded, _MIN_LENGTHS if reach and rows == PARITY_ROWS else rows))
    if reach:
        encoded.ids[-1] = _fill_to_length(min(limit, reach + PARITY_STEPS), encoded.ids)
    pad = tokenizer.pad_token_id
    batch = pad_batch(encoded, range(len(encoded.ids)), 0 if pad is None else pad)
    if task == SENTENCE_SIMILARITY:  # its texts are encoded separately
        return Batch(batch.input_ids, batch.attention_mask), real
    return _with_token_types(batch, config), real


def _encode_split(data: Mapping[str, Split], tokenizer: Any, most: int, task: Task) -> EncodedTexts | None:
    split = _select_split(data)
    if split is None:
        return None
    texts, pairs = input_texts(split.examples[:_MAX_CANDIDATES], task)
    return encode_texts(texts, tokenizer, most, pairs)


def _select_split(data: Mapping[str, Split]) -> Split | None:
    found = (data[n] for n in ("calibration", "validation", "train") if n in data)
    return next((split for split in found if len(split)), None)


def _select_rows(encoded: EncodedTexts, rows: int) -> EncodedTexts:
    """Return `rows` rows, the shortest first, the longest last; if there are fewer, rows repeat."""
    order = sorted(range(len(encoded.ids)), key=lambda i: len(encoded.ids[i]))
    places = [order[at] for at in np.linspace(0, len(order) - 1, rows).round().astype(int)]
    types = None if encoded.types is None else [encoded.types[i] for i in places]
    return EncodedTexts([list(encoded.ids[i]) for i in places], types, 0)


def _vary_lengths(encoded: EncodedTexts) -> EncodedTexts:
    """Truncate rows of similar length to different ones; the last token, which ends a text, is kept."""
    lengths = [len(ids) for ids in encoded.ids]
    if 4 * min(lengths) <= 3 * max(lengths):
        return encoded
    rows = len(lengths)
    keep = [max(1, length * (at + 1) // rows) for at, length in enumerate(lengths)]
    types = encoded.types
    return EncodedTexts(
        [_truncate(ids, n) for ids, n in zip(encoded.ids, keep, strict=True)],
        None if types is None else [_truncate(row, n) for row, n in zip(types, keep, strict=True)],
        0,
    )


def _truncate(row: Sequence[int], length: int) -> list[int]:
    return [*row[: length - 1], row[-1]]


def _fill_to_length(length: int, rows: list[list[int]]) -> list[int]:
    """Return a row of `length` tokens from those of `rows`."""
    tokens = [token for row in reversed(rows) for token in row[:-1]] or rows[-1]
    return [*np.resize(tokens, max(1, length - 1)).tolist(), rows[-1][-1]]


def _with_token_types(batch: Batch, config: Mapping[str, Any]) -> Batch:
    """Make the second half of each row another segment, if the model has token types."""
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
    rows: int = PARITY_ROWS,
    length: int = PARITY_LENGTH,
) -> tuple[Batch, bool]:
    """Return prompts of different lengths, padded on the left, and whether they come from the data.

    The last one is the longest and has no padding. Arguments are those of `parity_batch`.
    """
    from smelt.runtime.generate.prompt_batches import pad_left, padding_token
    from smelt.runtime.text.text_windows import join_texts

    most = max(2, min(length, limit - PARITY_STEPS))
    split = _select_split(data)
    ids: list[int] = []
    if split is not None:
        text = join_texts(Split(split.origin, split.examples[: 50 * rows], split.windows))
        ids = tokenizer(text[: 20 * rows * most], verbose=False)["input_ids"]
    real = len(ids) >= 2 * rows
    if not real:
        ids = np.linspace(0, int(config["vocab_size"]) - 1, rows * most).astype(np.int64).tolist()
    size = min(most, len(ids) // rows)
    prompts = [ids[at * size : (at + 1) * size][: max(1, size * (at + 1) // rows)] for at in range(rows)]
    return pad_left(prompts, padding_token(tokenizer)), real
