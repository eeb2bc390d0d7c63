"""Classes of images, with onnxruntime, numpy and Pillow: python infer.py FILE, or file names as input."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from smelt.export.package.standalone.parts.classes import class_of, line
from smelt.export.package.standalone.parts.lines import answer_all
from smelt.export.package.standalone.parts.numbers import numbers
from smelt.export.package.standalone.parts.pixels import pixels_of
from smelt.export.package.standalone.parts.session import open_graph


class ImageClassifier:
    """ImageClassifier(folder)(images) -> (label, probabilities) of each image.

    The label is a name; of a model with several labels an image, the tuple of those above one half; of one
    that predicts a number, the number. Several threads may use one; `threads` is for each call.
    """

    cut = 0  # no image is too long

    def __init__(self, folder: str | Path = Path(__file__).parent, threads: int | None = None) -> None:
        said = json.loads((Path(folder) / "infer.json").read_text(encoding="utf-8"))
        self.labels, self.problem, self.images = said["labels"], said["problem"], said["images"]
        self.graph = open_graph(Path(folder) / "model.onnx", threads or said["threads"])

    def __call__(self, images: Iterable[Any], batch_size: int = 32) -> list[tuple[Any, Any]]:
        """Return label and probabilities, a dict by label, for each image, in their order.

        An image is the path of a file, the bytes of one, or what `pixels` made of it.
        """
        given, answers = list(images), []
        for start in range(0, len(given), batch_size):
            part = given[start : start + batch_size]
            batch = np.stack([x if isinstance(x, np.ndarray) else self.pixels(x) for x in part])
            found = numbers(self.graph.run(["logits"], {"pixel_values": batch})[0])
            answers += [class_of(logits, self.labels, self.problem) for logits in found]
        return answers

    def pixels(self, image: str | Path | bytes) -> Any:
        """Return the pixels of an image, float32 [3, h, w]; a ValueError where it is none."""
        return pixels_of(image, self.images)


def lines(model: ImageClassifier, files: list[str]) -> list[str]:
    """Return a line for each file."""
    return [line(*found) for found in model(files)]


if __name__ == "__main__":
    answer_all(ImageClassifier, lines, __doc__)
