"""From images to logits, the same for every runner: decode, resize and normalize, batch, run.

Shapes: B = batch, C = classes, h, w = height and width that the model gets.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from smelt.core.errors import InputError
from smelt.core.rows.images import FORMATS, image_bytes, require_image
from smelt.core.stage import Progress, silent
from smelt.runtime.batch import finite_outputs
from smelt.runtime.images.batch import ImageBatch
from smelt.runtime.images.processor import ImageProcessor, Pixels

if TYPE_CHECKING:
    from PIL.Image import Image

# A path, a place in an archive (smelt.core.rows.images), or an image that was opened already.
Picture: TypeAlias = "str | Image"


def image_logits(
    runner: Any,
    images: Sequence[Picture],
    batch_size: int = 32,
    progress: Progress = silent,
    names: Sequence[str] | None = None,
) -> NDArray[np.float32]:
    """Return float32 logits [n, C] for `images`, in their order.

    Args:
        runner: an `ImageClassifier`, or what stands around one.
        images: n of them.
        batch_size: at once; no more than that are decoded at a time.
        progress: is told of each batch.
        names: what a message calls each of them; without, by their number.

    Raises:
        InputError: an image cannot be read, or images of one batch have different sizes.
        RunError: `non-finite-outputs`.
    """
    found: list[NDArray[np.float32]] = []
    for at in range(0, len(images), batch_size):
        part = range(at, min(len(images), at + batch_size))
        named = [names[i] if names else f"image {i + 1}" for i in part]
        found.append(runner.forward(pack_images([images[i] for i in part], runner.processor, named)))
        progress(part.stop, len(images), "images")
    if not found:
        raise InputError("No images to run the model on.", code="empty-data")
    return finite_outputs(np.concatenate(found))


def pack_images(images: Sequence[Picture], processor: ImageProcessor, names: Sequence[str]) -> ImageBatch:
    """Return `images` as one batch; see `image_logits` for what is raised."""
    pixels = [pixels_of(image, processor, name) for image, name in zip(images, names, strict=True)]
    for name, one in zip(names, pixels, strict=True):
        if one.shape != pixels[0].shape:
            raise InputError(
                f"{name}: {one.shape[2]} x {one.shape[1]} pixels, {names[0]}: {pixels[0].shape[2]} x"
                f" {pixels[0].shape[1]}; a batch needs one size. Give preprocessor_config.json a size with"
                " height and width, or do_center_crop.",
                code="different-image-sizes",
            )
    return ImageBatch(np.stack(pixels))


def pixels_of(image: Picture, processor: ImageProcessor, name: str) -> Pixels:
    """Return float32 [3, h, w].

    Raises:
        InputError: it cannot be read; `name` says which one it is.
    """
    from PIL import Image

    if isinstance(image, str):
        require_image(image, name)
    try:
        if not isinstance(image, str):
            return processor(image)
        with Image.open(io.BytesIO(image_bytes(image)), formats=FORMATS) as opened:
            return processor(opened)
    except InputError as error:
        raise InputError(f"{name}: {error}", code=error.code) from error
    except Exception as error:  # a file that is cut short: each decoder of Pillow raises what it likes
        said = f"{name}: {image}" if isinstance(image, str) else name
        raise InputError(f"{said}: not an image that can be read: {error}", code="damaged-image") from error
