"""An image file as Pillow opens it, made upright and to three channels of 8 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smelt.core.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image, Transpose

_ORIENTATION = 0x0112  # of EXIF: how a camera was held
_WIDE = ("PNG", "PPM")  # formats that Pillow reads with 32 bits where the file has 16


def upright_rgb(image: Image) -> Image:
    """Return `image` in RGB, as it is to be seen: turned as its EXIF says, 16 bits of grey as the upper 8.

    So viewers, `datasets` and transformers' pipelines turn it. Pillow alone makes 255 of all 16-bit greys
    above 255; of colours of 16 bits it takes the upper 8, as is done here. Transparency is left aside.

    Raises:
        InputError: its values are of 32 bits; see `require_range`.
    """
    require_range(image)
    image.load()  # TIFF is turned by this
    turned = _turn(image)
    if turned is not None:
        image = image.transpose(turned)
    return _of_16_bits(image) if image.mode.startswith("I") else image.convert("RGB")


def require_range(image: Image) -> None:
    """Look at the mode of an image; nothing is decoded.

    Raises:
        InputError: its values are whole or floating-point numbers of 32 bits, of which no file says which is
            white.
    """
    if image.mode == "F" or (image.mode == "I" and image.format not in _WIDE):
        raise InputError(
            f"values of 32 bits (Pillow's mode {image.mode}), which say not how light white is. Save it with"
            " 8 or 16 bits.",
            code="unsupported-image-mode",
        )


def _turn(image: Image) -> Transpose | None:
    """Return the transposition that makes `image` upright; None where it is."""
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    try:
        return turns.get(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # EXIF that is damaged says nothing, and the image is whole without it
        return None


def _of_16_bits(image: Image) -> Image:
    import numpy as np
    from PIL.Image import fromarray

    values = np.asarray(image).clip(0, 0xFFFF).astype(np.uint16) >> 8
    return fromarray(values.astype(np.uint8)).convert("RGB")
