"""Rules that change scores before a token is chosen, and sampling of a token from the scores.

The rules are applied in the order of transformers' `_get_logits_processor` (generation/utils.py, 5.23), each
as its class in generation/logits_process.py does; both count a text's prompt as part of it. Single bad words
are the exception: they stay banned whatever other rules do.

Sampling filters the scores by temperature, top-k and nucleus (top-p), as transformers'
TemperatureLogitsWarper, TopKLogitsWarper and TopPLogitsWarper do, in that order, and then draws. Nucleus:
Holtzman et al. 2020, The Curious Case of Neural Text Degeneration, arXiv:1904.09751.

Shapes: R = rows (sentences, times beams), P = prompt, T = tokens so far, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from smelt.core.errors import RunError
from smelt.generation.backend import Logits, Tokens
from smelt.generation.config import GenerationConfig

LogitsProcessor: TypeAlias = Callable[[Logits, Tokens], None]
BoolArray: TypeAlias = NDArray[np.bool_]


class LogitsProcessors:
    """The rules of one batch.

    prompt: int64 [B, P], the tokens before the first new one: the start token, or a decoder-only
    model's whole input. mask: int64 [B, P], 0 where a prompt is padded on the left, or None.
    longest: maximum number of tokens of a text, with its prompt.
    """

    def __init__(self, decoding: GenerationConfig, prompt: Tokens, mask: Tokens | None) -> None:
        self.decoding, self.prompt = decoding, prompt
        self.prompt_length = prompt.shape[1]
        self.longest = decoding.max_total_length(self.prompt_length)
        self.eos = np.array(decoding.eos, dtype=np.int64)
        self._padding = None if mask is None or mask.all() else (mask != 0).argmax(axis=1)
        # only rules with an effect: the loop applies them in every step
        self._of_words = [*self._history_processors()]
        self._of_places = [
            *self._bad_word_processors(),
            *self._length_processors(),
            *self._token_processors(),
        ]

    def select_rows(self, rows: Tokens) -> None:
        """Keep only `rows`, int64 [R], of the batch."""
        if self._padding is not None:
            self._padding = self._padding[rows]

    def apply(self, scores: Logits, texts: Tokens) -> None:
        """Change float32 `scores` [R, V] in place, given each row's tokens so far, int64 [R, T]."""
        for rule in (*self._of_words, *self._of_places):
            rule(scores, texts)

    def apply_length_processors(self, scores: Logits, length: int) -> None:
        """Apply only the rules that depend on the length of a text, not on its tokens.

        Without `remove_invalid_values` each adds a number to a token's score or replaces it.
        """
        texts = np.zeros((len(scores), length), dtype=np.int64)
        for rule in self._of_places:
            rule(scores, texts)

    def active_at_length(self, length: int) -> tuple[bool, ...]:
        """Return which rules of `apply_length_processors` are active at a length."""
        return tuple(not isinstance(rule, _AtLength) or rule.condition(length) for rule in self._of_places)

    def bans_at_length(self, length: int) -> tuple[int, ...] | None:
        """Return the tokens that are banned at a length; None if a rule changes other scores there.

        If only these are banned, the n best tokens are among the n + len(bans) highest logits.
        """
        banned: list[int] = []
        for rule in (*self._of_words, *self._of_places):
            active = rule.rule if isinstance(rule, _AtLength) else rule
            if isinstance(rule, _AtLength) and not rule.condition(length):
                continue
            if not isinstance(active, _BanTokens):
                return None
            banned += active.tokens
        return tuple(dict.fromkeys(banned))

    def _history_processors(self) -> Iterator[LogitsProcessor]:
        """Yield the rules that depend on the previous tokens."""
        decoding = self.decoding
        if decoding.repetition_penalty != 1.0:
            yield lambda scores, texts: penalize_repetition(
                scores, self._without_padding(texts), decoding.repetition_penalty
            )
        if decoding.no_repeat_ngram_size:
            yield lambda scores, texts: ban_repeated_ngrams(scores, texts, decoding.no_repeat_ngram_size)
        for banned_ids in (w for w in decoding.bad_words_ids if len(w) > 1):
            yield partial(ban_sequence, sequence=banned_ids)

    def _bad_word_processors(self) -> Iterator[LogitsProcessor]:
        """Yield the rule of banned tokens."""
        decoding = self.decoding
        # as transformers does: a single end-of-sequence token cannot be a bad word
        single = [w[0] for w in decoding.bad_words_ids if len(w) == 1 and w[0] not in decoding.eos]
        if single:
            yield _BanTokens(tuple(single))

    def _length_processors(self) -> Iterator[LogitsProcessor]:
        """Yield the rules of the first and the last token, and of texts that are too short."""
        decoding, first, last = self.decoding, self.decoding.forced_bos_token_id, self.longest - 1
        shortest = decoding.min_total_length(self.prompt_length)
        if shortest > 0 and decoding.eos:
            yield _AtLength(lambda length: length < shortest, _BanTokens(tuple(decoding.eos)))
        if first is not None:
            yield _AtLength(lambda length: length == 1, _force_tokens([first]))
        if decoding.forced_eos_token_id:
            yield _AtLength(lambda length: length == last, _force_tokens(decoding.forced_eos_token_id))

    def _token_processors(self) -> Iterator[LogitsProcessor]:
        """Yield the rules that are applied after all others."""
        decoding = self.decoding
        if decoding.remove_invalid_values:
            yield lambda scores, texts: np.copyto(scores, np.nan_to_num(scores))
        if decoding.suppress_tokens:
            yield _BanTokens(tuple(decoding.suppress_tokens))
        if decoding.begin_suppress_tokens:
            late = self.prompt_length == 1 and decoding.forced_bos_token_id is not None
            begin = self.prompt_length + 1 if late else self.prompt_length
            yield _AtLength(lambda length: length == begin, _BanTokens(tuple(decoding.begin_suppress_tokens)))

    def is_eos(self, tokens: Tokens) -> BoolArray:
        """Return which of `tokens` end a text."""
        # a handful of comparisons; np.isin sorts
        is_end = np.zeros(tokens.shape, dtype=bool)
        for token in self.decoding.eos:
            is_end |= tokens == token
        return is_end

    def new_tokens(self, text: Tokens) -> list[int]:
        """Return the tokens after the prompt of `text` (int64 [T]), up to the one that ends it."""
        row: list[int] = text[self.prompt_length :].tolist()
        for index, token in enumerate(row):
            if token in self.decoding.eos:
                return row[: index + 1]
        return row

    def _without_padding(self, texts: Tokens) -> Tokens:
        """Replace the padding on the left by the row's last token, which the row contains anyway."""
        if self._padding is None:
            return texts
        beams = texts.shape[0] // self._padding.shape[0]
        padded = np.arange(texts.shape[1]) < np.repeat(self._padding, beams)[:, None]
        return np.where(padded, texts[:, -1:], texts)


def penalize_repetition(scores: Logits, texts: Tokens, penalty: float) -> None:
    """Reduce the score of every token in `texts`, once (Keskar et al. 2019, arXiv:1909.05858)."""
    token_scores = np.take_along_axis(scores, texts, axis=1)
    np.put_along_axis(
        scores, texts, np.where(token_scores < 0, token_scores * penalty, token_scores / penalty), axis=1
    )


def ban_repeated_ngrams(scores: Logits, texts: Tokens, size: int) -> None:
    """Forbid every token that would complete a run of `size` tokens for the second time."""
    length = texts.shape[1]
    if length < size:
        return
    windows = np.lib.stride_tricks.sliding_window_view(texts, size, axis=1)
    head = texts[:, length + 1 - size :]
    row_indices, starts = np.nonzero((windows[..., :-1] == head[:, None]).all(axis=-1))
    scores[row_indices, windows[row_indices, starts, -1]] = -np.inf


def ban_sequence(scores: Logits, texts: Tokens, sequence: list[int]) -> None:
    """Forbid the last token of `sequence` after the others."""
    head = sequence[:-1]
    if len(head) <= texts.shape[1]:
        matches = (texts[:, texts.shape[1] - len(head) :] == head).all(axis=1)
        scores[matches, sequence[-1]] = -np.inf


@dataclass(frozen=True)
class _BanTokens:
    """Forbid some tokens; a single one uses a slice, which numpy writes many times as fast."""

    tokens: tuple[int, ...]

    def __call__(self, scores: Logits, texts: Tokens) -> None:
        first = self.tokens[0]
        scores[:, slice(first, first + 1) if len(self.tokens) == 1 else list(self.tokens)] = -np.inf


def _force_tokens(tokens: list[int]) -> LogitsProcessor:
    def rule(scores: Logits, texts: Tokens) -> None:
        scores[:] = -np.inf
        scores[:, tokens] = 0.0

    return rule


@dataclass(frozen=True)
class _AtLength:
    """A rule for the text lengths of `condition`."""

    condition: Callable[[int], bool]
    rule: LogitsProcessor

    def __call__(self, scores: Logits, texts: Tokens) -> None:
        if self.condition(texts.shape[1]):
            self.rule(scores, texts)


def filter_logits(scores: Logits, temperature: float, top_k: int, top_p: float) -> None:
    """Filter float32 `scores` [R, V] in place; excluded tokens get -inf.

    Args:
        scores: unnormalized log-probabilities; -inf for forbidden tokens.
        temperature: divisor of the scores.
        top_k: number of most likely tokens that are kept (with ties of the last one); 0 keeps all.
        top_p: the most likely tokens with at least this total probability are kept; 1 keeps all.
    """
    if temperature != 1.0:
        scores /= temperature
    if 0 < top_k < scores.shape[1]:
        last = np.partition(scores, -top_k, axis=1)[:, -top_k, None]
        scores[scores < last] = -np.inf
    if top_p < 1.0:
        _filter_top_p(scores, top_p)


def _filter_top_p(scores: Logits, top_p: float) -> None:
    # after top-k almost everything is excluded: sort only the columns that some row still has
    columns = np.flatnonzero(np.isfinite(scores).any(axis=0))
    candidate_scores = scores[:, columns]
    order = np.argsort(candidate_scores, axis=1, kind="stable")
    cumulative = np.cumsum(_probabilities(np.take_along_axis(candidate_scores, order, axis=1)), axis=1)
    removed = cumulative <= 1 - top_p
    removed[:, -1] = False  # the most likely token is always kept
    row_indices, ranks = np.nonzero(removed)
    candidate_scores[row_indices, order[row_indices, ranks]] = -np.inf
    scores[:, columns] = candidate_scores


def sample_tokens(scores: Logits, random: np.random.Generator) -> Tokens:
    """Draw one token per row with the probabilities of `scores` [R, V].

    Every row takes one number from `random`, so that a row's draws do not depend on the others.

    Returns:
        int64 [R].

    Raises:
        RunError: a row has no allowed token.
    """
    columns = np.flatnonzero(np.isfinite(scores).any(axis=0))
    if not columns.size:
        raise RunError(
            "The generation settings forbid every possible next token. Allow at least one.",
            code="no-allowed-token",
        )
    sums = np.cumsum(_probabilities(scores[:, columns]), axis=1)
    thresholds = random.random((scores.shape[0], 1)) * sums[:, -1:]
    # the first token whose cumulative sum exceeds the drawn number; a token without probability never does
    indices = (sums <= thresholds).sum(axis=1)
    sampled: Tokens = columns[indices].astype(np.int64)
    return sampled


def _probabilities(scores: Logits) -> NDArray[np.float64]:
    exps = np.exp(scores.astype(np.float64) - scores.max(axis=1, keepdims=True))
    probabilities: NDArray[np.float64] = exps / exps.sum(axis=1, keepdims=True)
    return probabilities
