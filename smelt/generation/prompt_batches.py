"""Prompts for decoder-only language models: responses as tokens, padding on the left, continuation.

Shapes: B = batch, L = tokens of the longest prompt.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from smelt.core.process_group import gather_parts, map_batches, merge_shares, process_count
from smelt.data.prompt_rows import assistant_turns
from smelt.generation.backend import Batch
from smelt.generation.config import GenerationConfig, GenerationSettings
from smelt.generation.runner import Runner
from smelt.models.prompt_template import PROMPT_FIELD, PromptTemplate, ResponseParts
from smelt.models.text_rules import NO_LIMIT
from smelt.models.tokenizer import (
    TextTokenizer,
    as_text_tokenizer,
    encode_prompts,
    encode_rendered,
    truncate_prompt,
)
from smelt.stage import Progress, no_progress

OnTruncate = Callable[[int, int], None]
"""Called with the number of truncated texts of a call, and the token limit."""


@dataclass(frozen=True)
class EncodedResponse:
    """Tokens of a prompt and its response. is_target: for each token, whether it is one of a response."""

    ids: list[int]
    is_target: list[bool]

    @property
    def num_last_targets(self) -> int:
        """The number of tokens of the last response."""
        return next((n for n, target in enumerate(reversed(self.is_target)) if not target), len(self.ids))


def encode_responses(
    pairs: Sequence[tuple[str, str]], tokenizer: Any, *, every_turn: bool, with_end: bool = True
) -> list[list[EncodedResponse]]:
    """Return prompts with their responses as tokens, without truncation.

    The response is followed by the token that ends a text, or in a chat by the end of the assistant's turn.
    It is tokenized without added special tokens: with the prompt where the prompt's tokens do not change by
    that, as they are continued in generation, else separately.

    Without the end, only the tokens of the response itself are targets: prompt and response are tokenized
    together, and tokens of the prompt that change by the response belong to it. Spaces at the end of a plain
    prompt belong to the response, as in lm-evaluation-harness; in a chat the text before the response is the
    template's.

    Args:
        pairs: n prompts, plain texts or conversations, each with its response.
        tokenizer: with a prompt template.
        every_turn: whether earlier turns of the assistant are targets too. A conversation is then one
            sample, or several where the template renders an earlier turn differently once others follow.
        with_end: whether the end of the response is a target.

    Raises:
        InputError: a prompt does not fit the template (see `PromptTemplate.render_prompts`).

    Source: github.com/EleutherAI/lm-evaluation-harness 0.4.13, lm_eval/api/model.py, `_encode_pair`.
    """
    text_tokenizer = as_text_tokenizer(tokenizer)
    template = text_tokenizer.prompts or PromptTemplate(PROMPT_FIELD)
    conversations_by_pair = [
        assistant_turns(*prompt_and_response) if every_turn else assistant_turns(*prompt_and_response)[-1:]
        for prompt_and_response in pairs
    ]
    owners = [index for index, conversations in enumerate(conversations_by_pair) for _ in conversations]
    parts = template.render_responses(
        [conversation for conversations in conversations_by_pair for conversation in conversations]
    )
    if not with_end:
        parts = [_without_end(response_parts, template.is_chat) for response_parts in parts]
    end = [text_tokenizer.eos_token_id] if with_end and text_tokenizer.eos_token_id is not None else []
    encoded = _encode_after(
        [response_parts.prompt for response_parts in parts],
        [response_parts.response for response_parts in parts],
        text_tokenizer,
    )
    samples: list[list[EncodedResponse]] = [[] for _ in pairs]
    for sample_index, response_parts, (prompt, unchanged, following) in zip(
        owners, parts, encoded, strict=True
    ):
        is_joint = unchanged == prompt if with_end else bool(unchanged)  # a first token cannot be predicted
        ids = unchanged if is_joint else prompt
        targets = (following if is_joint else text_tokenizer.encode_plain([response_parts.response])[0]) + (
            [] if response_parts.end else end
        )
        mask = [False] * len(ids)
        earlier_samples = samples[sample_index]
        if (
            earlier_samples and ids[: len(earlier_samples[-1].ids)] == earlier_samples[-1].ids
        ):  # the earlier turns as they were rendered
            before = earlier_samples.pop().is_target
            mask[: len(before)] = before
        earlier_samples.append(EncodedResponse(ids + targets, mask + [True] * len(targets)))
    return samples


def _without_end(part: ResponseParts, is_chat: bool) -> ResponseParts:
    """Return `part` with the response's own text as the response."""
    prompt = part.prompt + part.lead
    text = prompt if is_chat else prompt.rstrip()
    return ResponseParts(text, "", prompt[len(text) :] + part.content, "")


def _encode_after(
    prompts: Sequence[str], texts: Sequence[str], words: TextTokenizer
) -> list[tuple[list[int], list[int], list[int]]]:
    """Tokenize rendered prompts, each with the text that follows it.

    A text is not tokenized alone: SentencePiece tokenizers such as Llama 2's put a space before it.

    Returns:
        for each prompt its tokens with special ones, those of them that do not change once the text follows,
        and the tokens that then follow these, without special ones. No token is unchanged if the last ones
        change and special ones follow them.
    """
    encoded = encode_rendered(prompts, words)
    prompts_alone = words.encode_plain(prompts)
    joint_encoded = words.encode_plain([prompt + text for prompt, text in zip(prompts, texts, strict=True)])
    results = []
    for ids, before, joint_ids in zip(encoded, prompts_alone, joint_encoded, strict=True):
        id_pairs = enumerate(zip(before, joint_ids, strict=False))
        common = next((index for index, (a, b) in id_pairs if a != b), min(len(before), len(joint_ids)))
        num_changed = len(before) - common
        ends_alike = not num_changed or ids[len(ids) - len(before) :] == before
        results.append((ids, ids[: len(ids) - num_changed] if ends_alike else [], joint_ids[common:]))
    return results


def fit_response(sample: EncodedResponse, limit: int, bos_token_id: int | None) -> EncodedResponse:
    """Return `sample` with at most `limit` + 1 tokens, since the last one is never an input.

    The prompt is truncated on the left. It keeps at least half of the tokens, as in generation; a longer
    response is then truncated on the right.
    """
    max_ids = limit + 1
    if len(sample.ids) <= max_ids:
        return sample
    begin = len(sample.ids) - sample.num_last_targets
    num_prompt_kept = min(begin, max(1, limit // 2, max_ids - sample.num_last_targets))
    prompt = truncate_prompt(sample.ids[:begin], num_prompt_kept, bos_token_id)
    response = sample.ids[begin:][: max_ids - num_prompt_kept]
    mask = sample.is_target[begin - num_prompt_kept : begin]
    if prompt and prompt[0] != sample.ids[begin - num_prompt_kept]:  # the leading token is kept
        mask = [False, *mask[1:]]
    return EncodedResponse(prompt + response, mask + [True] * len(response))


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
    for index, prompt in enumerate(prompts):
        ids[index, length - len(prompt) :], mask[index, length - len(prompt) :] = prompt, 1
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

    Prompts of one batch have equal limits, so that none gets fewer new tokens because of its neighbor.
    """
    order = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), i))
    batches = []
    for _, same_limits in itertools.groupby(order, lambda i: decoding.prompt_limits(len(prompts[i]))):
        group_indices = list(same_limits)
        for start in range(0, len(group_indices), batch_size):
            indices = group_indices[start : start + batch_size]
            batches.append((indices, pad_left([prompts[i] for i in indices], pad)))
    return batches


def truncated_prompts(
    runner: Runner, texts: Sequence[str], decoding: GenerationConfig
) -> tuple[list[list[int]], int]:
    """Return the tokens of `texts` that are generated from, and how many texts are truncated for it."""
    tools = runner.text
    full_prompts = encode_prompts(texts, tools.tokenizer, NO_LIMIT)
    begin, limit = tools.tokenizer.bos_token_id, tools.max_input_length
    prompts = [
        truncate_prompt(ids, max_prompt_length(len(ids), decoding, limit), begin) for ids in full_prompts
    ]
    return prompts, sum(len(a) < len(b) for a, b in zip(prompts, full_prompts, strict=True))


def continue_texts(
    runner: Runner,
    texts: Sequence[str],
    generation: GenerationSettings,
    batch_size: int = 32,
    progress: Progress = no_progress,
    on_truncate: OnTruncate | None = None,
    on_length_limit: OnTruncate | None = None,
) -> list[str]:
    """Return each text with its continuation, in their order; of a model that answers prompts, the responses.

    on_length_limit: called with the number of outputs that reached the length limit, and the largest such
    limit in new tokens, if there are any.
    """
    tools = runner.text
    tokenizer = tools.tokenizer
    decoding = tools.resolved_generation(generation, runner)
    prompts, num_truncated = truncated_prompts(runner, texts, decoding)
    if num_truncated and on_truncate is not None:
        on_truncate(num_truncated, tools.max_input_length)
    results: dict[int, str] = {}
    limited_lengths: list[int] = []
    batches = batch_prompts(prompts, batch_size, padding_token(tokenizer), decoding)
    for (indices, _), tokens in map_batches(
        lambda number, item: runner.generator(runner, item[1], decoding, number), batches, runner.workers
    ):
        responses = tokenizer.decode_batch(tokens) if tokenizer.prompts is not None else None
        for position, (i, new) in enumerate(zip(indices, tokens, strict=True)):
            if responses is None:
                results[i] = texts[i] + decode_continuation(tokenizer, prompts[i], new)
            else:
                results[i] = responses[position]
            if len(new) >= decoding.prompt_limits(len(prompts[i]))[0] and new[-1] not in decoding.eos:
                limited_lengths.append(len(new))
        progress(min(len(texts), len(results) * process_count()), len(texts), "texts")
    limited_lengths = [tokens for batch_number in gather_parts(limited_lengths) for tokens in batch_number]
    if limited_lengths and on_length_limit is not None:
        on_length_limit(len(limited_lengths), max(limited_lengths))
    return merge_shares(results)


def decode_continuation(tokenizer: Any, prompt: Sequence[int], new: Sequence[int]) -> str:
    """Return the text of `new` as it reads after `prompt`.

    A SentencePiece tokenizer drops the leading space of a text, and a letter may be spread over
    several byte-level tokens; so both are decoded as one, and the prompt is removed again. Where the
    prompt decodes differently with text after it, the new tokens are decoded alone.
    """
    text_tokenizer = as_text_tokenizer(tokenizer)
    full_text, before = text_tokenizer.decode_batch([[*prompt, *new], prompt])
    return full_text[len(before) :] if full_text.startswith(before) else text_tokenizer.decode_batch([new])[0]
