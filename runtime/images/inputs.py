"""Images of a split as inputs of a model, decoded when they are wanted: all of them would not fit in memory.

Shapes: B = batch, h, w = height and width that the model gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from smelt.core.data import Split
from smelt.runtime.images.predict import pack_images
from smelt.runtime.images.processor import USUAL_SIDE, ImageProcessor, Pixels

_PATCH = 16 * 16  # pixels that count as a token, where batches hold a bounded number of these


@dataclass(frozen=True, slots=True)
class ImageInput:
    """One image of a split. reference: see `smelt.core.rows.images`. name: what a message calls its row."""

    reference: str
    name: str
    processor: ImageProcessor = field(repr=False)

    @property
    def patches(self) -> int:
        """How many tokens it counts as."""
        height, width = self.processor.shape or (USUAL_SIDE, USUAL_SIDE)
        return max(1, height * width // _PATCH)


def images_of(split: Split, processor: ImageProcessor) -> list[ImageInput]:
    """Return the images of `split` in their order."""
    named = [f"{split.origin} row {e.row}" if e.row else split.origin for e in split.examples]
    return [ImageInput(e.text, name, processor) for e, name in zip(split.examples, named, strict=True)]


def pack_inputs(inputs: Sequence[ImageInput]) -> Pixels:
    """Return images as one array, float32 [B, 3, h, w].

    Raises:
        InputError: one cannot be read, or they have different sizes.
    """
    batch = pack_images([i.reference for i in inputs], inputs[0].processor, [i.name for i in inputs])
    return batch.pixel_values
