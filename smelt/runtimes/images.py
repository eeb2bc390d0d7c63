"""From images to logits, for every runner: decode, preprocess as configured, batch, classify.

Images of a split are decoded on demand: all of them would not fit in memory. A classifier is one call of one
graph for a batch.

Preprocessing (preprocessor_config.json) is equivalent to transformers' image processors with the Pillow
backend: resize, crop, rescale, normalize, in this order. So no torch is needed to serve an exported model.

Shapes: B = batch, C = classes, h, w = height and width of the model's input.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from smelt.core.errors import InputError
from smelt.core.files import read_json_object
from smelt.core.process_group import map_batches, merge_shares
from smelt.data.images import IMAGE_FORMATS, check_image, read_image_bytes, upright_rgb
from smelt.data.splits import Split
from smelt.generation.backend import FeedBatch, GraphInterface, Logits, ModelGraphs, check_finite_outputs
from smelt.generation.runner import Runner
from smelt.runtimes.single_call_runners import MODEL_GRAPH
from smelt.stage import Progress, no_progress

if TYPE_CHECKING:
    from PIL.Image import Image


PROCESSOR_FILE = "preprocessor_config.json"
JOINT_PROCESSOR_FILE = "processor_config.json"  # of images and texts, as transformers 5 writes it
DEFAULT_IMAGE_SIZE = 224  # of an image, where a processor does not resize images
_STANDARD = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_BILINEAR, _BICUBIC = 2, 3  # Pillow's numbers of filters
# Defaults of missing settings, by kind of processor (transformers' classes).
_CLIP_DEFAULTS: dict[str, Any] = {
    **_CLIP, "size": {"shortest_edge": 224}, "resample": _BICUBIC, "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224},
}  # fmt: skip
_DEFAULTS: dict[str, dict[str, Any]] = {
    "ViTImageProcessor": {**_STANDARD, "size": {"height": 224, "width": 224}, "resample": _BILINEAR},
    "ConvNextImageProcessor": {
        **_STANDARD, "size": {"shortest_edge": 384}, "resample": _BICUBIC, "crop_pct": 224 / 256,
    },
    "BitImageProcessor": _CLIP_DEFAULTS,
    "CLIPImageProcessor": _CLIP_DEFAULTS,
    "SiglipImageProcessor": {**_STANDARD, "size": {"height": 224, "width": 224}, "resample": _BICUBIC},
    "MobileNetV2ImageProcessor": {
        **_STANDARD, "size": {"shortest_edge": 256}, "resample": _BILINEAR, "do_center_crop": True,
        "crop_size": {"height": 224, "width": 224},
    },
    "EfficientNetImageProcessor": {
        **_STANDARD, "size": {"height": 346, "width": 346}, "resample": _BICUBIC,
        "crop_size": {"height": 289, "width": 289}, "rescale_offset": False, "include_top": True,
    },
}  # fmt: skip
# For this kind an image whose shorter side has a target below this is first enlarged, then cropped.
_CROPS, _CROPS_BELOW = "ConvNextImageProcessor", 384
_MAX_SIDE = 4096  # pixels of a side of the model's input
Pixels = NDArray[np.float32]


@dataclass(frozen=True)
class ImageProcessor:
    """Preprocessing of an image to float32 [3, h, w].

    edge: target of the shorter side, the other in proportion; None where `size` sets both. size: target
    height and width; None with an edge, or where the image is not resized. resample: Pillow's number of the
    filter. crop: height and width of the center crop, padded with black if the image is smaller; None: no
    crop. scale: factor of values of 0 to 255; None: no scaling. mean, std: of each channel, subtracted and
    divided by; None: no normalization.
    """

    edge: int | None
    size: tuple[int, int] | None
    resample: int
    crop: tuple[int, int] | None
    scale: float | None
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None

    @property
    def shape(self) -> tuple[int, int] | None:
        """Return (h, w); None where they depend on the image."""
        return self.crop or self.size

    def __call__(self, image: Image) -> Pixels:
        """Return float32 [3, h, w].

        Raises:
            InputError: values of 32 bits.
        """
        image = upright_rgb(image)
        size = self.size if self.edge is None else _resize_keeping_aspect(image.size, self.edge)
        if size is not None:
            image = image.resize((size[1], size[0]), resample=self.resample)
        values: NDArray[Any] = np.moveaxis(np.asarray(image), -1, 0)
        if self.crop is not None:
            values = _center_crop(values, self.crop)
        values = values.astype(np.float64) * self.scale if self.scale is not None else values
        pixels = values.astype(np.float32)
        if self.mean is not None and self.std is not None:
            pixels = (pixels - _channels(self.mean)) / _channels(self.std)
        return np.ascontiguousarray(pixels)


def _channels(values: tuple[float, ...]) -> NDArray[np.float32]:
    return np.array(values, dtype=np.float32).reshape(-1, 1, 1)


def _resize_keeping_aspect(size: tuple[int, int], edge: int) -> tuple[int, int]:
    """Return height and width of an image of Pillow's `size` whose shorter side is made `edge`."""
    width, height = size
    shorter, longer = (width, height) if width <= height else (height, width)
    other_edge = min(int(edge * longer / shorter), _MAX_SIDE * 16)  # limits an image of one line of pixels
    return (other_edge, edge) if width <= height else (edge, other_edge)


def _center_crop(values: NDArray[Any], crop: tuple[int, int]) -> NDArray[Any]:
    """Return the center of uint8 [3, H, W], [3, *crop]; smaller images get a border of zeros."""
    high, padded_width = (
        max(image_size, crop_size) for image_size, crop_size in zip(values.shape[1:], crop, strict=True)
    )
    top_border, left_border = (
        math.ceil((a - b) / 2) for a, b in zip((high, padded_width), values.shape[1:], strict=True)
    )
    padded = np.zeros((values.shape[0], high, padded_width), dtype=values.dtype)
    padded[:, top_border : top_border + values.shape[1], left_border : left_border + values.shape[2]] = values
    # from the image's own corner, as transformers counts
    y, x = (
        (image_size - crop_size) // 2 for image_size, crop_size in zip(values.shape[1:], crop, strict=True)
    )
    y, x = max(0, y + top_border), max(0, x + left_border)
    return padded[:, y : y + crop[0], x : x + crop[1]]


def default_processor_config(side: int) -> dict[str, Any]:
    """Return a preprocessor_config.json for a new model of images of `side` pixels."""
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True, "size": {"height": side, "width": side}, "resample": _BILINEAR,
        "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, **_STANDARD,
    }  # fmt: skip


def read_processor(folder: Path) -> ImageProcessor:
    """Read the image processor of the model in `folder`.

    Raises:
        InputError: there is none, or it has an unsupported setting, which is named.
    """
    path = folder / PROCESSOR_FILE
    joint_path = folder / JOINT_PROCESSOR_FILE
    if not path.is_file() and joint_path.is_file():
        settings = read_json_object(joint_path).get("image_processor")
        if isinstance(settings, dict):
            return parse_processor(settings, joint_path)
    if not path.is_file():
        raise InputError(
            f"{folder}: {PROCESSOR_FILE} is missing, the settings for resizing and normalizing images."
            " Save it there with processor.save_pretrained(FOLDER).",
            code="missing-file",
        )
    return parse_processor(read_json_object(path), path)


def parse_processor(values: Mapping[str, Any], path: Path) -> ImageProcessor:
    """Return the processor with the settings `values` of the file `path`; see `read_processor`."""
    kind = _processor_class(values, path)
    settings = {"do_resize": True, "do_rescale": True, "do_normalize": True, "rescale_factor": 1 / 255}
    settings |= _DEFAULTS[kind] | {name: value for name, value in values.items() if value is not None}
    if settings.get("do_pad"):
        raise InputError(
            f"{path}: do_pad is not supported; all images are resized to one size. Remove do_pad.",
            code="unsupported-preprocessing",
            setting="do_pad",
        )
    crop = _sides(settings.get("crop_size"), "crop_size", path) if settings.get("do_center_crop") else None
    edge, size = None, None
    if settings["do_resize"]:
        edge, size = _resize_target(settings["size"], square=kind == "ViTImageProcessor", path=path)
    if kind == _CROPS and size is not None:
        raise InputError(
            f"{path}: size: {kind} expects {{shortest_edge: N}}, got {settings['size']!r}.",
            code="wrong-value",
            setting="size",
        )
    if kind == _CROPS and edge is not None:
        square = (edge, edge)
        if edge < _CROPS_BELOW:
            edge, crop = int(edge / _positive(settings["crop_pct"], "crop_pct", path)), crop or square
        else:
            edge, size = None, square
    mean, std = _normalization(settings, path)
    return ImageProcessor(
        edge=edge,
        size=size,
        resample=_resample_filter(settings["resample"], path),
        crop=crop,
        scale=_positive(settings["rescale_factor"], "rescale_factor", path)
        if settings["do_rescale"]
        else None,
        mean=mean,
        std=std,
    )


def _normalization(
    settings: Mapping[str, Any], path: Path
) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    """Return mean and deviation of the channels, None without.

    EfficientNet's processor can subtract 1 after the values are scaled (`rescale_offset`), and divides by the
    deviation once more for a classifier (`include_top`).
    """
    normalizes, twice = bool(settings["do_normalize"]), bool(settings.get("include_top"))
    offset = 1.0 if settings["do_rescale"] and settings.get("rescale_offset") else 0.0
    if not (normalizes or twice or offset):
        return None, None
    mean = _numbers(settings["image_mean"], "image_mean", path) if normalizes else (0.0,) * 3
    std = _numbers(settings["image_std"], "image_std", path, least=1e-12)
    return tuple(m + offset for m in mean), tuple(s ** (normalizes + twice) for s in std)


def _processor_class(values: Mapping[str, Any], path: Path) -> str:
    name = values.get("image_processor_type") or values.get("feature_extractor_type") or ""
    kind = str(name).removesuffix("Fast").removesuffix("Pil").replace("FeatureExtractor", "ImageProcessor")
    if kind not in _DEFAULTS:
        raise InputError(
            f"{path}: image_processor_type is '{name}'; supported are {', '.join(_DEFAULTS)}. If one of them"
            " is equivalent, set it there.",
            code="unsupported-preprocessing",
            setting="image_processor_type",
        )
    return kind


def _resize_target(value: Any, square: bool, path: Path) -> tuple[int | None, tuple[int, int] | None]:
    """Return the length of the shorter side, or height and width."""
    if isinstance(value, Mapping) and set(value) == {"shortest_edge"}:
        return _side(value["shortest_edge"], "size", path), None
    if isinstance(value, int) and not square:
        return _side(value, "size", path), None
    return None, _sides(value, "size", path)


def _sides(value: Any, name: str, path: Path) -> tuple[int, int]:
    if isinstance(value, Mapping) and set(value) == {"height", "width"}:
        return _side(value["height"], name, path), _side(value["width"], name, path)
    if isinstance(value, Mapping) or value is None:
        expected_form = "{height: N, width: N}" + (" or {shortest_edge: N}" if name == "size" else "")
        raise InputError(
            f"{path}: {name}: expected {expected_form}, got {value!r}.", code="wrong-value", setting=name
        )
    edge = _side(value, name, path)
    return edge, edge


def _side(value: Any, name: str, path: Path) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _MAX_SIDE:
        return value
    raise InputError(
        f"{path}: {name}: expected a number of pixels from 1 to {_MAX_SIDE}, got {value!r}.",
        code="wrong-value",
        setting=name,
    )


def _positive(value: Any, name: str, path: Path) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0:
        return float(value)
    raise InputError(
        f"{path}: {name}: expected a number above 0, got {value!r}.", code="wrong-value", setting=name
    )


def _resample_filter(value: Any, path: Path) -> int:
    if isinstance(value, int) and value in range(6):
        return value
    raise InputError(
        f"{path}: resample: expected the number of one of Pillow's filters, 0 to 5, got {value!r}.",
        code="wrong-value",
        setting="resample",
    )


def _numbers(value: Any, name: str, path: Path, least: float = -math.inf) -> tuple[float, ...]:
    if isinstance(value, int | float):
        value = [value] * 3
    is_triple = (
        isinstance(value, Sequence) and len(value) == 3 and all(isinstance(n, int | float) for n in value)
    )
    if not is_triple or not all(math.isfinite(n) and n > least for n in value):
        raise InputError(
            f"{path}: {name}: expected three numbers, one for each channel, got {value!r}.",
            code="wrong-value",
            setting=name,
        )
    return tuple(float(n) for n in value)


PIXEL_VALUES = "pixel_values"


@dataclass(frozen=True)
class ImageBatch(FeedBatch):
    """Images of one size. pixel_values: float32 [B, 3, h, w]."""

    pixel_values: NDArray[np.float32]

    @property
    def feeds(self) -> dict[str, NDArray[Any]]:
        """The pixels."""
        return {PIXEL_VALUES: self.pixel_values}

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

    def classify(_: int, indices: range) -> NDArray[np.float32]:
        batch_names = [names[i] if names else f"image {i + 1}" for i in indices]
        logits: NDArray[np.float32] = runner.forward(
            batch_images([images[i] for i in indices], runner.processor, batch_names)
        )
        return logits

    results: dict[int, NDArray[np.float32]] = {}
    batches = [
        range(start, min(len(images), start + batch_size)) for start in range(0, len(images), batch_size)
    ]
    for indices, logits in map_batches(classify, batches, runner.workers):
        results.update(zip(indices, logits, strict=True))
        progress(indices.stop, len(images), "images")
    if not images:
        raise InputError("No images were given.", code="empty-data")
    return check_finite_outputs(np.stack(merge_shares(results)))


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
        with Image.open(io.BytesIO(read_image_bytes(image)), formats=IMAGE_FORMATS) as opened_image:
            return processor(opened_image)
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
    image_names = [f"{split.origin} row {e.row}" if e.row else split.origin for e in split.examples]
    return [ImageInput(e.text, name, processor) for e, name in zip(split.examples, image_names, strict=True)]


def stack_image_inputs(inputs: Sequence[ImageInput]) -> Pixels:
    """Return images as one array, float32 [B, 3, h, w].

    Raises:
        InputError: an image cannot be read, or they have different sizes.
    """
    batch = batch_images([i.reference for i in inputs], inputs[0].processor, [i.name for i in inputs])
    return batch.pixel_values
