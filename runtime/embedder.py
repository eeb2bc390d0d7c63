"""Sentence embedders: one call of one graph for a batch of texts.

Shapes: B = batch, D = numbers of a text's vector.
"""

from __future__ import annotations

from typing import ClassVar

from smelt.runtime.backends.backend import Graph, Graphs
from smelt.runtime.batch import Batch, Logits
from smelt.runtime.classifier import MODEL
from smelt.runtime.runner import Runner

VECTOR = "sentence_embedding"


class Embedder(Runner):
    """A `Runner` of texts that become vectors."""

    graphs: ClassVar[Graphs] = Graphs(
        Graph(MODEL, frozenset({"input_ids", "attention_mask"}), frozenset({VECTOR})), caches=False
    )

    def forward(self, batch: Batch) -> Logits:
        """Return the vectors of texts, float32 [B, D]."""
        feeds = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
        vectors: Logits = self.backend.call(MODEL, feeds)[VECTOR]
        return vectors
