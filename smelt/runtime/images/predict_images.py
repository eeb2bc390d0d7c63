"""From images to logits, for every runner: decode, resize and normalize, batch, run.

Shapes: B = batch, C = classes, h, w = height and width of the model's input.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from smelt.core.errors import InputError
from smelt.core.readers.image_rows import IMAGE_FORMATS, check_image, read_image_bytes
from smelt.core.stage import Progress, no_progress
from smelt.runtime.batch import check_finite_outputs
from smelt.runtime.images.image_batch import ImageBatch
from smelt.runtime.images.image_processor import ImageProcessor, Pixels

if TYPE_CHECKING:
    from PIL.Image import Image

# A path, a file in an archive (smelt.core.readers.image_rows), or an open image.
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
    found: list[NDArray[np.float32]] = []
    for at in range(0, len(images), batch_size):
        part = range(at, min(len(images), at + batch_size))
        named = [names[i] if names else f"image {i + 1}" for i in part]
        found.append(runner.forward(batch_images([images[i] for i in part], runner.processor, named)))
        progress(part.stop, len(images), "images")
    if not found:
        raise InputError("No images were given.", code="empty-data")
    return check_finite_outputs(np.concatenate(found))


def batch_images(
    images: Sequence[ImageSource], processor: ImageProcessor, names: Sequence[str]
) -> ImageBatch:
    """Return `images` as one batch; see `image_logits` for exceptions."""
    pixels = [load_pixels(image, processor, name) for image, name in zip(images, names, strict=True)]
    for name, one in zip(names, pixels, strict=True):
        if one.shape != pixels[0].shape:
            raise InputError(
                f"{name}: {one.shape[2]} x {one.shape[1]} pixels, {names[0]}: {pixels[0].shape[2]} x"
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
        said = f"{name}: {image}" if isinstance(image, str) else name
        raise InputError(f"{said}: the image cannot be read: {error}", code="damaged-image") from error
