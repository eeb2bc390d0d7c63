"""The generation loop of all runners, equivalent to Hugging Face `generate`.

Greedy search and sampling pass each row's token to the next step; beam search
(`smelt.runtime.generate.beam_search`) does so for several texts per row and keeps the best. All three apply
the rules of the model's generation config (`smelt.runtime.generate.logits_processors`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from smelt.runtime.batch import Batch, Logits, Tokens
from smelt.runtime.generate.beam_search import beam_search, beam_search_n_best
from smelt.runtime.generate.decoder_only_runner import prefill
from smelt.runtime.generate.generation_config import GenerationConfig, resolve_generation
from smelt.runtime.generate.logits_processors import LogitsProcessors
from smelt.runtime.generate.sampling import filter_logits, sample_tokens
from smelt.runtime.generate.settings import GenerationSettings
from smelt.runtime.runner import Runner


def generate(runner: Runner, batch: Batch, generation: GenerationSettings, part: int = 0) -> list[list[int]]:
    """Continue or rewrite the texts of `batch`; return each row's new tokens, including the final one.

    Args:
        runner: a decoder-only model's `encode` takes all of a prompt but its last token, and that token is
            the first input; otherwise it is the decoder's start token.
        batch: padded on the left for a decoder-only model, on the right for an encoder-decoder.
        generation: the settings.
        part: the number of the batch; each draws from a stream of its own (seed, part).

    Raises:
        InputError: the generation config has a setting that this loop does not support.
    """
    return generate_resolved(runner, batch, resolve_generation(generation, runner), part)


def generate_n_best(
    runner: Runner, batch: Batch, decoding: GenerationConfig, count: int
) -> list[list[list[int]]]:
    """Return the new tokens of the `count` best texts of a beam search for each row, best first."""
    return beam_search_n_best(runner, batch, _make_processors(batch, decoding), count)


def _make_processors(batch: Batch, decoding: GenerationConfig) -> LogitsProcessors:
    if decoding.start is None:
        return LogitsProcessors(decoding, batch.input_ids, batch.attention_mask)
    start = np.full((batch.input_ids.shape[0], 1), decoding.start, dtype=np.int64)
    return LogitsProcessors(decoding, start, None)


def generate_resolved(
    runner: Runner,
    batch: Batch,
    decoding: GenerationConfig,
    batch_index: int = 0,
    single_prefill: bool = False,
) -> list[list[int]]:
    """Generate with resolved settings, see `generate`; `single_prefill`: see `prefill`."""
    rules = _make_processors(batch, decoding)
    if decoding.num_beams > 1:
        return beam_search(runner, batch, rules, single_prefill)
    if not decoding.do_sample:
        return _decode_loop(runner, batch, rules, lambda scores: scores.argmax(axis=-1), True, single_prefill)
    random = np.random.default_rng([decoding.seed, batch_index])

    def sample(scores: Logits) -> Tokens:
        filter_logits(scores, decoding.temperature, decoding.top_k, decoding.top_p)
        return sample_tokens(scores, random)

    # each row has a number of its own in every draw, so all rows are kept until the end
    return _decode_loop(runner, batch, rules, sample, False, single_prefill)


def _decode_loop(
    runner: Runner,
    batch: Batch,
    rules: LogitsProcessors,
    choose: Callable[[Logits], Tokens],
    drop_finished: bool,
    single_prefill: bool,
) -> list[list[int]]:
    """Run each row with the token that `choose` selects from its scores until all rows have ended.

    drop_finished: rows that have ended are removed from the batch, once they are a quarter of it: removing
    them from the caches costs about as much as one of them does in a step. single_prefill: see `prefill`.
    """
    state, scores = prefill(runner, batch, rules.prompt[:, -1], single_prefill)
    rows, length = rules.prompt.shape
    found: list[list[int]] = [[] for _ in range(rows)]
    places = np.arange(rows)  # indices of the rows that are still in the batch
    texts = np.full((rows, rules.longest), rules.decoding.pad, dtype=np.int64)
    texts[:, :length] = rules.prompt
    tokens = rules.prompt[:, -1]
    unfinished = np.ones(rows, dtype=bool)
    left = rows
    while length < rules.longest:
        if drop_finished and left <= rows - max(1, rows // 4):
            for place, text in zip(places[~unfinished], texts[~unfinished, :length], strict=True):
                found[place] = rules.new_tokens(text)
            kept = unfinished.nonzero()[0]
            state = runner.reorder_cache(state, kept)
            rules.select_rows(kept)
            places, texts, tokens, unfinished, rows = (
                places[kept],
                texts[kept],
                tokens[kept],
                unfinished[kept],
                left,
            )
        if length > rules.prompt.shape[1]:
            scores = runner.decode_step(state, tokens)
        rules.apply(scores, texts[:, :length])
        tokens = choose(scores)
        if left < rows:
            tokens = np.where(unfinished, tokens, rules.decoding.pad)
        texts[:, length] = tokens
        length += 1
        unfinished &= ~rules.is_eos(tokens)
        left = np.count_nonzero(unfinished)
        if not left:
            break
    for place, text in zip(places, texts[:, :length], strict=True):
        found[place] = rules.new_tokens(text)
    return found
