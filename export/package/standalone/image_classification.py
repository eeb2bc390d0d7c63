"""Image classification with onnxruntime, numpy and Pillow: python infer.py FILE, or file names on stdin."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from smelt.export.package.standalone.classes import json_predictions, predict_class, prediction_line
from smelt.export.package.standalone.finite_outputs import finite_outputs
from smelt.export.package.standalone.image_files import preprocess_image
from smelt.export.package.standalone.json_values import describe_value
from smelt.export.package.standalone.session import open_graph, run_command_line


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
