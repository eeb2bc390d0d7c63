"""From an image file to the numbers that a model reads."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")  # others that Pillow knows start programs
MOST_BYTES, MOST_PIXELS, LONGEST = 64 * 2**20, 100_000_000, 65536


def pixels_of(source: str | Path | bytes, said: dict[str, Any]) -> Any:
    """Return the pixels, float32 [3, h, w], of an image: a path, or the bytes of a file.

    said: how, as infer.json has it.

    Raises:
        ValueError: it is no image, or larger than any that is read; the message says so.
    """
    name = "" if isinstance(source, bytes) else f"{source}: "
    try:
        data = source if isinstance(source, bytes) else Path(source).read_bytes()
        if len(data) > MOST_BYTES:
            raise ValueError(f"{len(data):,} bytes; an image file of at most {MOST_BYTES:,} is read")
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.width * image.height > MOST_PIXELS:
                most = f"at most {MOST_PIXELS / 1e6:.0f} megapixels are read"
                raise ValueError(f"an image of {image.width} x {image.height} pixels; {most}")
            return resized(upright_rgb(image), said)
    except UnidentifiedImageError:
        raise ValueError(f"{name}not an image that is read here ({', '.join(FORMATS)})") from None
    except Exception as error:  # each decoder of Pillow raises what it likes
        raise ValueError(f"{name}not an image that can be read: {error}") from error


def upright_rgb(image: Any) -> Any:
    """Return `image` in RGB, turned as its EXIF says; of 16 bits of grey the upper 8."""
    if image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM")):
        raise ValueError("values of 32 bits; save it with 8 or 16")
    image.load()
    try:
        turned = image.getexif().get(0x0112, 1)
    except Exception:  # EXIF that is damaged says nothing, and the image is whole without it
        turned = 1
    ways = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}  # of EXIF -> of Pillow
    image = image.transpose(Image.Transpose(ways[turned])) if turned in ways else image
    if not image.mode.startswith("I"):
        return image.convert("RGB")
    values = np.asarray(image).clip(0, 0xFFFF).astype(np.uint16) >> 8
    return Image.fromarray(values.astype(np.uint8)).convert("RGB")


def resized(image: Any, said: dict[str, Any]) -> Any:
    """Return the pixels of an image in RGB: resized, cropped, rescaled, normalized."""
    size = said["size"]
    if edge := said["edge"]:  # of the shorter side
        other = min(int(edge * max(image.size) / min(image.size)), LONGEST)
        size = (other, edge) if image.width <= image.height else (edge, other)
    if size:
        image = image.resize((size[1], size[0]), resample=said["resample"])
    values: Any = np.moveaxis(np.asarray(image), -1, 0)
    values = middle(values, said["crop"]) if said["crop"] else values
    values = values.astype(np.float64) * said["scale"] if said["scale"] is not None else values
    found = values.astype(np.float32)
    if said["mean"]:
        mean, std = (np.array(said[name], dtype=np.float32).reshape(3, 1, 1) for name in ("mean", "std"))
        found = (found - mean) / std
    return np.ascontiguousarray(found)


def middle(values: Any, crop: list[int]) -> Any:
    """Return the middle of uint8 [3, H, W], [3, *crop]; what is smaller gets a border of zeros."""
    high, wide = (max(have, want) for have, want in zip(values.shape[1:], crop, strict=True))
    top, left = (math.ceil((a - b) / 2) for a, b in zip((high, wide), values.shape[1:], strict=True))
    whole = np.zeros((3, high, wide), dtype=values.dtype)
    whole[:, top : top + values.shape[1], left : left + values.shape[2]] = values
    y, x = ((have - want) // 2 for have, want in zip(values.shape[1:], crop, strict=True))
    y, x = max(0, y + top), max(0, x + left)
    return whole[:, y : y + crop[0], x : x + crop[1]]
