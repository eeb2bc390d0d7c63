"""Images of a split as inputs of a model, decoded on demand: all of them would not fit in memory.

Shapes: B = batch, h, w = height and width of the model's input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from smelt.core.data import Split
from smelt.runtime.images.image_processor import DEFAULT_IMAGE_SIZE, ImageProcessor, Pixels
from smelt.runtime.images.predict_images import batch_images

_PATCH = 16 * 16  # pixels that count as a token, where batches hold a bounded number of these


@dataclass(frozen=True, slots=True)
class ImageInput:
    """One image of a split. reference: see `smelt.core.readers.image_rows`. name: its sample in messages."""

    reference: str
    name: str
    processor: ImageProcessor = field(repr=False)

    @property
    def patches(self) -> int:
        """Return the number of patches, which count as tokens."""
        height, width = self.processor.shape or (DEFAULT_IMAGE_SIZE, DEFAULT_IMAGE_SIZE)
        return max(1, height * width // _PATCH)


def split_images(split: Split, processor: ImageProcessor) -> list[ImageInput]:
    """Return the images of `split` in order."""
    named = [f"{split.origin} row {e.row}" if e.row else split.origin for e in split.examples]
    return [ImageInput(e.text, name, processor) for e, name in zip(split.examples, named, strict=True)]


def stack_image_inputs(inputs: Sequence[ImageInput]) -> Pixels:
    """Return images as one array, float32 [B, 3, h, w].

    Raises:
        InputError: an image cannot be read, or they have different sizes.
    """
    batch = batch_images([i.reference for i in inputs], inputs[0].processor, [i.name for i in inputs])
    return batch.pixel_values
