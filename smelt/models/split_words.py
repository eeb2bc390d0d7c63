"""Rows of tokens and the words that they belong to: texts that are split into words, and truncation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class EncodedWords:
    """Token ids per text, the index of each word's first token in them, and the number of truncated texts.

    The index is None for a word without tokens, because it was truncated or has only unknown controls.
    """

    ids: list[list[int]]
    first_tokens: list[list[int | None]]
    truncated: int


def reads_spaces(tokenizer: Any) -> bool:
    """Return whether the space before a word belongs to its first token, as in byte-level BPE (RoBERTa)."""
    return "ByteLevel(" in repr(tokenizer.pre_tokenizer)


def encode_words(tokenizer: Any, texts: Sequence[Sequence[str]], max_length: int) -> EncodedWords:
    """Tokenize texts split into words, each word on its own, with special tokens around a text.

    Args:
        tokenizer: a `smelt.models.tokenizer.TextTokenizer`.
        texts: the words of each text.
        max_length: tokens of a text; the others are truncated as transformers does.

    Raises:
        InputError: the tokenizer does not return the words of its tokens.
    """
    ids, owners, truncated = [], [], 0
    words = [_prepare_words(words, tokenizer.lower, tokenizer.spaces_words) for words in texts]
    for encoding in tokenizer.encodings(words):
        row, word_ids = encoding.ids, encoding.word_ids
        if len(row) > max_length:
            truncated += 1
            truncates_left = tokenizer.truncation_side == "left"
            kept_indices = indices_after_truncation(encoding.sequence_ids, max_length, truncates_left)
            row, word_ids = ([values[index] for index in kept_indices] for values in (row, word_ids))
        ids.append(row)
        owners.append(word_ids)
    return EncodedWords(ids, first_word_tokens(texts, owners), truncated)


def _prepare_words(words: Sequence[str], lower: bool, spaced: bool) -> list[str]:
    """Return words as they are tokenized, with a space before each if `spaced`; "" for a text without words.

    The space has the effect of `add_prefix_space=True` in transformers.
    """
    prepared = [text.lower() if lower else text for text in words]
    return [f" {text}" for text in prepared] if spaced else prepared or [""]


def first_word_tokens(
    texts: Sequence[Sequence[str]], owners: Sequence[Sequence[int | None]]
) -> list[list[int | None]]:
    """Return the index of the first token of each word; None for a word without tokens.

    Args:
        texts: the words of each text.
        owners: for each token of a text the index of its word, None for a special token.
    """
    results: list[list[int | None]] = []
    for words, word_ids in zip(texts, owners, strict=True):
        first: list[int | None] = [None] * len(words)
        for position, owner in reversed(list(enumerate(word_ids))):
            if owner is not None and owner < len(words):
                first[owner] = position
        results.append(first)
    return results


def indices_after_truncation(owners: Sequence[int | None], max_length: int, left: bool) -> list[int]:
    """Return which tokens of a row are kept: all special ones, and as many of the texts as fit.

    The longer text of a pair is truncated first, as in the tokenizers library (utils/truncation.rs,
    LongestFirst). The library itself would also keep all removed parts, in combinations for two long texts.

    Args:
        owners: for each token 0 or 1, the index of its text, or None for a special one.
        max_length: number of tokens that may be kept.
        left: whether texts are truncated at their beginning.
    """
    indices_by_text: list[list[int]] = [[], []]
    special = 0
    for index, sequence_id in enumerate(owners):
        if sequence_id is None:
            special += 1
        else:
            indices_by_text[sequence_id].append(index)
    available = max(0, max_length - special)
    shorter, longer = sorted(map(len, indices_by_text))
    longer = max(shorter, available - shorter)
    if shorter + longer > available:
        shorter = available // 2
        longer = shorter + available % 2
    first, second = (
        (longer, shorter) if len(indices_by_text[0]) > len(indices_by_text[1]) else (shorter, longer)
    )
    removed = set()
    for text_indices, count in ((indices_by_text[0], first), (indices_by_text[1], second)):
        removed.update(text_indices[: len(text_indices) - count] if left else text_indices[count:])
    return [index for index in range(len(owners)) if index not in removed]
