"""The one generation loop, shared by all runners and equal to Hugging Face `generate`.

Greedy search and sampling feed each row's token back; beam search (`smelt.runtime.generate.beam`) does so for
several texts per row and keeps the best. What the model's generation config asks for is obeyed by all
three (`smelt.runtime.generate.rules`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from smelt.runtime.batch import Batch, Logits, Tokens
from smelt.runtime.generate.beam import beam_search, best_texts
from smelt.runtime.generate.decoder_only import first_logits
from smelt.runtime.generate.decoding import Decoding, settle
from smelt.runtime.generate.rules import Rules
from smelt.runtime.generate.sampling import draw, narrow
from smelt.runtime.generate.settings import Generation
from smelt.runtime.runner import Runner


def generate(runner: Runner, batch: Batch, generation: Generation, part: int = 0) -> list[list[int]]:
    """Continue or rewrite the texts of `batch`; return each row's new tokens, the one that ends it too.

    Args:
        runner: a decoder-only model's `encode` takes in all of a prompt but its last token, and then
            that token is fed first; otherwise it is the decoder's start token.
        batch: padded on the left for a decoder-only model, on the right for an encoder-decoder.
        generation: how.
        part: the number of the batch; each draws from a stream of its own (seed, part).

    Raises:
        InputError: the generation config asks for something that this loop does not do.
    """
    return generate_with(runner, batch, settle(generation, runner), part)


def generate_best(runner: Runner, batch: Batch, decoding: Decoding, count: int) -> list[list[list[int]]]:
    """Return the new tokens of the `count` best texts of a beam search for each row, best first."""
    return best_texts(runner, batch, _rules(batch, decoding), count)


def _rules(batch: Batch, decoding: Decoding) -> Rules:
    if decoding.start is None:
        return Rules(decoding, batch.input_ids, batch.attention_mask)
    start = np.full((batch.input_ids.shape[0], 1), decoding.start, dtype=np.int64)
    return Rules(decoding, start, None)


def generate_with(
    runner: Runner, batch: Batch, decoding: Decoding, part: int = 0, at_once: bool = False
) -> list[list[int]]:
    """As `generate`, with settings whose gaps are filled already; `at_once`: see `first_logits`."""
    rules = _rules(batch, decoding)
    if decoding.num_beams > 1:
        return beam_search(runner, batch, rules, at_once)
    if not decoding.do_sample:
        return _token_by_token(runner, batch, rules, lambda scores: scores.argmax(axis=-1), True, at_once)
    random = np.random.default_rng([decoding.seed, part])

    def sample(scores: Logits) -> Tokens:
        narrow(scores, decoding.temperature, decoding.top_k, decoding.top_p)
        return draw(scores, random)

    # each row has a number of its own in every draw, so all rows stay until the end
    return _token_by_token(runner, batch, rules, sample, False, at_once)


def _token_by_token(
    runner: Runner,
    batch: Batch,
    rules: Rules,
    choose: Callable[[Logits], Tokens],
    leave: bool,
    at_once: bool,
) -> list[list[int]]:
    """Feed each row the token that `choose` picks from its scores until all rows have ended.

    leave: rows that have ended leave the batch, once they are a quarter of it: to take the others out of
    the caches costs about as much as one of them does in a step. at_once: see `first_logits`.
    """
    state, scores = first_logits(runner, batch, rules.prompt[:, -1], at_once)
    rows, length = rules.prompt.shape
    found: list[list[int]] = [[] for _ in range(rows)]
    places = np.arange(rows)  # of the rows that are still in the batch
    texts = np.full((rows, rules.longest), rules.decoding.pad, dtype=np.int64)
    texts[:, :length] = rules.prompt
    tokens = rules.prompt[:, -1]
    unfinished = np.ones(rows, dtype=bool)
    left = rows
    while length < rules.longest:
        if leave and left <= rows - max(1, rows // 4):
            for place, text in zip(places[~unfinished], texts[~unfinished, :length], strict=True):
                found[place] = rules.new_tokens(text)
            kept = unfinished.nonzero()[0]
            state = runner.reorder(state, kept)
            rules.keep(kept)
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
        unfinished &= ~rules.ends(tokens)
        left = np.count_nonzero(unfinished)
        if not left:
            break
    for place, text in zip(places, texts[:, :length], strict=True):
        found[place] = rules.new_tokens(text)
    return found
