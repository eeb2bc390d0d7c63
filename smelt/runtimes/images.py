"""From images to logits, for every runner: decode, resize and normalize, batch, classify.

Images of a split are decoded on demand: all of them would not fit in memory. A classifier is one call of one
graph for a batch.

Shapes: B = batch, C = classes, h, w = height and width of the model's input.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from smelt.core.errors import InputError
from smelt.core.process_group import merge_shares, own_batches
from smelt.core.stage import Progress, no_progress
from smelt.data.images import IMAGE_FORMATS, check_image, read_image_bytes
from smelt.data.splits import Split
from smelt.models.image_processor import DEFAULT_IMAGE_SIZE, ImageProcessor, Pixels, read_processor
from smelt.runtimes.backend import GraphInterface, Logits, ModelGraphs, check_finite_outputs
from smelt.runtimes.runner import MODEL_GRAPH, Runner

if TYPE_CHECKING:
    from PIL.Image import Image


PIXEL_VALUES = "pixel_values"


@dataclass(frozen=True)
class ImageBatch:
    """Images of one size. pixel_values: float32 [B, 3, h, w]."""

    pixel_values: NDArray[np.float32]

    @property
    def size(self) -> tuple[int, int]:
        """Return (h, w)."""
        return self.pixel_values.shape[2], self.pixel_values.shape[3]


# A path, a file in an archive (smelt.data.images), or an open image.
ImageSource: TypeAlias = "str | Image"


def image_logits(
    runner: Any,
    images: Sequence[ImageSource],
    batch_size: int = 32,
    progress: Progress = no_progress,
    names: Sequence[str] | None = None,
) -> NDArray[np.float32]:
    """Return float32 logits [n, C] for `images`, in order.

    Args:
        runner: an `ImageClassifierRunner`, or a wrapper of one.
        images: n of them.
        batch_size: images per batch; no more than that are decoded at a time.
        progress: called for each batch.
        names: names of the images in messages; default: their numbers.

    Raises:
        InputError: an image cannot be read, or images of one batch have different sizes.
        RunError: `non-finite-outputs`.
    """
    found: dict[int, NDArray[np.float32]] = {}
    for number, at in own_batches(range(0, len(images), batch_size)):
        part = range(at, min(len(images), at + batch_size))
        named = [names[i] if names else f"image {i + 1}" for i in part]
        found[number] = runner.forward(batch_images([images[i] for i in part], runner.processor, named))
        progress(part.stop, len(images), "images")
    if not images:
        raise InputError("No images were given.", code="empty-data")
    return check_finite_outputs(np.concatenate(merge_shares(found)))


def batch_images(
    images: Sequence[ImageSource], processor: ImageProcessor, names: Sequence[str]
) -> ImageBatch:
    """Return `images` as one batch; see `image_logits` for exceptions."""
    pixels = [load_pixels(image, processor, name) for image, name in zip(images, names, strict=True)]
    for name, array in zip(names, pixels, strict=True):
        if array.shape != pixels[0].shape:
            raise InputError(
                f"{name}: {array.shape[2]} x {array.shape[1]} pixels, {names[0]}: {pixels[0].shape[2]} x"
                f" {pixels[0].shape[1]}; all images of a batch must have the same size. Set size"
                " with height and width, or do_center_crop, in preprocessor_config.json.",
                code="different-image-sizes",
            )
    return ImageBatch(np.stack(pixels))


def load_pixels(image: ImageSource, processor: ImageProcessor, name: str) -> Pixels:
    """Return float32 [3, h, w].

    Raises:
        InputError: it cannot be read; `name` is its name in the message.
    """
    from PIL import Image

    if isinstance(image, str):
        check_image(image, name)
    try:
        if not isinstance(image, str):
            return processor(image)
        with Image.open(io.BytesIO(read_image_bytes(image)), formats=IMAGE_FORMATS) as opened:
            return processor(opened)
    except InputError as error:
        raise InputError(f"{name}: {error}", code=error.code) from error
    except Exception as error:  # a truncated file: Pillow's decoders raise different exceptions
        label = f"{name}: {image}" if isinstance(image, str) else name
        raise InputError(f"{label}: the image cannot be read: {error}", code="damaged-image") from error


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


_PATCH = 16 * 16  # pixels that count as a token, where batches hold a bounded number of these


@dataclass(frozen=True, slots=True)
class ImageInput:
    """One image of a split. reference: see `smelt.data.images`. name: its sample in messages."""

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
