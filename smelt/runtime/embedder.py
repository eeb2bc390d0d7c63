"""Sentence embedders: one call of one graph for a batch of texts.

Shapes: B = batch, D = dimension of a text's vector.
"""

from __future__ import annotations

from typing import ClassVar

from smelt.runtime.backends.backend import GraphInterface, ModelGraphs
from smelt.runtime.batch import Batch, Logits
from smelt.runtime.classifier import MODEL_GRAPH
from smelt.runtime.runner import Runner

EMBEDDING_OUTPUT = "sentence_embedding"


class EmbedderRunner(Runner):
    """A `Runner` that returns vectors of texts."""

    graphs: ClassVar[ModelGraphs] = ModelGraphs(
        GraphInterface(
            MODEL_GRAPH, frozenset({"input_ids", "attention_mask"}), frozenset({EMBEDDING_OUTPUT})
        ),
        uses_cache=False,
    )

    def forward(self, batch: Batch) -> Logits:
        """Return the vectors of texts, float32 [B, D]."""
        feeds = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
        vectors: Logits = self.backend.call(MODEL_GRAPH, feeds)[EMBEDDING_OUTPUT]
        return vectors
