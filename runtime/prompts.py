"""Prompts for decoder-only language models: tokenized, padded on the left, continued.

Shapes: B = batch, L = tokens of the longest prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from smelt.core.errors import InputError
from smelt.core.stage import Progress, silent
from smelt.runtime.runner import Batch


def encode_prompts(texts: Sequence[str], tokenizer: Any, most: int) -> list[list[int]]:
    """Tokenize `texts`; of one longer than `most` tokens the end stays. An empty one gets a first token.

    Raises:
        InputError: an empty prompt, and the tokenizer has no token to begin with.
    """
    found = []
    for text in texts:
        ids = list(tokenizer(text, verbose=False)["input_ids"])
        if not ids:
            first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
            if first is None:
                raise InputError("An empty prompt: this tokenizer has no token that a text begins with.")
            ids = [first]
        found.append(ids[-most:])
    return found


def pack_left(prompts: Sequence[Sequence[int]], pad: int) -> Batch:
    """Pad prompts on the left into one batch, int64 [B, L]."""
    length = max(map(len, prompts))
    ids = np.full((len(prompts), length), pad, dtype=np.int64)
    mask = np.zeros_like(ids)
    for at, prompt in enumerate(prompts):
        ids[at, length - len(prompt) :], mask[at, length - len(prompt) :] = prompt, 1
    return Batch(ids, mask)


def pad_of(tokenizer: Any) -> int:
    """Return the token that fills up a batch; what it is does not matter, since it is masked."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    return 0


def prompt_batches(
    texts: Sequence[str], tokenizer: Any, batch_size: int, most: int
) -> list[tuple[list[int], Batch]]:
    """Return batches of prompts of similar length, longest first, each with its rows' places in `texts`."""
    prompts = encode_prompts(texts, tokenizer, most)
    order = sorted(range(len(texts)), key=lambda i: (-len(prompts[i]), i))
    groups = [order[at : at + batch_size] for at in range(0, len(order), batch_size)]
    return [(rows, pack_left([prompts[i] for i in rows], pad_of(tokenizer))) for rows in groups]


def continue_texts(
    runner: Any,
    texts: Sequence[str],
    generation: Any,
    batch_size: int = 32,
    progress: Progress = silent,
) -> list[str]:
    """Return each text with its continuation, in their order; `generation` as in generation.py."""
    from smelt.runtime.checkpoint import load_tokenizer
    from smelt.runtime.generation import generate
    from smelt.runtime.predict import length_limit

    tokenizer = load_tokenizer(runner.folder)
    limit = length_limit(tokenizer, runner.config)
    room = min(generation.max_new_tokens or limit // 2, limit // 2)
    results = [""] * len(texts)
    done = 0
    for part, (rows, batch) in enumerate(prompt_batches(texts, tokenizer, batch_size, limit - room)):
        tokens = generate(runner, batch, generation, part)
        for i, text in zip(rows, tokenizer.batch_decode(tokens, skip_special_tokens=True), strict=True):
            results[i] = texts[i] + text
        done += len(rows)
        progress(done, len(texts), "texts")
    return results
