"""Runner of encoder-decoder models: the encoder's outputs, the inputs of a step, and what beams share.

The encoder returns the keys and values of cross-attention, which every step of the decoder takes unchanged,
with the mask of the source; the self-attention caches of a step are the inputs of the next one.

Shapes: B = batch, L = source length, R = rows, D = width of the model, H = heads, d = width of a head,
V = vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from smelt.runtime.backends.backend import GENERATION_GRAPHS, Backend, Feeds, GraphInterface, ModelGraphs
from smelt.runtime.batch import Batch, Logits, Tokens
from smelt.runtime.generate.shortlist import Shortlist, read_shortlist, vocabulary_sizes
from smelt.runtime.runner import ModelFiles, Runner, TokenGenerator

ENCODER_GRAPH, DECODER_GRAPH = "encoder_model", "decoder_with_past_model"


@dataclass
class EncoderDecoderState:
    """backend_state: of the backend. batch_rows: int64 [R], the batch row that each row continues.

    excluded_tokens: bool [B, V], tokens that are excluded in a row of the batch; None: none.
    """

    backend_state: Any
    batch_rows: Tokens
    excluded_tokens: NDArray[np.bool_] | None = None


class EncoderDecoderRunner(Runner):
    """A `Runner` of a model that reads a text and generates another; batches are padded on the right.

    shortlist: restricts the tokens of a text; None: all tokens are allowed.
    """

    shortlist: Shortlist | None

    graphs: ClassVar[ModelGraphs] = ModelGraphs(
        encoder=GraphInterface(
            ENCODER_GRAPH, frozenset({"input_ids", "attention_mask"}), frozenset({"last_hidden_state"})
        ),
        main=GraphInterface(
            DECODER_GRAPH, frozenset({"input_ids", "encoder_attention_mask"}), frozenset({"logits"})
        ),
        generation_graphs=GENERATION_GRAPHS,
    )

    def __init__(self, files: ModelFiles, backend: Backend, generator: TokenGenerator) -> None:
        super().__init__(files, backend, generator)
        self.shortlist = read_shortlist(files.folder, files.config)

    def encoder_outputs(self, batch: Batch) -> dict[str, NDArray[np.floating[Any]]]:
        """Return the encoder's outputs by name: hidden states [B, L, D], keys and values [B, H, L, d]."""
        return self.backend.call(ENCODER_GRAPH, _encoder_feeds(batch))

    def encode(self, batch: Batch) -> EncoderDecoderState:
        """Run the encoder; nothing is decoded yet."""
        rows = batch.input_ids.shape[0]
        shared = {"encoder_attention_mask": batch.attention_mask}
        hidden = None
        if self.shortlist is not None:
            hidden = ~self.shortlist.allowed_tokens(batch, vocabulary_sizes(self.config)[1])
        return EncoderDecoderState(
            self.backend.start(rows, _encoder_feeds(batch), shared), np.arange(rows), hidden
        )

    def decode_step(self, state: EncoderDecoderState, tokens: Tokens) -> Logits:
        """Run one token per row (int64 [R]), update `state` in place, return float32 [R, V].

        Tokens that are not on a row's shortlist have -inf.
        """
        logits = self.backend.step(state.backend_state, {"input_ids": tokens.reshape(-1, 1)})
        if state.excluded_tokens is not None:
            logits[state.excluded_tokens[state.batch_rows]] = -np.inf
        return logits

    def reorder_cache(self, state: EncoderDecoderState, rows: Tokens) -> EncoderDecoderState:
        """Return the state whose row i is row rows[i] of `state`; tensors shared by beams are not copied."""
        sentences = state.batch_rows[rows]
        moved = not np.array_equal(sentences, state.batch_rows)
        if moved or not np.array_equal(rows, np.arange(len(rows))):
            self.backend.reorder_cache(state.backend_state, rows, shared=moved)
        state.batch_rows = sentences
        return state


def _encoder_feeds(batch: Batch) -> Feeds:
    return {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
