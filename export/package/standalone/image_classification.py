"""Image classification with onnxruntime, numpy and Pillow: python infer.py FILE, or file names on stdin."""

from __future__ import annotations

import base64
import binascii
import io
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from smelt.export.package.standalone.classes import json_predictions, predict_class, prediction_line
from smelt.export.package.standalone.finite_outputs import finite_outputs
from smelt.export.package.standalone.json_values import describe_value
from smelt.export.package.standalone.session import open_graph, run_command_line

IMAGE_FORMATS = (
    "JPEG",
    "PNG",
    "WEBP",
    "BMP",
    "GIF",
    "TIFF",
    "PPM",
)  # others that Pillow supports start programs
MAX_FILE_BYTES, MAX_PIXELS, MAX_SIDE = 64 * 2**20, 100_000_000, 65536


def preprocess_image(source: str | Path | bytes, settings: dict[str, Any]) -> Any:
    """Return the pixels, float32 [3, h, w], of an image: a path, or the bytes of a file.

    settings: the preprocessing, as in infer.json.

    Raises:
        ValueError: it is not an image, or too large; the message gives the reason.
    """
    name = "" if isinstance(source, bytes) else f"{source}: "
    try:
        data = source if isinstance(source, bytes) else Path(source).read_bytes()
        if len(data) > MAX_FILE_BYTES:
            raise ValueError(f"the file has {len(data):,} bytes; at most {MAX_FILE_BYTES:,} are allowed")
        with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                limit_text = f"at most {MAX_PIXELS / 1e6:.0f} megapixels are allowed"
                raise ValueError(f"the image has {image.width} x {image.height} pixels; {limit_text}")
            return resize_image(upright_rgb(image), settings)
    except UnidentifiedImageError:
        raise ValueError(f"{name}not an image of a supported format ({', '.join(IMAGE_FORMATS)})") from None
    except Exception as error:  # Pillow's decoders raise errors of any class
        raise ValueError(f"{name}this image cannot be read: {error}") from error


def upright_rgb(image: Any) -> Any:
    """Return `image` in RGB, rotated by its EXIF; of 16-bit grayscale the upper 8 bits."""
    if image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM")):
        raise ValueError("the image has 32-bit channels. Save it with 8 or 16 bits per channel")
    image.load()
    try:
        orientation = image.getexif().get(0x0112, 1)
    except Exception:  # damaged EXIF is ignored, because the image is complete without it
        orientation = 1
    transposes = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}  # EXIF orientation -> Pillow's transpose
    image = image.transpose(Image.Transpose(transposes[orientation])) if orientation in transposes else image
    if not image.mode.startswith("I"):
        return image.convert("RGB")
    values = np.asarray(image).clip(0, 0xFFFF).astype(np.uint16) >> 8
    return Image.fromarray(values.astype(np.uint8)).convert("RGB")


def resize_image(image: Any, settings: dict[str, Any]) -> Any:
    """Return the pixels of an image in RGB: resized, cropped, rescaled, normalized."""
    size = settings["size"]
    if edge := settings["edge"]:  # of the shorter side
        other = min(int(edge * max(image.size) / min(image.size)), MAX_SIDE)
        size = (other, edge) if image.width <= image.height else (edge, other)
    if size:
        image = image.resize((size[1], size[0]), resample=settings["resample"])
    values: Any = np.moveaxis(np.asarray(image), -1, 0)
    values = center_crop(values, settings["crop"]) if settings["crop"] else values
    values = values.astype(np.float64) * settings["scale"] if settings["scale"] is not None else values
    pixels = values.astype(np.float32)
    if settings["mean"]:
        mean, std = (np.array(settings[name], dtype=np.float32).reshape(3, 1, 1) for name in ("mean", "std"))
        pixels = (pixels - mean) / std
    return np.ascontiguousarray(pixels)


def center_crop(values: Any, crop: list[int]) -> Any:
    """Return the center of uint8 [3, H, W] as [3, *crop]; smaller images are padded with zeros."""
    high, padded_width = (max(actual, target) for actual, target in zip(values.shape[1:], crop, strict=True))
    top, left = (math.ceil((a - b) / 2) for a, b in zip((high, padded_width), values.shape[1:], strict=True))
    padded = np.zeros((3, high, padded_width), dtype=values.dtype)
    padded[:, top : top + values.shape[1], left : left + values.shape[2]] = values
    y, x = ((actual - target) // 2 for actual, target in zip(values.shape[1:], crop, strict=True))
    y, x = max(0, y + top), max(0, x + left)
    return padded[:, y : y + crop[0], x : x + crop[1]]


class ImageClassifier:
    """ImageClassifier(folder)(images) -> (label, probabilities) of each image.

    The label is a name; for a multi-label model, the tuple of labels with a probability above 0.5; for a
    regression model, the number. Thread-safe; `threads` is per call.
    """

    cut = 0  # images are not truncated
    first_input = (  # of the service: a white image of one pixel
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR42mP4DwABAQEAHLCMmQAAAABJRU5ErkJggg=="
    )

    def __init__(self, folder: str | Path = Path(__file__).parent, threads: int | None = None) -> None:
        config = json.loads((Path(folder) / "infer.json").read_text(encoding="utf-8"))
        self.labels, self.problem, self.images = config["labels"], config["problem"], config["images"]
        self.thresholds = config.get("thresholds")
        self.graph = open_graph(Path(folder) / "model.onnx", threads or config["threads"])

    def __call__(self, images: Iterable[Any], batch_size: int = 32) -> list[tuple[Any, Any]]:
        """Return label and probabilities, a dict by label, for each image, in their order.

        An image is a file's path, its bytes, or a result of `pixels`.
        """
        image_list, answers = list(images), []
        for start in range(0, len(image_list), batch_size):
            part = image_list[start : start + batch_size]
            batch = np.stack([x if isinstance(x, np.ndarray) else self.pixels(x) for x in part])
            batch_logits = finite_outputs(self.graph.run(["logits"], {"pixel_values": batch})[0])
            answers += [
                predict_class(logits, self.labels, self.problem, self.thresholds) for logits in batch_logits
            ]
        return answers

    def from_json(self, value: Any) -> Any:
        """Return the pixels of an image file in base64; raise ValueError if it is none."""
        if not isinstance(value, str):
            raise ValueError(f"expected an image file in base64, got {describe_value(value)}")
        try:
            return self.pixels(base64.b64decode(value, validate=True))
        except binascii.Error as error:
            raise ValueError(f"expected an image file in base64: {error}") from None

    def to_json(self, predictions: list[tuple[Any, Any]]) -> list[dict[str, Any]]:
        """Return predictions as JSON values."""
        return json_predictions(predictions)

    def pixels(self, image: str | Path | bytes) -> Any:
        """Return the pixels of an image, float32 [3, h, w]; raise ValueError if it is not an image."""
        return preprocess_image(image, self.images)


def answer_lines(model: ImageClassifier, files: list[str]) -> list[str]:
    """Return a line for each file."""
    return [prediction_line(*prediction) for prediction in model(files)]


if __name__ == "__main__":
    run_command_line(ImageClassifier, answer_lines, __doc__)
