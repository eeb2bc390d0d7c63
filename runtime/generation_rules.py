"""Which token may come when: the rules that change scores before a token is chosen.

They are applied in the order of transformers' `_get_logits_processor` (generation/utils.py, 5.23), each
as its class in generation/logits_process.py does; both count a text's prompt as part of it.

Shapes: R = rows (sentences, times beams), P = prompt, T = tokens so far, V = vocabulary.
"""

from __future__ import annotations

import numpy as np

from smelt.runtime.decoding import Decoding
from smelt.runtime.runner import Logits, Tokens


class Rules:
    """The rules of one batch.

    prompt: int64 [B, P], what stands before the first new token: the start token, or a decoder-only
    model's whole input. mask: int64 [B, P], 0 where a prompt is padded on the left, or None.
    longest: tokens that a text may have, its prompt counted.
    """

    def __init__(self, decoding: Decoding, prompt: Tokens, mask: Tokens | None) -> None:
        self.decoding, self.prompt = decoding, prompt
        self.prompt_length = prompt.shape[1]
        self.longest = decoding.longest(self.prompt_length)
        self.eos = np.array(decoding.eos, dtype=np.int64)
        self._shortest = decoding.shortest(self.prompt_length)
        # as transformers does: a single end-of-sequence token cannot be a bad word
        words = [w for w in decoding.bad_words_ids if w not in [[e] for e in decoding.eos]]
        self._bad_tokens = [w[0] for w in words if len(w) == 1]
        self._bad_sequences = [w for w in words if len(w) > 1]
        late = self.prompt_length == 1 and decoding.forced_bos_token_id is not None
        self._begin = self.prompt_length + 1 if late else self.prompt_length
        self._padding = None if mask is None or mask.all() else (mask != 0).argmax(axis=1)

    def apply(self, scores: Logits, texts: Tokens) -> None:
        """Change float32 `scores` [R, V] in place, given each row's tokens so far, int64 [R, T]."""
        wishes = self.decoding
        length = texts.shape[1]
        if wishes.repetition_penalty != 1.0:
            penalize_repetition(scores, self._without_padding(texts), wishes.repetition_penalty)
        if wishes.no_repeat_ngram_size:
            ban_repeated_ngrams(scores, texts, wishes.no_repeat_ngram_size)
        if self._bad_tokens:
            scores[:, self._bad_tokens] = -np.inf
        for word in self._bad_sequences:
            ban_sequence(scores, texts, word)
        if length < self._shortest:
            scores[:, self.eos] = -np.inf
        if length == 1 and wishes.forced_bos_token_id is not None:
            _force(scores, [wishes.forced_bos_token_id])
        if length == self.longest - 1 and wishes.forced_eos_token_id:
            _force(scores, wishes.forced_eos_token_id)
        if wishes.remove_invalid_values:
            np.nan_to_num(scores, copy=False)
        if wishes.suppress_tokens:
            scores[:, wishes.suppress_tokens] = -np.inf
        if wishes.begin_suppress_tokens and length == self._begin:
            scores[:, wishes.begin_suppress_tokens] = -np.inf

    def ends(self, tokens: Tokens) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        """Say which of `tokens` end a text."""
        # a handful of comparisons; np.isin sorts
        hit = np.zeros(tokens.shape, dtype=bool)
        for token in self.decoding.eos:
            hit |= tokens == token
        return hit

    def new_tokens(self, text: Tokens) -> list[int]:
        """Return what stands behind the prompt of `text` (int64 [T]), up to the token that ends it."""
        row: list[int] = text[self.prompt_length :].tolist()
        for index, token in enumerate(row):
            if token in self.decoding.eos:
                return row[: index + 1]
        return row

    def _without_padding(self, texts: Tokens) -> Tokens:
        """Replace the padding on the left by the row's last token, which is there anyway."""
        if self._padding is None:
            return texts
        beams = texts.shape[0] // self._padding.shape[0]
        padded = np.arange(texts.shape[1]) < np.repeat(self._padding, beams)[:, None]
        return np.where(padded, texts[:, -1:], texts)


def penalize_repetition(scores: Logits, texts: Tokens, penalty: float) -> None:
    """Make every token that `texts` hold less likely, once (Keskar et al. 2019, arXiv:1909.05858)."""
    found = np.take_along_axis(scores, texts, axis=1)
    np.put_along_axis(scores, texts, np.where(found < 0, found * penalty, found / penalty), axis=1)


def ban_repeated_ngrams(scores: Logits, texts: Tokens, size: int) -> None:
    """Forbid every token that would complete a run of `size` tokens for the second time."""
    length = texts.shape[1]
    if length < size:
        return
    windows = np.lib.stride_tricks.sliding_window_view(texts, size, axis=1)
    head = texts[:, length + 1 - size :]
    rows, places = np.nonzero((windows[..., :-1] == head[:, None]).all(axis=-1))
    scores[rows, windows[rows, places, -1]] = -np.inf


def ban_sequence(scores: Logits, texts: Tokens, word: list[int]) -> None:
    """Forbid the last token of `word` wherever the others have just come."""
    head = word[:-1]
    if len(head) <= texts.shape[1]:
        hit = (texts[:, texts.shape[1] - len(head) :] == head).all(axis=1)
        scores[hit, word[-1]] = -np.inf


def _force(scores: Logits, tokens: list[int]) -> None:
    scores[:] = -np.inf
    scores[:, tokens] = 0.0
