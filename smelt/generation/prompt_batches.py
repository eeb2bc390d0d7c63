"""Prompts for decoder-only language models: tokenizing, padding on the left, continuation.

Shapes: B = batch, L = tokens of the longest prompt.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from smelt.core.errors import InputError
from smelt.core.stage import Progress, no_progress
from smelt.data.batch import Batch
from smelt.generation.config import GenerationConfig, GenerationSettings
from smelt.models.text_rules import NO_LIMIT
from smelt.models.tokenizer import as_text_tokenizer
from smelt.runtimes.runner import Runner

OnTruncate = Callable[[int, int], None]
"""Called with the number of truncated texts of a call, and the token limit."""


def encode_prompts(texts: Sequence[str], tokenizer: Any, max_tokens: int) -> list[list[int]]:
    """Tokenize `texts`, truncated to their last `max_tokens` tokens. An empty one gets a first token.

    Raises:
        InputError: an empty prompt, and the tokenizer has no first token.
    """
    words = as_text_tokenizer(tokenizer)
    found = words.encode_batch(texts, NO_LIMIT).ids
    for at, ids in enumerate(found):
        if not ids:
            first = words.bos_token_id if words.bos_token_id is not None else words.eos_token_id
            if first is None:
                raise InputError(
                    "The prompt is empty, and this tokenizer has no beginning-of-text token. Pass a"
                    " prompt that is not empty.",
                    code="empty-prompt",
                )
            found[at] = [first]
    return [truncate_prompt(ids, max_tokens, words.bos_token_id) for ids in found]


def truncate_prompt(ids: list[int], max_tokens: int, bos_token_id: int | None) -> list[int]:
    """Return the last `max_tokens` tokens of a prompt, keeping a leading `bos_token_id`."""
    if len(ids) <= max_tokens:
        return ids
    lead = ids[:1] if ids[0] == bos_token_id and max_tokens > 1 else []
    return lead + ids[len(ids) - max_tokens + len(lead) :]


def max_prompt_length(length: int, decoding: GenerationConfig, limit: int) -> int:
    """Return how many tokens of a prompt of `length` tokens are kept, so that the new tokens fit too.

    Where both do not fit in `limit` tokens, the prompt keeps at least half of them. The last new token is
    never an input, so it needs no room.
    """
    return min(length, max(1, limit // 2, limit + 1 - decoding.requested_new_tokens(length)))


def pad_left(prompts: Sequence[Sequence[int]], pad: int) -> Batch:
    """Pad prompts on the left into one batch, int64 [B, L]."""
    length = max(map(len, prompts))
    ids = np.full((len(prompts), length), pad, dtype=np.int64)
    mask = np.zeros_like(ids)
    for at, prompt in enumerate(prompts):
        ids[at, length - len(prompt) :], mask[at, length - len(prompt) :] = prompt, 1
    return Batch(ids, mask)


def padding_token(tokenizer: Any) -> int:
    """Return the padding token of a batch; its value does not matter, since it is masked."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    return 0


def batch_prompts(
    prompts: Sequence[Sequence[int]], batch_size: int, pad: int, decoding: GenerationConfig
) -> list[tuple[list[int], Batch]]:
    """Return batches of prompts of similar length, longest first, each with the indices of its rows.

    Prompts of one batch have equal limits, so that none gets fewer new tokens because of its neighbour.
    """
    order = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), i))
    batches = []
    for _, found in itertools.groupby(order, lambda i: decoding.prompt_limits(len(prompts[i]))):
        alike = list(found)
        for at in range(0, len(alike), batch_size):
            rows = alike[at : at + batch_size]
            batches.append((rows, pad_left([prompts[i] for i in rows], pad)))
    return batches


def continue_texts(
    runner: Runner,
    texts: Sequence[str],
    generation: GenerationSettings,
    batch_size: int = 32,
    progress: Progress = no_progress,
    on_truncate: OnTruncate | None = None,
) -> list[str]:
    """Return each text with its continuation, in their order."""
    tools = runner.text
    tokenizer, limit = tools.tokenizer, tools.max_input_length
    decoding = tools.resolved_generation(generation, runner)
    whole = encode_prompts(texts, tokenizer, NO_LIMIT)
    begin = tokenizer.bos_token_id
    prompts = [truncate_prompt(ids, max_prompt_length(len(ids), decoding, limit), begin) for ids in whole]
    shortened = sum(len(a) < len(b) for a, b in zip(prompts, whole, strict=True))
    if shortened and on_truncate is not None:
        on_truncate(shortened, limit)
    results = [""] * len(texts)
    done = 0
    for part, (rows, batch) in enumerate(
        batch_prompts(prompts, batch_size, padding_token(tokenizer), decoding)
    ):
        tokens = runner.generator(runner, batch, decoding, part)
        for i, new in zip(rows, tokens, strict=True):
            results[i] = texts[i] + decode_continuation(tokenizer, prompts[i], new)
        done += len(rows)
        progress(done, len(texts), "texts")
    return results


def decode_continuation(tokenizer: Any, prompt: Sequence[int], new: Sequence[int]) -> str:
    """Return the text of `new` as it reads after `prompt`.

    A SentencePiece tokenizer drops the leading space of a text, and a letter may be spread over
    several byte-level tokens; so both are decoded as one, and the prompt is removed again. Where the
    prompt decodes differently with text after it, the new tokens are decoded alone.
    """
    words = as_text_tokenizer(tokenizer)
    both, before = words.decode_batch([[*prompt, *new], prompt])
    return both[len(before) :] if both.startswith(before) else words.decode_batch([new])[0]
