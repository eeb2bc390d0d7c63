"""Classifiers of images: one call of one graph for a batch.

Shapes: B = batch, C = classes.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

from smelt.runtime.backends.backend import GraphInterface, ModelGraphs
from smelt.runtime.batch import Logits
from smelt.runtime.classifier import MODEL_GRAPH
from smelt.runtime.images.image_batch import PIXEL_VALUES
from smelt.runtime.images.image_processor import ImageProcessor, read_processor
from smelt.runtime.runner import Runner


class ImageClassifierRunner(Runner):
    """A `Runner` that classifies images."""

    graphs: ClassVar[ModelGraphs] = ModelGraphs(
        GraphInterface(MODEL_GRAPH, frozenset({PIXEL_VALUES}), frozenset({"logits"})), uses_cache=False
    )

    @cached_property
    def processor(self) -> ImageProcessor:
        """Return the image processor.

        Raises:
            InputError: its file is missing, or has unsupported settings.
        """
        return read_processor(self.folder)

    def forward(self, batch: Any) -> Logits:
        """Return class logits, float32 [B, C], of an `ImageBatch`."""
        logits: Logits = self.backend.call(MODEL_GRAPH, {PIXEL_VALUES: batch.pixel_values})["logits"]
        return logits
