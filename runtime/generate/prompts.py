"""Prompts for decoder-only language models: tokenized, padded on the left, continued.

Shapes: B = batch, L = tokens of the longest prompt.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from smelt.core.errors import InputError
from smelt.core.stage import Progress, silent
from smelt.runtime.batch import Batch
from smelt.runtime.generate.decoding import Decoding
from smelt.runtime.generate.settings import Generation
from smelt.runtime.runner import Runner
from smelt.runtime.text.hub_tokenizer import text_tokenizer
from smelt.runtime.text.limits import NO_LIMIT

Cut = Callable[[int, int], None]
"""Is told how many texts of a call were cut, and at how many tokens."""


def encode_prompts(texts: Sequence[str], tokenizer: Any, most: int) -> list[list[int]]:
    """Tokenize `texts`; of one longer than `most` tokens the end stays. An empty one gets a first token.

    Raises:
        InputError: an empty prompt, and the tokenizer has no token to begin with.
    """
    words = text_tokenizer(tokenizer)
    found = words.encode_rows(texts, NO_LIMIT).ids
    for at, ids in enumerate(found):
        if not ids:
            first = words.bos_token_id if words.bos_token_id is not None else words.eos_token_id
            if first is None:
                raise InputError(
                    "An empty prompt: this tokenizer has no token that a text begins with.",
                    code="empty-prompt",
                )
            found[at] = [first]
    return [cut_prompt(ids, most, words.bos_token_id) for ids in found]


def cut_prompt(ids: list[int], most: int, begin: int | None) -> list[int]:
    """Return the last `most` tokens of a prompt, behind `begin`, a special token, if it began with it."""
    if len(ids) <= most:
        return ids
    lead = ids[:1] if ids[0] == begin and most > 1 else []
    return lead + ids[len(ids) - most + len(lead) :]


def longest_prompt(length: int, decoding: Decoding, limit: int) -> int:
    """Return how many tokens of a prompt of `length` tokens stay, so that what is asked for has room too.

    Where both do not fit in `limit` tokens, the prompt keeps at least half of them. The last new token is
    never fed, so it needs no room.
    """
    return min(length, max(1, limit // 2, limit + 1 - decoding.asked(length)))


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


def batches_of(
    prompts: Sequence[Sequence[int]], batch_size: int, pad: int, decoding: Decoding
) -> list[tuple[list[int], Batch]]:
    """Return batches of prompts of similar length, longest first, each with its rows' places.

    Prompts of one batch have equal limits, so that none gets fewer new tokens because of its neighbour.
    """
    order = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), i))
    batches = []
    for _, found in itertools.groupby(order, lambda i: decoding.limits(len(prompts[i]))):
        alike = list(found)
        for at in range(0, len(alike), batch_size):
            rows = alike[at : at + batch_size]
            batches.append((rows, pack_left([prompts[i] for i in rows], pad)))
    return batches


def continue_texts(
    runner: Runner,
    texts: Sequence[str],
    generation: Generation,
    batch_size: int = 32,
    progress: Progress = silent,
    cut: Cut | None = None,
) -> list[str]:
    """Return each text with its continuation, in their order."""
    tools = runner.text
    tokenizer, limit = tools.tokenizer, tools.limit
    decoding = tools.decoding(generation, runner)
    whole = encode_prompts(texts, tokenizer, NO_LIMIT)
    begin = tokenizer.bos_token_id
    prompts = [cut_prompt(ids, longest_prompt(len(ids), decoding, limit), begin) for ids in whole]
    shortened = sum(len(a) < len(b) for a, b in zip(prompts, whole, strict=True))
    if shortened and cut is not None:
        cut(shortened, limit)
    results = [""] * len(texts)
    done = 0
    for part, (rows, batch) in enumerate(batches_of(prompts, batch_size, pad_of(tokenizer), decoding)):
        tokens = runner.generator(runner, batch, decoding, part)
        for i, new in zip(rows, tokens, strict=True):
            results[i] = texts[i] + continuation(tokenizer, prompts[i], new)
        done += len(rows)
        progress(done, len(texts), "texts")
    return results


def continuation(tokenizer: Any, prompt: Sequence[int], new: Sequence[int]) -> str:
    """Return the text of `new` as it reads behind `prompt`.

    A SentencePiece tokenizer drops the blank that a text begins with, and a letter may be spread over
    several byte-level tokens; so both are decoded as one, and the prompt is taken off again. Where the
    prompt reads otherwise with something behind it, what is new is decoded alone.
    """
    words = text_tokenizer(tokenizer)
    both, before = words.decode_rows([[*prompt, *new], prompt])
    return both[len(before) :] if both.startswith(before) else words.decode_rows([new])[0]
