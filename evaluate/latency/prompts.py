"""What language models are timed on: stretches of running text, all of about the same number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from smelt.core.errors import InputError
from smelt.runtime.text.limits import NO_LIMIT

_LETTERS = 8  # of a token, generously: what is too much is cut by the tokenizer's count


def prompt_texts(texts: Sequence[str], tokens: int) -> list[str]:
    """Join rows of running text and cut them, at spaces, in stretches that hold at least `tokens` tokens.

    Raises:
        InputError: there is nothing but white space.
    """
    words = " ".join(texts).split()
    found: list[str] = []
    stretch: list[str] = []
    letters = 0
    for word in words:
        stretch.append(word)
        letters += len(word) + 1
        if letters >= _LETTERS * tokens:
            found.append(" ".join(stretch))
            stretch, letters = [], 0
    if not found and not stretch:
        raise InputError("Latency: the texts hold no words to begin with.", code="empty-data")
    return found or [" ".join(stretch)]


def cut_prompts(texts: Sequence[str], runner: Any, lengths: tuple[int, int]) -> tuple[list[str], int]:
    """Return as much of each text, in whole words, as a number of tokens holds, and how many are to follow.

    Args:
        texts: as `prompt_texts` gives them.
        runner: of a language model; its tokenizer counts.
        lengths: tokens of a prompt, and tokens to follow it; less where the model has fewer positions.
    """
    tokenizer, limit = runner.text.tokenizer, runner.text.limit
    most = max(1, min(lengths[0], limit // 2))
    found = [_cut(text.split(), tokenizer, most) for text in texts]
    return found, max(1, min(lengths[1], limit - most))


def _cut(words: Sequence[str], tokenizer: Any, most: int) -> str:
    """Return as many of `words`, at least one, as make at most `most` tokens; found by halving."""
    low, high = 1, len(words)
    while low < high:
        middle = (low + high + 1) // 2
        [ids] = tokenizer.encode_rows([" ".join(words[:middle])], NO_LIMIT).ids
        if len(ids) <= most:
            low = middle
        else:
            high = middle - 1
    return " ".join(words[:low])
