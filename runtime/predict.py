"""From texts to predictions, the same for every runner: tokenize, batch, run, decode."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.core.data import Example
from smelt.core.errors import InputError
from smelt.core.stage import Progress, silent
from smelt.runtime.causal import is_causal
from smelt.runtime.checkpoint import load_tokenizer
from smelt.runtime.decoding import settle
from smelt.runtime.generation import Generation, generate
from smelt.runtime.prompts import continue_texts
from smelt.runtime.runner import Batch, Runner
from smelt.runtime.text_rules import prefix_of


@dataclass(frozen=True)
class Encoded:
    """Token ids per text, type ids where the model has them, and how many texts were cut."""

    ids: list[list[int]]
    types: list[list[int]] | None
    truncated: int


def length_limit(tokenizer: Any, config: dict[str, Any]) -> int:
    """Return the most tokens that tokenizer and position table both allow."""
    return int(min(tokenizer.model_max_length, position_limit(config) or 10**9))


def position_limit(config: Mapping[str, Any]) -> int | None:
    """Return how many tokens the position table has room for; None where the model has none."""
    positions = config.get("max_position_embeddings") or config.get("n_positions")  # GPT-2's word
    return None if not positions else int(positions) - position_offset(config)


def position_offset(config: Mapping[str, Any]) -> int:
    """Return how many rows of the position table no token uses: RoBERTa counts from its pad id + 1.

    See `RobertaEmbeddings.create_position_ids_from_input_ids` in transformers; roberta-base has 514
    rows for 512 tokens.
    """
    return int(config.get("pad_token_id") or 0) + 1 if config.get("model_type") == "roberta" else 0


def takes_types(config: Mapping[str, Any]) -> bool:
    """Say whether a classifier tells the two texts of a pair apart by token types, as BERT does."""
    return config.get("model_type") not in ("distilbert", "roberta")


def encode_texts(
    texts: Sequence[str], tokenizer: Any, max_length: int, pairs: Sequence[str | None] | None = None
) -> Encoded:
    """Tokenize `texts`, each behind the model's prefix, cutting at `max_length` tokens.

    Args:
        texts: n texts.
        tokenizer: of transformers.
        max_length: the most tokens of a row; of a pair the longer text is cut first.
        pairs: each text's second text, or None where it has none.
    """
    prefix = prefix_of(tokenizer)
    texts = [prefix + text for text in texts] if prefix else list(texts)
    seconds = {i: p for i, p in enumerate(pairs or ()) if p is not None}
    if seconds and len(seconds) < len(texts):
        return _encode_mixed(texts, tokenizer, max_length, seconds)
    return _encode(texts, tokenizer, max_length, list(seconds.values()) or None)


def _encode(texts: list[str], tokenizer: Any, max_length: int, pairs: list[str] | None) -> Encoded:
    both = [texts] if pairs is None else [texts, pairs]
    full = tokenizer(*both, truncation=False, verbose=False)
    truncated = sum(len(ids) > max_length for ids in full["input_ids"])
    if truncated:
        full = tokenizer(*both, truncation=True, max_length=max_length, verbose=False)
    return Encoded(full["input_ids"], full.get("token_type_ids"), truncated)


def _encode_mixed(texts: list[str], tokenizer: Any, max_length: int, seconds: Mapping[int, str]) -> Encoded:
    """Tokenize texts of which only some have a second one: an empty one would add a separator."""
    alone = [i for i in range(len(texts)) if i not in seconds]
    ids: list[list[int]] = [[] for _ in texts]
    types: list[list[int]] = [[] for _ in texts]
    truncated = 0
    for rows, pairs in ((alone, None), (list(seconds), list(seconds.values()))):
        found = _encode([texts[i] for i in rows], tokenizer, max_length, pairs)
        truncated += found.truncated
        for at, i in enumerate(rows):
            ids[i] = found.ids[at]
            types[i] = found.types[at] if found.types else []
    return Encoded(ids, types if all(types) else None, truncated)


def pack(encoded: Encoded, rows: Sequence[int], pad: int) -> Batch:
    """Pad the given rows on the right into one batch."""
    length = max(1, *(len(encoded.ids[i]) for i in rows)) if rows else 1
    ids = np.full((len(rows), length), pad, dtype=np.int64)
    mask = np.zeros_like(ids)
    types = None if encoded.types is None else np.zeros_like(ids)
    for at, i in enumerate(rows):
        n = len(encoded.ids[i])
        ids[at, :n], mask[at, :n] = encoded.ids[i], 1
        if types is not None and encoded.types is not None:
            types[at, :n] = encoded.types[i]
    return Batch(ids, mask, types)


def make_batches(
    texts: Sequence[str],
    tokenizer: Any,
    batch_size: int,
    max_length: int,
    pairs: Sequence[str | None] | None = None,
) -> list[tuple[list[int], Batch]]:
    """Return batches of similar lengths, longest first, each with its rows' places in `texts`.

    The make-up depends on texts, tokenizer and `batch_size` alone, so that every step of a run is
    scored on the same batches (dynamic quantization depends on a batch's make-up).
    """
    encoded = encode_texts(texts, tokenizer, max_length, pairs)
    order = sorted(range(len(texts)), key=lambda i: (-len(encoded.ids[i]), i))
    groups = [order[at : at + batch_size] for at in range(0, len(order), batch_size)]
    return [(rows, pack(encoded, rows, tokenizer.pad_token_id)) for rows in groups]


def generate_texts(
    runner: Runner,
    texts: Sequence[str],
    generation: Generation,
    batch_size: int = 32,
    progress: Progress = silent,
    stopped: Callable[[int, int], None] | None = None,
) -> list[str]:
    """Translate (or otherwise rewrite) `texts`, in their order; a language model continues them.

    stopped: is told of how many texts the output was as long as it may be, and how many tokens that is.
    """
    if is_causal(runner.config):
        return continue_texts(runner, texts, generation, batch_size, progress)
    if "decoder_start_token_id" not in {**runner.config, **runner.generation_config}:
        raise InputError(f"{runner.folder}: this model does not generate text.")
    tokenizer = load_tokenizer(runner.folder)
    results = [""] * len(texts)
    done = 0
    batches = make_batches(texts, tokenizer, batch_size, length_limit(tokenizer, runner.config))
    decoding, endless = settle(generation, runner), 0
    for part, (rows, batch) in enumerate(batches):
        tokens = generate(runner, batch, generation, part)
        endless += sum(decoding.stops(row) for row in tokens)
        for i, text in zip(rows, tokenizer.batch_decode(tokens, skip_special_tokens=True), strict=True):
            results[i] = text
        done += len(rows)
        progress(done, len(texts), "sentences")
    if stopped is not None:
        stopped(endless, decoding.longest(1) - 1)
    return results


def class_logits(
    runner: Runner, examples: Sequence[Example], batch_size: int = 32, progress: Progress = silent
) -> NDArray[np.float32]:
    """Return float32 logits [n, C] for `examples`, in their order."""
    tokenizer = load_tokenizer(runner.folder)
    batches = make_batches(
        [e.text for e in examples],
        tokenizer,
        batch_size,
        length_limit(tokenizer, runner.config),
        [e.text_pair for e in examples],
    )
    results: NDArray[np.float32] | None = None
    done = 0
    for rows, batch in batches:
        logits = runner.forward(batch)
        if results is None:
            results = np.empty((len(examples), logits.shape[1]), dtype=np.float32)
        results[rows] = logits
        done += len(rows)
        progress(done, len(examples), "texts")
    if results is None:
        raise InputError("No texts to classify.")
    return results
