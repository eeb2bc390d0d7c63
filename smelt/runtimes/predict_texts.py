"""From texts to predictions, for every runner: tokenize, batch, run, decode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.core.errors import InputError
from smelt.core.process_group import gather_parts, map_batches, merge_shares, own_batches, process_count
from smelt.data.splits import Example
from smelt.generation.backend import Batch, check_finite_outputs
from smelt.generation.config import GenerationConfig, GenerationSettings
from smelt.generation.generating_runners import is_causal, nll_from_logits
from smelt.generation.prompt_batches import (
    OnTruncate,
    batch_prompts,
    continue_texts,
    padding_token,
    truncated_prompts,
)
from smelt.generation.runner import Runner, TextTools
from smelt.generation.search import forced_logits, generate_n_best
from smelt.models.families.registry import reads_audio, reads_images
from smelt.models.tokenizer import (
    EncodedTexts,
    as_text_tokenizer,
    encode_texts,
)
from smelt.runtimes.audio import (
    AudioInput,
    SpeechFeatures,
    file_windows,
    join_windows,
    window_batches,
)
from smelt.runtimes.images import image_logits
from smelt.stage import Progress, no_progress


def pad_batch(encoded: EncodedTexts, indices: Sequence[int], pad: int) -> Batch:
    """Pad the given rows on the right into one batch."""
    length = max(1, *(len(encoded.ids[i]) for i in indices)) if indices else 1
    ids = np.full((len(indices), length), pad, dtype=np.int64)
    mask = np.zeros_like(ids)
    types = None if encoded.types is None else np.zeros_like(ids)
    for row_number, i in enumerate(indices):
        n = len(encoded.ids[i])
        ids[row_number, :n], mask[row_number, :n] = encoded.ids[i], 1
        if types is not None and encoded.types is not None:
            types[row_number, :n] = encoded.types[i]
    return Batch(ids, mask, types)


def make_batches(
    texts: Sequence[str],
    tokenizer: Any,
    batch_size: int,
    max_length: int,
    pairs: Sequence[str | None] | None = None,
) -> list[tuple[list[int], Batch]]:
    """Return batches of similar indices, longest first, each with the indices of its rows in `texts`.

    The batches depend on texts, tokenizer and `batch_size` only, so that every step of a run is
    scored on the same batches (dynamic quantization depends on the other rows of a batch).
    """
    text_tokenizer = as_text_tokenizer(tokenizer)
    return length_sorted_batches(
        encode_texts(texts, text_tokenizer, max_length, pairs), batch_size, text_tokenizer.pad_token_id or 0
    )


def length_sorted_batches(encoded: EncodedTexts, batch_size: int, pad: int) -> list[tuple[list[int], Batch]]:
    """Return batches of rows of similar lengths, longest first, each with the indices of its rows."""
    order = sorted(range(len(encoded.ids)), key=lambda i: (-len(encoded.ids[i]), i))
    groups = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    return [(indices, pad_batch(encoded, indices, pad)) for indices in groups]


def generate_texts(
    runner: Runner,
    texts: Sequence[str],
    generation: GenerationSettings,
    batch_size: int = 32,
    progress: Progress = no_progress,
    on_length_limit: Callable[[int, int], None] | None = None,
    on_truncate: OnTruncate | None = None,
) -> list[str]:
    """Generate texts from `texts`, in order; a language model continues them, or answers them as prompts.

    on_length_limit: called with the number of outputs that reached the length limit, and that limit in
    tokens. on_truncate: called with the number of texts that were longer than the model's limit, and that
    limit.
    """
    if is_causal(runner.config):
        return continue_texts(runner, texts, generation, batch_size, progress, on_truncate, on_length_limit)
    if "decoder_start_token_id" not in {**runner.config, **runner.generation_config}:
        raise InputError(
            f"{runner.folder}: this model cannot generate text. Use a model that generates text.",
            code="does-not-generate",
        )
    tools = runner.text
    tokenizer, decoding = tools.tokenizer, tools.resolved_generation(generation, runner)
    results: dict[int, str] = {}
    num_limited = 0
    windows: list[AudioInput] | None = None
    if reads_audio(runner.config):
        features = SpeechFeatures(runner.config)
        windows = file_windows(texts, features)
        batches = window_batches(windows, features, batch_size)
    else:
        batches = _batches(tools, texts, batch_size, None, on_truncate)
    for (indices, _), tokens in map_batches(
        lambda number, item: runner.generator(runner, item[1], decoding, number), batches, runner.workers
    ):
        num_limited += sum(decoding.hit_length_limit(row) for row in tokens)
        results.update(zip(indices, tokenizer.decode_batch(tokens), strict=True))
        progress(min(len(texts), len(results) * process_count()), len(texts), "sentences")
    if on_length_limit is not None:
        on_length_limit(sum(gather_parts(num_limited)), decoding.max_new_after_start)
    generated = merge_shares(results)
    return generated if windows is None else join_windows(generated, windows)


def generation_batches(
    runner: Runner, texts: Sequence[str], decoding: GenerationConfig, batch_size: int
) -> Sequence[tuple[list[int], Batch]]:
    """Return the batches of `texts` that a model generates from, each with the indices of its rows."""
    tools = runner.text
    if reads_audio(runner.config):
        features = SpeechFeatures(runner.config)
        return window_batches(file_windows(texts, features, first_only=True), features, batch_size)
    if not is_causal(runner.config):
        return _batches(tools, texts, batch_size, None, None)
    prompts, _ = truncated_prompts(runner, texts, decoding)
    return batch_prompts(prompts, batch_size, padding_token(tools.tokenizer), decoding)


def target_nll(
    runner: Runner, texts: Sequence[str], targets: Sequence[Sequence[int]], batch_size: int = 32
) -> list[float]:
    """Return for each target the summed loss of its tokens after its source (teacher forcing), nats.

    Args:
        runner: of a model with an encoder and a decoder.
        texts: the sources.
        targets: token ids of each target, without the decoder's start token.
        batch_size: sources per batch.
    """
    tools, sums = runner.text, dict[int, float]()
    decoding = tools.resolved_generation(GenerationSettings(), runner)
    for _, (indices, batch) in own_batches(generation_batches(runner, texts, decoding, batch_size)):
        encoded = EncodedTexts([list(targets[i]) for i in indices], None, 0)
        tokens = pad_batch(encoded, range(len(indices)), 0)
        losses = np.zeros(tokens.input_ids.shape, dtype=np.float64)
        for position, logits in enumerate(forced_logits(runner, batch, decoding, tokens.input_ids)):
            next_tokens = tokens.input_ids[:, position, None]
            losses[:, position] = nll_from_logits(logits[:, None], next_tokens)[:, 0]
        sums.update(
            zip(indices, np.where(tokens.attention_mask, losses, 0).sum(axis=1).tolist(), strict=True)
        )
    return merge_shares(sums)


def generate_candidates(
    runner: Runner,
    texts: Sequence[str],
    generation: GenerationSettings,
    count: int,
    batch_size: int = 32,
    progress: Progress = no_progress,
) -> list[list[str]]:
    """Return the `count` best texts of a beam search for each of `texts`, best first, in order.

    Args:
        runner: of a generating model.
        texts: as in `generate_texts`.
        generation: with at least `count` beams.
        count: of texts; duplicates are kept.
        batch_size: texts per batch.
        progress: called for each batch.
    """
    tools = runner.text
    decoding = tools.resolved_generation(generation, runner)
    results: dict[int, list[str]] = {}
    for _, (indices, batch) in own_batches(generation_batches(runner, texts, decoding, batch_size)):
        for i, token_lists in zip(indices, generate_n_best(runner, batch, decoding, count), strict=True):
            results[i] = list(tools.tokenizer.decode_batch(token_lists))
        progress(min(len(texts), len(results) * process_count()), len(texts), "sentences")
    return merge_shares(results)


def embed_texts(
    runner: Runner,
    texts: Sequence[str],
    batch_size: int = 32,
    progress: Progress = no_progress,
    on_truncate: OnTruncate | None = None,
) -> NDArray[np.float32]:
    """Return the vectors of `texts`, float32 [n, D], in order; `on_truncate` as in `generate_texts`.

    Raises:
        RunError: `non-finite-outputs`.
    """
    return check_finite_outputs(_forward(runner, texts, None, batch_size, progress, on_truncate))


def class_logits(
    runner: Runner,
    examples: Sequence[Example],
    batch_size: int = 32,
    progress: Progress = no_progress,
    on_truncate: OnTruncate | None = None,
) -> NDArray[np.float32]:
    """Return float32 logits [n, C] for `examples`, in order; `on_truncate` as in `generate_texts`.

    For an image model the texts are references to images.

    Raises:
        RunError: `non-finite-outputs`: argmax of NaN would be class 0.
    """
    if reads_images(runner.config):
        names = [f"row {e.row}" if e.row else e.text for e in examples]
        return image_logits(runner, [e.text for e in examples], batch_size, progress, names)
    texts, second_texts = [e.text for e in examples], [e.text_pair for e in examples]
    return check_finite_outputs(_forward(runner, texts, second_texts, batch_size, progress, on_truncate))


def _forward(
    runner: Runner,
    texts: Sequence[str],
    pairs: Sequence[str | None] | None,
    batch_size: int,
    progress: Progress,
    on_truncate: OnTruncate | None,
) -> NDArray[np.float32]:
    """Return the outputs of `forward` for each text (and its pair), float32 [n, C or D]."""
    results: dict[int, NDArray[np.float32]] = {}
    batches = _batches(runner.text, texts, batch_size, pairs, on_truncate)
    for (indices, _), outputs in map_batches(
        lambda _, item: runner.forward(item[1]), batches, runner.workers
    ):
        results.update(zip(indices, outputs, strict=True))
        progress(min(len(texts), len(results) * process_count()), len(texts), "texts")
    if not texts:
        raise InputError("No texts were given.", code="empty-data")
    return np.stack(merge_shares(results)).astype(np.float32, copy=False)


def _batches(
    tools: TextTools,
    texts: Sequence[str],
    batch_size: int,
    pairs: Sequence[str | None] | None,
    on_truncate: OnTruncate | None,
) -> list[tuple[list[int], Batch]]:
    tokenizer, limit = tools.tokenizer, tools.max_input_length
    encoded = encode_texts(texts, tokenizer, limit, pairs)
    if encoded.truncated and on_truncate is not None:
        on_truncate(encoded.truncated, limit)
    return length_sorted_batches(encoded, batch_size, tokenizer.pad_token_id or 0)
