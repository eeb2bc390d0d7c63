"""Convert images of Pillow to upright orientation and three channels of 8 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smelt.core.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image, Transpose

_EXIF_ORIENTATION = 0x0112  # EXIF tag of the camera orientation
_16_BIT_FORMATS = ("PNG", "PPM")  # formats that Pillow reads with 32 bits if the file has 16


def upright_rgb(image: Image) -> Image:
    """Return `image` in RGB, rotated by its EXIF orientation; of 16-bit greys the upper 8 bits.

    Viewers, `datasets` and transformers' pipelines rotate it in the same way. Pillow alone clips 16-bit greys
    above 255; of 16-bit colours it uses the upper 8 bits, as is done here. Transparency is ignored.

    Raises:
        InputError: its values have 32 bits; see `reject_32_bit_image`.
    """
    reject_32_bit_image(image)
    image.load()  # this already rotates TIFF
    turned = _exif_transposition(image)
    if turned is not None:
        image = image.transpose(turned)
    return _from_16_bits(image) if image.mode.startswith("I") else image.convert("RGB")


def reject_32_bit_image(image: Image) -> None:
    """Reject images with 32-bit values by their mode; nothing is decoded.

    Raises:
        InputError: its values are integers or floats of 32 bits, whose white level no file
            defines.
    """
    if image.mode == "F" or (image.mode == "I" and image.format not in _16_BIT_FORMATS):
        raise InputError(
            f"32-bit pixels (Pillow's mode {image.mode}) have no defined white level. Save the image"
            " with 8 or 16 bits.",
            code="unsupported-image-mode",
        )


def _exif_transposition(image: Image) -> Transpose | None:
    """Return the transposition that makes `image` upright; None if it already is."""
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
        return turns.get(image.getexif().get(_EXIF_ORIENTATION, 1))
    except Exception:  # damaged EXIF is ignored; the image itself is intact
        return None


def _from_16_bits(image: Image) -> Image:
    import numpy as np
    from PIL.Image import fromarray

    values = np.asarray(image).clip(0, 0xFFFF).astype(np.uint16) >> 8
    return fromarray(values.astype(np.uint8)).convert("RGB")
