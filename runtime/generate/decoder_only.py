"""Decoder-only language models: how a prompt is taken in, where its tokens stand, what a step feeds.

One graph takes prompts and single tokens: input_ids and position_ids [R, S], and the attention mask of all
that was fed [R, P + S].

Shapes: B = batch, L = prompt, R = rows, S = tokens fed at once, P = tokens fed before, V = vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from smelt.runtime.backends.backend import WHOLE, Graph, Graphs
from smelt.runtime.batch import Batch, Logits, Tokens
from smelt.runtime.causal import positions
from smelt.runtime.runner import Runner


@dataclass
class DecoderOnlyState:
    """held: the backend's, the keys and values of P places. mask: int64 [R, P], 1 where a token was fed."""

    held: Any
    mask: Tokens


class DecoderOnly(Runner):
    """A `Runner` of a language model; prompts are padded on the left."""

    in_pieces: ClassVar[bool] = True
    graphs: ClassVar[Graphs] = Graphs(
        Graph("model", frozenset({"input_ids", "attention_mask", "position_ids"}), frozenset({"logits"})),
        whole=WHOLE,
    )

    def forward(self, batch: Batch) -> Logits:
        """Return float32 [B, L, V] for a batch padded on the right."""
        return self.extend(self.start(batch.input_ids.shape[0]), batch.input_ids, batch.attention_mask)

    def encode(self, batch: Batch) -> DecoderOnlyState:
        """Feed all tokens but the last of a batch that is padded on the left."""
        state = self.start(batch.input_ids.shape[0])
        if batch.input_ids.shape[1] > 1:
            self._feed(state, batch.input_ids[:, :-1], batch.attention_mask[:, :-1], 0)
        return state

    def decode_step(self, state: DecoderOnlyState, tokens: Tokens) -> Logits:
        """Feed one token per row (int64 [R]), advance `state` in place, return float32 [R, V]."""
        ids = tokens[:, None]
        return self._step(state, ids, np.ones_like(ids), 1)[:, -1]

    def start(self, rows: int) -> DecoderOnlyState:
        """Return the state of `rows` rows that have seen nothing."""
        return DecoderOnlyState(self.backend.start(rows), np.zeros((rows, 0), dtype=np.int64))

    def extend(self, state: DecoderOnlyState, ids: Tokens, mask: Tokens, last: int = 0) -> Logits:
        """Feed int64 [R, S] with their mask, advance `state`, return float32 [R, S or last, V].

        Args:
            state: changed in place.
            ids: what to feed; S > 1 on a state that has seen tokens is only for R = 1.
            mask: 1 where a token is.
            last: of how many of the last tokens logits are wanted; 0 for all.

        Raises:
            InputError: the backend cannot take several tokens on top of a past for these rows.
            RunError: more tokens in all than the runtime was built for, or the device failed.
        """
        found = self._feed(state, ids, mask, last or ids.shape[1])
        return np.concatenate(found, axis=1) if len(found) > 1 else found[0]

    def _feed(self, state: DecoderOnlyState, ids: Tokens, mask: Tokens, last: int) -> list[Logits]:
        """Feed as many tokens at once as the backend takes; return the logits of the `last` ones in parts."""
        length = ids.shape[1]
        most = self.backend.at_once or length
        found = []
        for at in range(0, length, most):
            end = min(length, at + most)
            wanted = min(end - at, max(0, end - (length - last)))
            logits = self._step(state, ids[:, at:end], mask[:, at:end], wanted)
            if wanted:
                found.append(logits[:, -wanted:])
        return found

    def _step(self, state: DecoderOnlyState, ids: Tokens, mask: Tokens, last: int) -> Logits:
        whole = np.concatenate([state.mask, mask], axis=1)
        feeds = {
            "input_ids": ids,
            "attention_mask": whole,
            "position_ids": positions(whole)[:, -ids.shape[1] :],
        }
        logits = self.backend.step(state.held, feeds, last)
        state.mask = whole
        return logits

    def reorder(self, state: DecoderOnlyState, rows: Tokens) -> DecoderOnlyState:
        """Return the state whose row i is the row rows[i] (int64 [R]) of `state`, which is used up."""
        if not np.array_equal(rows, np.arange(state.mask.shape[0])):
            self.backend.reorder(state.held, rows, shared=True)  # rows of one text share nothing
            state.mask = state.mask[rows]
        return state


def first_logits(runner: Runner, batch: Batch, tokens: Tokens, at_once: bool) -> tuple[Any, Logits]:
    """Take in a batch; return its state and what follows each row, float32 [B, V].

    Args:
        runner: any that generates.
        batch: what to begin with.
        tokens: int64 [B], the last token of each prompt, or the decoder's first.
        at_once: feed prompts with their last token, as a graph of the whole generation does: scales that
            int8 products take from all that one call is fed are the same then. Only of a `DecoderOnly`.
    """
    if at_once and isinstance(runner, DecoderOnly):
        state = runner.start(len(tokens))
        return state, runner.extend(state, batch.input_ids, batch.attention_mask, 1)[:, -1]
    taken = runner.encode(batch)
    return taken, runner.decode_step(taken, tokens)
