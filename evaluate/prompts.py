"""What language models are timed on: stretches of running text, all of the same number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from smelt.core.errors import InputError

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
        raise InputError("Latency: the texts hold no words to begin with.")
    return found or [" ".join(stretch)]


def prompt_batches(
    texts: Sequence[str], tokenizer: Any, batch_size: int, lengths: tuple[int, int], limit: int
) -> tuple[list[Any], int]:
    """Return batches of prompts and how many tokens are to follow them.

    Args:
        texts: as `prompt_texts` gives them.
        tokenizer: the model's.
        batch_size: prompts per batch.
        lengths: tokens of a prompt, and tokens to follow it; less where the model has fewer positions.
        limit: positions that the model has.
    """
    from smelt.runtime.prompts import encode_prompts, pack_left, pad_of

    most = max(1, min(lengths[0], limit // 2))
    prompts = [ids[:most] for ids in encode_prompts(texts, tokenizer, 10**9)]
    groups = [prompts[at : at + batch_size] for at in range(0, len(prompts), batch_size)]
    return [pack_left(group, pad_of(tokenizer)) for group in groups], min(lengths[1], limit - most)
