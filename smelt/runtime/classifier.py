"""Classifiers: one call of one graph for a batch.

Shapes: B = batch, L = tokens of the longest row, C = classes.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from smelt.runtime.backends.backend import GraphInterface, ModelGraphs
from smelt.runtime.batch import Batch, Logits
from smelt.runtime.runner import Runner

MODEL_GRAPH = "model"


class ClassifierRunner(Runner):
    """A `Runner` that classifies texts."""

    graphs: ClassVar[ModelGraphs] = ModelGraphs(
        GraphInterface(MODEL_GRAPH, frozenset({"input_ids", "attention_mask"}), frozenset({"logits"})),
        uses_cache=False,
    )

    def forward(self, batch: Batch) -> Logits:
        """Return class logits, float32 [B, C]."""
        types = batch.token_type_ids
        feeds = {
            "input_ids": batch.input_ids,
            "attention_mask": batch.attention_mask,
            "token_type_ids": np.zeros_like(batch.input_ids) if types is None else types,
        }
        logits: Logits = self.backend.call(MODEL_GRAPH, feeds)["logits"]
        return logits
