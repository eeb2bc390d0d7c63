"""Timing prompts for language models: pieces of running text with about the same number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from smelt.core.errors import InputError
from smelt.runtime.text.length_limits import NO_LIMIT

_CHARS_PER_TOKEN = 8  # upper estimate: the tokenizer's count then cuts the rest


def prompt_texts(texts: Sequence[str], tokens: int) -> list[str]:
    """Join samples of running text and cut them, at spaces, in pieces of at least `tokens` tokens.

    Raises:
        InputError: there is only white space.
    """
    words = " ".join(texts).split()
    found: list[str] = []
    stretch: list[str] = []
    letters = 0
    for word in words:
        stretch.append(word)
        letters += len(word) + 1
        if letters >= _CHARS_PER_TOKEN * tokens:
            found.append(" ".join(stretch))
            stretch, letters = [], 0
    if not found and not stretch:
        raise InputError(
            "Latency: the test samples contain no text for prompts. Check the test data.", code="empty-data"
        )
    return found or [" ".join(stretch)]


def truncate_prompts(texts: Sequence[str], runner: Any, lengths: tuple[int, int]) -> tuple[list[str], int]:
    """Return each text cut to a number of tokens, in whole words, and the number of tokens to generate.

    Args:
        texts: as `prompt_texts` returns them.
        runner: of a language model; its tokenizer counts.
        lengths: tokens of a prompt, and tokens to generate; fewer where the model has fewer positions.
    """
    tokenizer, limit = runner.text.tokenizer, runner.text.max_input_length
    most = max(1, min(lengths[0], limit // 2))
    found = [_truncate_words(text.split(), tokenizer, most) for text in texts]
    return found, max(1, min(lengths[1], limit - most))


def _truncate_words(words: Sequence[str], tokenizer: Any, max_tokens: int) -> str:
    """Return the most of `words`, at least one, that make at most `max_tokens` tokens; found by bisection."""
    low, high = 1, len(words)
    while low < high:
        middle = (low + high + 1) // 2
        [ids] = tokenizer.encode_batch([" ".join(words[:middle])], NO_LIMIT).ids
        if len(ids) <= max_tokens:
            low = middle
        else:
            high = middle - 1
    return " ".join(words[:low])
