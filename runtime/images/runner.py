"""Classifiers of images: one call of one graph for a batch.

Shapes: B = batch, C = classes.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

from smelt.runtime.backends.backend import Graph, Graphs
from smelt.runtime.batch import Logits
from smelt.runtime.classifier import MODEL
from smelt.runtime.images.batch import INPUT
from smelt.runtime.images.processor import ImageProcessor, read_processor
from smelt.runtime.runner import Runner


class ImageClassifier(Runner):
    """A `Runner` of images that go through a model as a whole."""

    graphs: ClassVar[Graphs] = Graphs(Graph(MODEL, frozenset({INPUT}), frozenset({"logits"})), caches=False)

    @cached_property
    def processor(self) -> ImageProcessor:
        """What makes pixels of images.

        Raises:
            InputError: its file is missing, or says what smelt does not follow.
        """
        return read_processor(self.folder)

    def forward(self, batch: Any) -> Logits:
        """Return class logits, float32 [B, C], of an `ImageBatch`."""
        logits: Logits = self.backend.call(MODEL, {INPUT: batch.pixel_values})["logits"]
        return logits
