"""Samples for parity checks: real ones, and small inputs for any exported graph.

Tokens differ, and rows have clearly different lengths and are padded as runners pad them: with rows of one
length, a graph without its mask would pass.

Shapes: B = batch, L = tokens of the longest row, P = past length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.data.splits import Split, input_texts
from smelt.data.tasks import Modality, Task, task_traits
from smelt.generation.backend import AudioBatch, Batch, FeedBatch
from smelt.generation.generating_runners import is_causal
from smelt.generation.prompt_batches import pad_left, padding_token
from smelt.models.checkpoint import load_tokenizer
from smelt.models.text_rules import NO_LIMIT, join_texts, max_input_length
from smelt.models.tokenizer import EncodedTexts, encode_prompts, encode_texts
from smelt.runtimes.audio import SpeechFeatures, audio_batch, split_audio
from smelt.runtimes.fixed_caches import WRITE_INDICES, cache_feeds, fixed_cache_length
from smelt.runtimes.image_text import ImageTextBatch, pad_token_ids
from smelt.runtimes.images import ImageBatch, split_images, stack_image_inputs
from smelt.runtimes.predict_texts import pad_batch
from smelt.runtimes.single_call_runners import ArrayBatch
from smelt.tasks.image_text import captions

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
) -> tuple[Batch | FeedBatch, bool]:
    """Return texts for the model of the runner `parent`, and whether they are real; see `parity_batch`.

    For an image model the samples are images, for a module of arrays these.

    Args:
        parent: its config describes the inputs.
        folder: of its tokenizer.
        data: train, validation, calibration, as far as they exist.
        task: of the recipe.
        rows: number of samples.
        length: tokens of the longest.
    """
    samples_of: dict[Modality, Callable[[Any, Mapping[str, Split], int], tuple[Batch | FeedBatch, bool]]] = {
        "image": _image_samples,
        "image-and-text": _image_text_samples,
        "arrays": _array_samples,
        "audio": _audio_samples,
    }
    if (modality := task_traits(task).modality) in samples_of:
        return samples_of[modality](parent, data, rows)
    tokenizer = load_tokenizer(folder)
    limit = min(max_input_length(tokenizer, parent.config), parent.backend.max_tokens_per_call or NO_LIMIT)
    if is_causal(parent.config):
        if task_traits(task).samples == "prompts" and (split := _select_split(data)) is not None:
            return _prompt_batch(split, tokenizer, limit, rows, length), True
        return causal_batch(data, tokenizer, parent.config, limit, rows, length)
    return parity_batch(data, tokenizer, parent.config, limit, task, rows, length)


def _image_samples(parent: Any, data: Mapping[str, Split], rows: int) -> tuple[ImageBatch, bool]:
    """Return images spread over the data; without any, random pixels in a processor's range."""
    split = _select_split(data)
    if split is None:
        height, width = parent.processor.shape or (224, 224)
        random_values = np.random.default_rng(0).normal(size=(rows, 3, height, width))
        return ImageBatch(random_values.astype(np.float32)), False
    subset = split.select(np.linspace(0, len(split) - 1, min(rows, len(split))).astype(int).tolist())
    return ImageBatch(stack_image_inputs(split_images(subset, parent.processor))), True


def _image_text_samples(parent: Any, data: Mapping[str, Split], rows: int) -> tuple[ImageTextBatch, bool]:
    """Return images with their captions; without any, random pixels and token ids up to an end."""
    images, is_real = _image_samples(parent, data, rows)
    count, tools, split = len(images.pixel_values), parent.text, _select_split(data)
    if split is None:
        ids = np.linspace(0, len(tools.tokenizer) - 1, count * 4).astype(np.int64).reshape(count, 4).tolist()
    else:
        subset = split.select(np.linspace(0, len(split) - 1, count).astype(int).tolist())
        ids = encode_texts(captions(subset), tools.tokenizer, tools.max_input_length).ids
    return ImageTextBatch(images.pixel_values, pad_token_ids(ids, parent.config, tools.tokenizer)), is_real


def _audio_samples(parent: Any, data: Mapping[str, Split], rows: int) -> tuple[AudioBatch, bool]:
    """Return audio spread over the data; without any, noise."""
    features, split = SpeechFeatures(parent.config), _select_split(data)
    if split is None:
        noise = np.random.default_rng(0).normal(0, 0.1, size=(rows, features.window_samples))
        ids = np.zeros((rows, features.states), dtype=np.int64)
        return AudioBatch(ids, np.ones_like(ids), load=lambda: features([*noise.astype(np.float32)])), False
    subset = split.select(np.linspace(0, len(split) - 1, min(rows, len(split))).astype(int).tolist())
    return audio_batch(split_audio(subset), features), True


def _array_samples(parent: Any, data: Mapping[str, Split], rows: int) -> tuple[ArrayBatch, bool]:
    """Return arrays spread over the data; without any, those of `example_inputs`."""
    split = _select_split(data)
    if split is None or split.arrays is None:
        examples = parent.backend.model.example_inputs(rows)
        return ArrayBatch({name: value.numpy() for name, value in examples.items()}), False
    subset = split.select(np.linspace(0, len(split) - 1, min(rows, len(split))).astype(int).tolist())
    assert subset.arrays is not None
    return ArrayBatch(parent.signature.make_feeds(subset.arrays, 0, len(subset))), True


def parity_batch(
    data: Mapping[str, Split],
    tokenizer: Any,
    config: Mapping[str, Any],
    limit: int,
    task: Task,
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
    max_distance = int(config.get("relative_attention_max_distance") or 0)
    encoded = _encode_split(data, tokenizer, min(length, limit), task)
    is_real = encoded is not None and max(map(len, encoded.ids)) > 1
    if encoded is None or not is_real:
        ids = np.linspace(0, int(config["vocab_size"]) - 1, rows * 12).astype(np.int64).reshape(rows, 12)
        encoded = EncodedTexts(ids[:, : max(2, min(12, limit))].tolist(), None, 0)
    encoded = _vary_lengths(
        _select_rows(encoded, _MIN_LENGTHS if max_distance and rows == PARITY_ROWS else rows)
    )
    if max_distance:
        encoded.ids[-1] = _fill_to_length(min(limit, max_distance + PARITY_STEPS), encoded.ids)
    pad = tokenizer.pad_token_id
    batch = pad_batch(encoded, range(len(encoded.ids)), 0 if pad is None else pad)
    if task_traits(task).output == "embedding":  # its texts are encoded separately
        return Batch(batch.input_ids, batch.attention_mask), is_real
    return _with_token_types(batch, config), is_real


def _encode_split(data: Mapping[str, Split], tokenizer: Any, most: int, task: Task) -> EncodedTexts | None:
    split = _select_split(data)
    if split is None:
        return None
    texts, pairs = input_texts(split.examples[:_MAX_CANDIDATES], task)
    return encode_texts(texts, tokenizer, most, pairs)


def _select_split(data: Mapping[str, Split]) -> Split | None:
    splits = (data[n] for n in ("calibration", "validation", "train") if n in data)
    return next((split for split in splits if len(split)), None)


def _select_rows(encoded: EncodedTexts, rows: int) -> EncodedTexts:
    """Return `rows` rows, the shortest first, the longest last; if there are fewer, rows repeat."""
    order = sorted(range(len(encoded.ids)), key=lambda i: len(encoded.ids[i]))
    indices = [order[position] for position in np.linspace(0, len(order) - 1, rows).round().astype(int)]
    types = None if encoded.types is None else [encoded.types[i] for i in indices]
    return EncodedTexts([list(encoded.ids[i]) for i in indices], types, 0)


def _vary_lengths(encoded: EncodedTexts) -> EncodedTexts:
    """Truncate rows of similar length to different ones; the last token, which ends a text, is kept."""
    lengths = [len(ids) for ids in encoded.ids]
    if 4 * min(lengths) <= 3 * max(lengths):
        return encoded
    num_rows = len(lengths)
    keep = [max(1, length * (row_index + 1) // num_rows) for row_index, length in enumerate(lengths)]
    types = encoded.types
    return EncodedTexts(
        [_truncate(ids, n) for ids, n in zip(encoded.ids, keep, strict=True)],
        None if types is None else [_truncate(row, n) for row, n in zip(types, keep, strict=True)],
        0,
    )


def _truncate(row: Sequence[int], length: int) -> list[int]:
    return [*row[: length - 1], row[-1]]


def _fill_to_length(length: int, token_rows: list[list[int]]) -> list[int]:
    """Return a row of `length` tokens from those of `token_rows`."""
    tokens = [token for row in reversed(token_rows) for token in row[:-1]] or token_rows[-1]
    return [*np.resize(tokens, max(1, length - 1)).tolist(), token_rows[-1][-1]]


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
    max_tokens = max(2, min(length, limit - PARITY_STEPS))
    split = _select_split(data)
    ids: list[int] = []
    if split is not None:
        text = join_texts(Split(split.origin, split.examples[: 50 * rows], split.windows))
        ids = tokenizer(text[: 20 * rows * max_tokens], verbose=False)["input_ids"]
    is_real = len(ids) >= 2 * rows
    if not is_real:
        ids = np.linspace(0, int(config["vocab_size"]) - 1, rows * max_tokens).astype(np.int64).tolist()
    size = min(max_tokens, len(ids) // rows)
    prompts = [
        ids[row_index * size : (row_index + 1) * size][: max(1, size * (row_index + 1) // rows)]
        for row_index in range(rows)
    ]
    return pad_left(prompts, padding_token(tokenizer)), is_real


def _prompt_batch(split: Split, tokenizer: Any, limit: int, rows: int, length: int) -> Batch:
    """Return rendered prompts from the shortest to the longest, truncated on the left and padded there.

    Prompts of similar length are truncated to different ones, so that all rows but the last are padded.
    """
    max_tokens = max(2, min(length, limit - PARITY_STEPS))
    prompts = encode_prompts([e.text for e in split.examples[:_MAX_CANDIDATES]], tokenizer, max_tokens)
    selected = _select_rows(EncodedTexts(prompts, None, 0), rows).ids
    if 4 * min(map(len, selected)) > 3 * max(map(len, selected)):
        selected = [
            ids[-max(1, len(ids) * (row_index + 1) // rows) :] for row_index, ids in enumerate(selected)
        ]
    return pad_left(selected, padding_token(tokenizer))


EXAMPLE_LENGTHS = (12, 8, 5)  # of the rows
OTHER_EXAMPLE_LENGTHS = (
    9,
    6,
)  # of another batch: a fixed number of rows or tokens fits at most one of the two
_PAST_LENGTH = 7  # tokens in the cache of a decoder
_NUMPY_DTYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
# Of arrays, as ONNX Runtime names their types.
INTEGER_DTYPES: dict[str, Any] = {
    "tensor(bool)": np.bool_,
    **{f"tensor({name})": np.dtype(name) for name in ("uint8", "int8", "int16", "int32", "int64")},
}

Feeds = dict[str, NDArray[Any]]


def example_feeds(
    session: Any, tokens: NDArray[np.int64] | None, lengths: Sequence[int] = EXAMPLE_LENGTHS
) -> list[Feeds]:
    """Return inputs for calls of `session`.

    A language model gets a padded prompt, once with all logits and once with those of the last token, and one
    token with a cache; other graphs get one batch.

    Args:
        session: of ONNX Runtime.
        tokens: int64 [n], n >= 1, real tokens of the model's vocabulary to choose from; None for a graph of
            images or arrays, which are random, integers 0.
        lengths: of the rows, in tokens; the number of images is the same.
    """
    shapes = {i.name: i.shape for i in session.get_inputs()}
    if tokens is None or "input_ids" not in shapes:
        return [_feeds(session, {}, {"batch": len(lengths)})]
    names = shapes.keys()
    if "position_ids" not in names and "encoder_attention_mask" not in names:
        lengths = _fixed_lengths(shapes["input_ids"], lengths)
    length, num_rows = max(lengths), len(lengths)
    ids = np.resize(tokens, (num_rows, length)).astype(np.int64)
    mask = (np.arange(length) < np.array(lengths)[:, None]).astype(np.int64)
    if isinstance(fixed_length := shapes["input_ids"][1], int) and fixed_length > length:
        ids, mask = (np.pad(array, ((0, 0), (0, fixed_length - length))) for array in (ids, mask))
        length = fixed_length
    values: Feeds = {"input_ids": ids, "attention_mask": mask, "encoder_attention_mask": mask}
    # the second half of a row is another text
    values["token_type_ids"] = (np.arange(length) * 2 >= np.array(lengths)[:, None]).astype(np.int64) * mask
    values["num_logits_to_keep"] = np.array(0, dtype=np.int64)
    sizes = {"batch": num_rows, "length": length, "encoder_length": length, "past_length": _PAST_LENGTH}
    if "encoder_attention_mask" in names:
        values["input_ids"] = ids[:, :1]
    if "position_ids" not in names:
        return [_feeds(session, values, sizes)]
    values["attention_mask"] = mask = mask[:, ::-1].copy()
    values["position_ids"] = positions = np.where(mask == 0, 0, mask.cumsum(axis=1) - 1)
    fixed_cache = fixed_cache_length(shapes)
    prompt = _feeds(session, {**cache_feeds(values, fixed_cache)}, sizes | {"past_sequence_length": 0})
    last = {name: value[:, -1:] for name, value in (("input_ids", ids), ("position_ids", positions))}
    step_values = {**cache_feeds(values | last, fixed_cache)}
    step = _feeds(session, step_values, sizes | {"past_sequence_length": length - 1})
    if "num_logits_to_keep" not in names:
        return [prompt, step]
    return [prompt, prompt | {"num_logits_to_keep": np.array(1, dtype=np.int64)}, step]


def _fixed_lengths(shape: Sequence[int | str], lengths: Sequence[int]) -> list[int]:
    """Return the lengths of as many rows as a graph takes, none longer than it takes."""
    rows, longest = (size if isinstance(size, int) else None for size in shape)
    return [min(n, longest or n) for n in np.resize(lengths, rows or len(lengths)).tolist()]


def without_padding(name: str, output: NDArray[Any], feeds: Feeds) -> NDArray[Any]:
    """Return the part of an output that belongs to text.

    The outputs of a language model at padding are meaningless: all keys are masked there, so that only
    rounding decides the attention; so are those of an encoder's tokens in a padded local window.
    """
    if "position_ids" not in feeds:
        mask = feeds.get("attention_mask")
        if name != "logits" or mask is None or output.ndim != 3 or output.shape[:2] != mask.shape:
            return output
        token_logits: NDArray[Any] = output[mask == 1]
        return token_logits
    text = feeds["attention_mask"] == 1
    if name == "logits":
        end = text.shape[1]
        if WRITE_INDICES in feeds:  # the mask also has columns of positions after these tokens
            end = int(feeds[WRITE_INDICES][0]) + feeds["input_ids"].shape[1]
        real_values: NDArray[Any] = output[text[:, end - output.shape[1] : end]]
        return real_values
    caches: NDArray[Any] = np.moveaxis(output, 1, 2)[text]  # [B, K, T, d]
    return caches


def _feeds(session: Any, values: Feeds, sizes: dict[str, int]) -> Feeds:
    """Return the `values` that are inputs of the session, and random caches."""
    generator = np.random.default_rng(0)
    feeds: Feeds = {}
    for item in session.get_inputs():
        kind = _NUMPY_DTYPES.get(item.type)
        if kind is None and item.name not in values:
            shape = [size if isinstance(size, int) else sizes[size] for size in item.shape]
            feeds[item.name] = np.zeros(shape, INTEGER_DTYPES[item.type])
        elif kind is None:
            feeds[item.name] = np.asarray(values[item.name], order="C")
        else:
            shape = [size if isinstance(size, int) else sizes[size] for size in item.shape]
            feeds[item.name] = generator.normal(size=shape).astype(kind)
    return feeds
