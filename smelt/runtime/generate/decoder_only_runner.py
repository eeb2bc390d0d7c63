"""Runner of decoder-only language models: prompts, positions, and the inputs of a step.

One graph takes prompts and single tokens: input_ids and position_ids [R, S], and the attention mask of all
tokens so far [R, P + S].

Shapes: B = batch, L = prompt, R = rows, S = input tokens of one call, P = tokens of previous calls, V =
vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from smelt.runtime.backends.backend import GENERATION_GRAPHS, GraphInterface, ModelGraphs
from smelt.runtime.batch import Batch, Logits, Tokens
from smelt.runtime.causal import position_ids
from smelt.runtime.runner import Runner


@dataclass
class DecoderOnlyState:
    """backend_state: of the backend, with keys and values of P tokens. mask: int64 [R, P], 1 for tokens."""

    backend_state: Any
    mask: Tokens


class DecoderOnlyRunner(Runner):
    """A `Runner` of a language model; prompts are padded on the left."""

    chunked_prefill: ClassVar[bool] = True
    graphs: ClassVar[ModelGraphs] = ModelGraphs(
        GraphInterface(
            "model", frozenset({"input_ids", "attention_mask", "position_ids"}), frozenset({"logits"})
        ),
        generation_graphs=GENERATION_GRAPHS,
    )

    def forward(self, batch: Batch) -> Logits:
        """Return float32 [B, L, V] for a batch padded on the right."""
        return self.extend(self.start(batch.input_ids.shape[0]), batch.input_ids, batch.attention_mask)

    def encode(self, batch: Batch) -> DecoderOnlyState:
        """Run all tokens but the last of a batch that is padded on the left."""
        state = self.start(batch.input_ids.shape[0])
        if batch.input_ids.shape[1] > 1:
            self._feed_chunks(state, batch.input_ids[:, :-1], batch.attention_mask[:, :-1], 0)
        return state

    def decode_step(self, state: DecoderOnlyState, tokens: Tokens) -> Logits:
        """Run one token per row (int64 [R]), update `state` in place, return float32 [R, V]."""
        ids = tokens[:, None]
        return self._step(state, ids, np.ones_like(ids), 1)[:, -1]

    def start(self, rows: int) -> DecoderOnlyState:
        """Return the state of `rows` empty rows."""
        return DecoderOnlyState(self.backend.start(rows), np.zeros((rows, 0), dtype=np.int64))

    def extend(self, state: DecoderOnlyState, ids: Tokens, mask: Tokens, last: int = 0) -> Logits:
        """Run int64 [R, S] with their mask, update `state`, return float32 [R, S or last, V].

        Args:
            state: changed in place.
            ids: input tokens; S > 1 on a state that has tokens is only for R = 1.
            mask: 1 for tokens.
            last: number of last tokens whose logits are needed; 0 for all.

        Raises:
            InputError: the backend cannot take several tokens with a filled cache for these rows.
            RunError: more tokens than the engines' size limit, or the device failed.
        """
        found = self._feed_chunks(state, ids, mask, last or ids.shape[1])
        return np.concatenate(found, axis=1) if len(found) > 1 else found[0]

    def _feed_chunks(self, state: DecoderOnlyState, ids: Tokens, mask: Tokens, last: int) -> list[Logits]:
        """Run as many tokens at once as the backend takes; return the logits of the `last` ones in parts."""
        length = ids.shape[1]
        most = self.backend.max_tokens_per_call or length
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
            "position_ids": position_ids(whole)[:, -ids.shape[1] :],
        }
        logits = self.backend.step(state.backend_state, feeds, last)
        state.mask = whole
        return logits

    def reorder_cache(self, state: DecoderOnlyState, rows: Tokens) -> DecoderOnlyState:
        """Return the state whose row i is row rows[i] (int64 [R]) of `state`, which becomes invalid."""
        if not np.array_equal(rows, np.arange(state.mask.shape[0])):
            self.backend.reorder_cache(
                state.backend_state, rows, shared=True
            )  # rows of one text share nothing
            state.mask = state.mask[rows]
        return state


def prefill(runner: Runner, batch: Batch, tokens: Tokens, single_prefill: bool) -> tuple[Any, Logits]:
    """Run the prompts of a batch; return its state and the logits of each row's next token, float32 [B, V].

    Args:
        runner: of a generating model.
        batch: the prompts.
        tokens: int64 [B], the last token of each prompt, or the decoder's first.
        single_prefill: run prompts with their last token in one call, as a graph with the generation loop
            does: int8 scales, which depend on all inputs of a call, are then equal. Only for a
            `DecoderOnlyRunner`.
    """
    if single_prefill and isinstance(runner, DecoderOnlyRunner):
        state = runner.start(len(tokens))
        return state, runner.extend(state, batch.input_ids, batch.attention_mask, 1)[:, -1]
    taken = runner.encode(batch)
    return taken, runner.decode_step(taken, tokens)
