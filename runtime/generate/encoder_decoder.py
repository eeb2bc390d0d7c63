"""Models with an encoder and a decoder: what is encoded once, what a step feeds, what beams share.

The encoder leaves the keys and values of cross-attention, which every step of the decoder takes as they are,
with the mask of the source; what one step leaves of self-attention is what the next one takes.

Shapes: B = batch, L = source length, R = rows, D = width of the model, H = heads, d = width of a head,
V = vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from smelt.runtime.backends.backend import WHOLE, Feeds, Graph, Graphs
from smelt.runtime.batch import Batch, Logits, Tokens
from smelt.runtime.runner import Runner

ENCODER, DECODER = "encoder_model", "decoder_with_past_model"


@dataclass
class EncoderDecoderState:
    """held: the backend's. sentences: int64 [R], the batch's row that each row goes on from."""

    held: Any
    sentences: Tokens


class EncoderDecoder(Runner):
    """A `Runner` of a model that reads a whole text and writes another; batches are padded on the right."""

    graphs: ClassVar[Graphs] = Graphs(
        before=Graph(ENCODER, frozenset({"input_ids", "attention_mask"}), frozenset({"last_hidden_state"})),
        main=Graph(DECODER, frozenset({"input_ids", "encoder_attention_mask"}), frozenset({"logits"})),
        whole=WHOLE,
    )

    def encoder_outputs(self, batch: Batch) -> dict[str, NDArray[np.floating[Any]]]:
        """Return the encoder's outputs by name: hidden states [B, L, D], keys and values [B, H, L, d]."""
        return self.backend.call(ENCODER, _source(batch))

    def encode(self, batch: Batch) -> EncoderDecoderState:
        """Run the encoder; nothing is decoded yet."""
        rows = batch.input_ids.shape[0]
        shared = {"encoder_attention_mask": batch.attention_mask}
        return EncoderDecoderState(self.backend.start(rows, _source(batch), shared), np.arange(rows))

    def decode_step(self, state: EncoderDecoderState, tokens: Tokens) -> Logits:
        """Feed one token per row (int64 [R]), advance `state` in place, return float32 [R, V]."""
        return self.backend.step(state.held, {"input_ids": tokens.reshape(-1, 1)})

    def reorder(self, state: EncoderDecoderState, rows: Tokens) -> EncoderDecoderState:
        """Return the state whose row i is the row rows[i] of `state`; what beams share is not copied."""
        sentences = state.sentences[rows]
        moved = not np.array_equal(sentences, state.sentences)
        if moved or not np.array_equal(rows, np.arange(len(rows))):
            self.backend.reorder(state.held, rows, shared=moved)
        state.sentences = sentences
        return state


def _source(batch: Batch) -> Feeds:
    return {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
