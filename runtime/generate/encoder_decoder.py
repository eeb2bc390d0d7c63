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

from smelt.runtime.backends.backend import WHOLE, Backend, Feeds, Graph, Graphs
from smelt.runtime.batch import Batch, Logits, Tokens
from smelt.runtime.generate.shortlist import Shortlist, read_shortlist, vocabularies
from smelt.runtime.runner import Generator, ModelFiles, Runner

ENCODER, DECODER = "encoder_model", "decoder_with_past_model"


@dataclass
class EncoderDecoderState:
    """held: the backend's. sentences: int64 [R], the batch's row that each row goes on from.

    hidden: bool [B, V], words that may not come in a row of the batch; None where all may.
    """

    held: Any
    sentences: Tokens
    hidden: NDArray[np.bool_] | None = None


class EncoderDecoder(Runner):
    """A `Runner` of a model that reads a whole text and writes another; batches are padded on the right.

    shortlist: says which words may come in a text; None where all may.
    """

    shortlist: Shortlist | None

    graphs: ClassVar[Graphs] = Graphs(
        before=Graph(ENCODER, frozenset({"input_ids", "attention_mask"}), frozenset({"last_hidden_state"})),
        main=Graph(DECODER, frozenset({"input_ids", "encoder_attention_mask"}), frozenset({"logits"})),
        whole=WHOLE,
    )

    def __init__(self, files: ModelFiles, backend: Backend, generator: Generator) -> None:
        super().__init__(files, backend, generator)
        self.shortlist = read_shortlist(files.folder, files.config)

    def encoder_outputs(self, batch: Batch) -> dict[str, NDArray[np.floating[Any]]]:
        """Return the encoder's outputs by name: hidden states [B, L, D], keys and values [B, H, L, d]."""
        return self.backend.call(ENCODER, _source(batch))

    def encode(self, batch: Batch) -> EncoderDecoderState:
        """Run the encoder; nothing is decoded yet."""
        rows = batch.input_ids.shape[0]
        shared = {"encoder_attention_mask": batch.attention_mask}
        hidden = None
        if self.shortlist is not None:
            hidden = ~self.shortlist.allowed(batch, vocabularies(self.config)[1])
        return EncoderDecoderState(self.backend.start(rows, _source(batch), shared), np.arange(rows), hidden)

    def decode_step(self, state: EncoderDecoderState, tokens: Tokens) -> Logits:
        """Feed one token per row (int64 [R]), advance `state` in place, return float32 [R, V].

        Words that are not on a row's shortlist have -inf.
        """
        logits = self.backend.step(state.held, {"input_ids": tokens.reshape(-1, 1)})
        if state.hidden is not None:
            logits[state.hidden[state.sentences]] = -np.inf
        return logits

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
