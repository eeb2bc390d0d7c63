"""Predictions of masked tokens, for every runner of a masked language model.

Shapes: B = batch, L = tokens, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_softmax, softmax

from smelt.core.errors import InputError
from smelt.core.messages import with_count
from smelt.core.process_group import map_batches, merge_shares, own_batches, process_count
from smelt.generation.backend import Batch, check_finite_outputs
from smelt.generation.prompt_batches import OnTruncate
from smelt.generation.runner import Runner
from smelt.models.masked_windows import MaskedWindow
from smelt.models.tokenizer import EncodedTexts, encode_texts
from smelt.runtimes.predict_texts import length_sorted_batches
from smelt.stage import Progress, no_progress

TOP_K = 5  # as in the fill-mask pipeline of transformers
_LOGITS_BYTES = 2**29  # of the logits of one call, float32 [B, L, V]


class MaskPrediction(NamedTuple):
    """A token for a mask, as in the fill-mask pipeline of transformers.

    score: its probability, 0 to 1. token: its id. token_str: its text. sequence: the text with the token in
    place of the mask, without special tokens; with them if there are other masks.
    """

    score: float
    token: int
    token_str: str
    sequence: str


MaskPredictions: TypeAlias = list[list[MaskPrediction]]
"""For each mask of a text, in order, the likeliest tokens, the first first."""


def require_mask_tokens(runner: Runner, texts: Sequence[str]) -> None:
    """Require that each of `texts` has a mask token, and all of its mask tokens within the model's limit.

    Raises:
        InputError: `missing-mask-token`, `truncated-mask-token`.
    """
    tokenizer, limit = runner.text.tokenizer, runner.text.max_input_length
    mask_id = tokenizer.mask_token_id
    plain, truncated = tokenizer.encode_plain(texts), encode_texts(texts, tokenizer, limit).ids
    for number, (ids, kept_ids) in enumerate(zip(plain, truncated, strict=True), 1):
        count, num_kept = ids.count(mask_id or 0), kept_ids.count(mask_id or 0)
        if mask_id is None or not count:
            mask = tokenizer.decode_batch([[mask_id or 0]], keep_special=True)[0]
            raise InputError(
                f"text {number}: no mask token; write {mask} in place of the token to predict.",
                code="missing-mask-token",
            )
        if num_kept < count:
            raise InputError(
                f"text {number}: {count - num_kept} of {with_count(count, 'mask token')} would be truncated:"
                f" the model's limit is {limit:,} tokens. Shorten the text.",
                code="truncated-mask-token",
            )


def fill_masks(
    runner: Runner,
    texts: Sequence[str],
    batch_size: int = 32,
    top_k: int = TOP_K,
    on_truncate: OnTruncate | None = None,
) -> list[MaskPredictions]:
    """Return the `top_k` likeliest tokens for each mask of each of `texts`, in order.

    Args:
        runner: of a masked language model.
        texts: with mask tokens; one without any has no predictions.
        batch_size: texts per batch.
        top_k: tokens per mask.
        on_truncate: called with the number of texts that were longer than the model's limit, and that limit.

    Raises:
        RunError: `non-finite-outputs`.
    """
    tools = runner.text
    encoded = encode_texts(texts, tools.tokenizer, tools.max_input_length)
    if encoded.truncated and on_truncate is not None:
        on_truncate(encoded.truncated, tools.max_input_length)

    def predict(_: int, item: tuple[list[int], Batch]) -> dict[int, MaskPredictions]:
        indices, batch = item
        is_mask = (batch.input_ids == tools.tokenizer.mask_token_id) & (batch.attention_mask == 1)
        return {
            i: _text_predictions(runner, encoded.ids[i], mask_row.nonzero()[0], row, top_k)
            for rows, logits in _forward_pieces(runner, batch)
            for i, mask_row, row in zip(indices[rows], is_mask[rows], logits, strict=True)
        }

    results: dict[int, MaskPredictions] = {}
    batches = length_sorted_batches(encoded, batch_size, tools.tokenizer.pad_token_id or 0)
    for _, predictions in map_batches(predict, batches, runner.workers):
        results.update(predictions)
    return merge_shares(results)


def _text_predictions(
    runner: Runner, ids: Sequence[int], masked: NDArray[np.int64], logits: NDArray[np.float32], top_k: int
) -> MaskPredictions:
    """Return the predictions for the positions `masked` of one text; logits: float32 [L, V]."""
    if not len(masked):
        return []
    probabilities = softmax(check_finite_outputs(logits[masked]).astype(np.float64), axis=1)
    best = np.argsort(-probabilities, axis=1, kind="stable")[:, :top_k]
    tokenizer = runner.text.tokenizer
    filled = [
        [*ids[:position], int(token), *ids[position + 1 :]]
        for position, tokens in zip(masked.tolist(), best, strict=True)
        for token in tokens
    ]
    sequences = iter(tokenizer.decode_batch(filled, keep_special=len(masked) > 1))
    token_texts = iter(tokenizer.decode_batch([[int(token)] for token in best.flat], keep_special=True))
    return [
        [
            MaskPrediction(float(row[token]), int(token), next(token_texts), next(sequences))
            for token in tokens
        ]
        for row, tokens in zip(probabilities, best, strict=True)
    ]


class MaskedTokenScores(NamedTuple):
    """Of each window: the summed loss of its masked tokens, nats, their number, and how many are right."""

    losses: list[float]
    tokens: list[int]
    correct: list[int]


def score_masked_tokens(
    runner: Runner,
    windows: Sequence[MaskedWindow],
    batch_size: int = 32,
    progress: Progress = no_progress,
) -> MaskedTokenScores:
    """Return the losses of the masked tokens of `windows`, and how often the likeliest token is right.

    Raises:
        RunError: `non-finite-outputs`.
    """
    encoded = EncodedTexts([window.input_ids for window in windows], None, 0)
    results: dict[int, tuple[float, int, int]] = {}
    batches = length_sorted_batches(encoded, batch_size, runner.text.tokenizer.pad_token_id or 0)
    for _, (indices, batch) in own_batches(batches):
        for rows, logits in _forward_pieces(runner, batch):
            for i, row in zip(indices[rows], logits, strict=True):
                results[i] = _window_scores(row, np.asarray(windows[i].labels))
        progress(min(len(windows), len(results) * process_count()), len(windows), "windows")
    losses, tokens, correct = zip(*merge_shares(results), strict=True)
    return MaskedTokenScores(list(losses), list(tokens), list(correct))


def _window_scores(logits: NDArray[np.float32], labels: NDArray[np.int64]) -> tuple[float, int, int]:
    masked = (labels >= 0).nonzero()[0]
    if not len(masked):
        return 0.0, 0, 0
    scores, gold = check_finite_outputs(logits[masked]), labels[masked]
    losses = -log_softmax(scores.astype(np.float64), axis=1)[np.arange(len(gold)), gold]
    return float(losses.sum()), len(gold), int((scores.argmax(axis=1) == gold).sum())


def _forward_pieces(runner: Runner, batch: Batch) -> Iterator[tuple[slice, NDArray[np.float32]]]:
    """Yield the logits of rows of a batch, float32 [rows, L, V], so that those of a call fit into memory.

    How it is divided depends on the shapes only, so that every step of a run is scored in the same way.
    """
    count, length = batch.input_ids.shape
    step = max(1, _LOGITS_BYTES // (4 * length * int(runner.config["vocab_size"])))
    for start in range(0, count, step):
        rows = slice(start, start + step)
        types = None if batch.token_type_ids is None else batch.token_type_ids[rows]
        yield rows, runner.forward(Batch(batch.input_ids[rows], batch.attention_mask[rows], types))
