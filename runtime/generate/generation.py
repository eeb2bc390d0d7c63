"""The one generation loop, shared by all runners and equal to Hugging Face `generate`.

Greedy search and sampling feed each row's token back; beam search (`smelt.runtime.generate.beam`) does so for
several texts per row and keeps the best. What the model's generation config asks for is obeyed by all
three (`smelt.runtime.generate.rules`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from smelt.core.stage import Settings
from smelt.runtime.generate.beam import beam_search
from smelt.runtime.generate.decoding import Decoding, settle
from smelt.runtime.generate.rules import Rules
from smelt.runtime.generate.sampling import draw, narrow
from smelt.runtime.runner import Batch, Logits, Runner, Tokens

Token = Annotated[int, Field(ge=0)]
_OF_BEAMS = ("length_penalty", "early_stopping")
_OF_SAMPLING = ("temperature", "top_k", "top_p", "seed")


class Generation(Settings):
    """How texts are generated; the names are those of a Hugging Face generation config.

    beams: 1 is greedy search. do_sample: draw each token instead. What is not given comes from the
    model's own generation config; without one, at most 128 new tokens. Tokens are numbers of the
    model's vocabulary.
    """

    beams: int = Field(default=1, ge=1, le=64)
    max_new_tokens: int | None = Field(default=None, ge=1, le=4096)
    min_new_tokens: int | None = Field(default=None, ge=0, le=4096)
    min_length: int | None = Field(default=None, ge=0, le=4096)
    length_penalty: float | None = Field(default=None, ge=-10, le=10)
    early_stopping: bool | Literal["never"] | None = None
    no_repeat_ngram_size: int | None = Field(default=None, ge=0, le=4096)
    repetition_penalty: float | None = Field(default=None, gt=0, le=100)
    bad_words_ids: tuple[Annotated[tuple[Token, ...], Field(min_length=1)], ...] | None = None
    forced_bos_token_id: Token | None = None
    forced_eos_token_id: Token | None = None
    suppress_tokens: tuple[Token, ...] | None = None
    begin_suppress_tokens: tuple[Token, ...] | None = None
    do_sample: bool = False
    temperature: float | None = Field(default=None, gt=0, le=100)
    top_k: int | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = Field(default=None, ge=0, le=2**32 - 1)

    @model_validator(mode="after")
    def _means_something(self) -> Self:
        if self.do_sample and self.beams > 1:
            raise ValueError(f"do_sample draws one text; it does not go with beams: {self.beams}")
        if self.min_length is not None and self.min_new_tokens is not None:
            raise ValueError("give min_new_tokens or min_length, not both")
        for name in _OF_BEAMS:
            if self.beams == 1 and getattr(self, name) is not None:
                raise ValueError(f"{name} means nothing without beams above 1")
        for name in _OF_SAMPLING:
            if not self.do_sample and getattr(self, name) is not None:
                raise ValueError(f"{name} means nothing without do_sample: true")
        return self

    def summary(self) -> str:
        """Return the kind of search and the longest output in a few words."""
        kind = "sampled" if self.do_sample else f"beam {self.beams}" if self.beams > 1 else "greedy"
        if self.max_new_tokens is None:
            return f"{kind}, to the model's longest output"
        return f"{kind}, at most {self.max_new_tokens} new tokens"


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


def generate_with(runner: Runner, batch: Batch, decoding: Decoding, part: int = 0) -> list[list[int]]:
    """As `generate`, with settings whose gaps are filled already."""
    if decoding.start is None:
        rules = Rules(decoding, batch.input_ids, batch.attention_mask)
    else:
        start = np.full((batch.input_ids.shape[0], 1), decoding.start, dtype=np.int64)
        rules = Rules(decoding, start, None)
    if decoding.beams > 1:
        return beam_search(runner, batch, rules)
    if not decoding.do_sample:
        return _token_by_token(runner, batch, rules, lambda scores: scores.argmax(axis=-1), leave=True)
    random = np.random.default_rng([decoding.seed, part])

    def sample(scores: Logits) -> Tokens:
        narrow(scores, decoding.temperature, decoding.top_k, decoding.top_p)
        return draw(scores, random)

    # each row has a number of its own in every draw, so all rows stay until the end
    return _token_by_token(runner, batch, rules, sample, leave=False)


def _token_by_token(
    runner: Runner, batch: Batch, rules: Rules, choose: Callable[[Logits], Tokens], leave: bool
) -> list[list[int]]:
    """Feed each row the token that `choose` picks from its scores until all rows have ended.

    leave: rows that have ended leave the batch, once they are a quarter of it: to take the others out of
    the caches costs about as much as one of them does in a step.
    """
    state = runner.encode(batch)
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
