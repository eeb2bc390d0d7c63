"""Image classification: the class of an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.data.examples import parse_image, parse_labeled
from smelt.data.images import check_image, read_image_rows
from smelt.data.read_rows import RowIterator
from smelt.data.splits import Columns, Example, Split
from smelt.tasks.classification import Classification
from smelt.tasks.spec import PackageClass

if TYPE_CHECKING:
    from smelt.generation.config import GenerationSettings
    from smelt.tasks.samples import EncodedSample


class ImageClassification(Classification):
    """Image classification."""

    name = "image-classification"
    column_roles = ("image", "label")
    method = "classify"
    command_input = "IMAGE.png"
    call = "image file to label"
    call_includes = "reading, decoding and resizing files are"
    sample_noun = "image"
    rate_unit = "images/s"
    preprocessing = "decoding"
    preprocessing_libraries = ("pillow",)
    row_example = '{"image": "FILE", "label": "..."}, or a folder with a folder for each class'
    package = PackageClass(
        "image_classification",
        "ImageClassifier",
        'print(ImageClassifier()(["photo.jpg"]))',
        ("pillow",),
        "image/jpeg",
    )

    def read_rows(self, path: Path, columns: Columns) -> RowIterator:
        """Yield rows with a reference to an image, as `TaskSpec.read_rows`."""
        return read_image_rows(path, columns.image, columns.label)

    def check_input(self, text: str, location: str) -> None:
        """Check the header of an image."""
        check_image(text, location)

    def parse_row(
        self, row: Mapping[str, Any], location: str, columns: Columns, lacks_target: bool
    ) -> Example:
        """Return the sample of a row, as `TaskSpec.parse_row`."""
        image = parse_image(row, location, columns)
        return parse_labeled(image, None, row, location, columns, lacks_target)

    def placeholder_row(self, text: str, config: Mapping[str, Any]) -> None:
        """Return None: images cannot be written as text."""

    def encode(
        self, split: Split, config: Any, tokenizer: Any, limit: int, length: int | None
    ) -> tuple[list[EncodedSample], int]:
        """Return images, decoded when their batch is made, as `TaskSpec.encode`."""
        from smelt.runtimes.images import split_images
        from smelt.tasks.samples import EncodedSample, classifier_targets

        labels = classifier_targets(split.examples, config, split.origin)
        images = split_images(split, tokenizer)
        return [EncodedSample([], None, y, image=image) for image, y in zip(images, labels, strict=True)], 0

    def count_truncated(
        self, runner: Any, examples: Sequence[Example], generation: GenerationSettings
    ) -> int:
        """Return 0: images are resized."""
        return 0


TASK = ImageClassification()
