"""The model of infer.py for the service: inputs and answers are JSON values."""

from __future__ import annotations

import base64
import binascii
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

TASK_CLASSES = {
    "language-modeling": "Writer",
    "text-generation": "Answerer",
    "text-classification": "Classifier",
    "sentence-similarity": "Embedder",
    "image-classification": "ImageClassifier",
}
IMAGES, PAIRS, VECTORS = "image-classification", "text-classification", "sentence-similarity"
# a white image of one pixel, for the first call of an image model
WHITE_PIXEL_PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR42mP4DwABAQEAHLCMmQAAAABJRU5ErkJggg=="
)


class PackagedModel:
    """Opens the class of infer.py for the task and calls it once, because the first call is the slowest.

    A service for another runtime has its own infer.py, which needs only this class and `__call__`.
    """

    def __init__(self, folder: Path, task: str, threads: int) -> None:
        self.task = task
        spec = importlib.util.spec_from_file_location("infer", folder / "infer.py")
        if spec is None or spec.loader is None:
            raise FileNotFoundError(f"{folder}: no infer.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules["infer"] = module
        spec.loader.exec_module(module)
        self.model = getattr(module, TASK_CLASSES.get(self.task, "Translator"))(folder, threads=threads)
        self.answer([self.read(WHITE_PIXEL_PNG if self.task == IMAGES else "Warm up.")])

    def read(self, value: Any) -> Any:
        """Return the model's input for one of the `inputs` of a request.

        Raises:
            ValueError: it is not valid; the message contains what is expected.
        """
        if self.task == IMAGES:
            if not isinstance(value, str):
                raise ValueError(f"expected an image file in base64, got {describe_value(value)}")
            try:
                return self.image(base64.b64decode(value, validate=True))
            except binascii.Error as error:
                raise ValueError(f"expected an image file in base64: {error}") from None
        pair = isinstance(value, list) and len(value) == 2 and self.task == PAIRS
        texts = value if pair else [value]
        if not all(isinstance(text, str) for text in texts):
            pairs = " or a list of two" if self.task == PAIRS else ""
            raise ValueError(f"expected a text{pairs}, got {describe_value(value)}")
        try:
            "".join(texts).encode()
        except UnicodeEncodeError:
            raise ValueError("a text contains a lone surrogate (\\ud800 to \\udfff). Remove it") from None
        return tuple(texts) if pair else value

    def image(self, data: bytes) -> Any:
        """Return the model's input for the bytes of an image file; raise ValueError as `read`."""
        return self.model.pixels(data)

    def answer(self, inputs: list[Any]) -> list[Any]:
        """Return a JSON answer for each result of `read`."""
        found = self.model(inputs, batch_size=len(inputs))
        if self.task == VECTORS:
            return [[round(x, 7) for x in vector.tolist()] for vector in found]
        if self.task in (IMAGES, PAIRS):
            return [{"label": label, "probabilities": chances} for label, chances in found]
        return list(found)

    @property
    def cut(self) -> int:
        """The number of texts that were truncated."""
        return int(getattr(self.model, "cut", getattr(getattr(self.model, "tokenizer", None), "cut", 0)))


def describe_value(value: Any) -> str:
    """Return a short form of `value`; for lists and objects, which may be large, only type and size."""
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    cut = isinstance(value, str) and len(value) > 60
    return f"{json.dumps(value[:60])}..." if cut else json.dumps(value)
