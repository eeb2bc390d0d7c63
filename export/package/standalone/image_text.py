"""Texts that match images, with onnxruntime, numpy, Pillow and tokenizers: python infer.py LINE, or stdin.

A line is the file of an image and texts, separated by tabs. The best text is printed with its probability
among the texts; of a single text the cosine similarity with the image.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from smelt.export.package.standalone.finite_outputs import finite_outputs
from smelt.export.package.standalone.image_files import preprocess_image
from smelt.export.package.standalone.json_values import describe_value
from smelt.export.package.standalone.session import open_graph, run_command_line
from smelt.export.package.standalone.tokenizers_reader import Tokenizer


class ImageTextMatcher:
    """ImageTextMatcher(folder)(rows) -> for each row its texts with their values, best first, as a dict.

    A row has `image` and `text`: one, whose value is the cosine similarity, or a list, whose values are
    probabilities. Thread-safe; `threads` is per call.
    """

    def __init__(self, folder: str | Path = Path(__file__).parent, threads: int | None = None) -> None:
        config = json.loads((Path(folder) / "infer.json").read_text(encoding="utf-8"))
        self.config, self.images = config, config["images"]
        self.tokenizer = Tokenizer(Path(folder), config["tokenizer"])
        self.graphs = {
            name: open_graph(Path(folder) / f"{name}.onnx", threads or config["threads"])
            for name in ("vision_model", "text_model")
        }
        self.first_input = {"image": FIRST_IMAGE, "text": ["a"]}  # of the service

    def __call__(self, rows: Iterable[dict[str, Any]], batch_size: int = 32) -> list[dict[str, float]]:
        """Return the values of the texts of each row.

        An image is a file's path, its bytes.
        """
        row_list = list(rows)
        texts = [row["text"] if isinstance(row["text"], list) else [row["text"]] for row in row_list]
        images = self.embed_images([row["image"] for row in row_list], batch_size).astype(np.float64)
        unique_texts = list(dict.fromkeys(text for candidates in texts for text in candidates))
        vectors = self.embed_texts(unique_texts, batch_size).astype(np.float64)
        by_text = dict(zip(unique_texts, vectors, strict=True))
        answers = []
        for row, image, candidates in zip(row_list, images, texts, strict=True):
            values = np.stack([by_text[text] for text in candidates]) @ image
            if isinstance(row["text"], list):
                values = self._probabilities(values)
            answers.append({candidates[i]: float(values[i]) for i in np.argsort(-values, kind="stable")})
        return answers

    def embed_images(self, images: Iterable[Any], batch_size: int = 32) -> Any:
        """Return the embeddings of images, float32 [n, D] of length 1."""
        image_list, vectors = list(images), []
        for start in range(0, len(image_list), batch_size):
            part = image_list[start : start + batch_size]
            batch = np.stack([x if isinstance(x, np.ndarray) else self._pixels(x) for x in part])
            feeds = {"pixel_values": batch}
            vectors.append(finite_outputs(self.graphs["vision_model"].run(["image_embeds"], feeds)[0]))
        return np.concatenate(vectors)

    def embed_texts(self, texts: Iterable[str], batch_size: int = 32) -> Any:
        """Return the embeddings of texts, float32 [n, D] of length 1."""
        rows = [self.tokenizer.encode(text) for text in texts]
        order = sorted(range(len(rows)), key=lambda i: (-len(rows[i]), i))
        results: dict[int, Any] = {}
        for start in range(0, len(order), batch_size):
            indices = order[start : start + batch_size]
            length = self.config["padded_length"] or max(len(rows[i]) for i in indices)
            ids = np.full((len(indices), length), self.tokenizer.settings["pad"], dtype=np.int64)
            for row, i in zip(ids, indices, strict=True):
                row[: len(rows[i])] = rows[i]
            feeds = {"input_ids": ids}
            vectors = finite_outputs(self.graphs["text_model"].run(["text_embeds"], feeds)[0])
            results.update(zip(indices, vectors, strict=True))
        return np.stack([results[i] for i in range(len(rows))])

    def _probabilities(self, cosines: Any) -> Any:
        logits, bias = cosines * self.config["logit_scale"], self.config["logit_bias"]
        if bias is not None:  # each text by itself
            return 1 / (1 + np.exp(-(logits + bias)))
        exponentials = np.exp(logits - logits.max())
        return exponentials / exponentials.sum()

    def _pixels(self, image: str | Path | bytes) -> Any:
        """Return the pixels of an image, float32 [3, h, w]; raise ValueError if it is not an image."""
        return preprocess_image(image, self.images)

    def from_json(self, value: Any) -> dict[str, Any]:
        """Return a row with the pixels of its image, a file in base64; raise ValueError if it is none."""
        if not isinstance(value, dict) or not isinstance(value.get("image"), str):
            raise ValueError(f"expected image, a file in base64, and text, got {describe_value(value)}")
        check_texts(value.get("text"))
        try:
            return {**value, "image": self._pixels(base64.b64decode(value["image"], validate=True))}
        except binascii.Error as error:
            raise ValueError(f"expected an image file in base64: {error}") from None

    def to_json(self, answers: list[dict[str, float]]) -> list[dict[str, Any]]:
        """Return answers as JSON values."""
        return [
            {"similarity": next(iter(answer.values()))}
            if len(answer) == 1
            else {"label": next(iter(answer)), "probabilities": answer}
            for answer in answers
        ]


FIRST_IMAGE = (  # a white one of one pixel
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR42mP4DwABAQEAHLCMmQAAAABJRU5ErkJggg=="
)


def check_texts(texts: Any) -> None:
    """Require a text, or a list of different texts; raise ValueError for others."""
    items = texts if isinstance(texts, list) else [texts]
    if not items or not all(isinstance(item, str) and item.strip() for item in items):
        raise ValueError(f"expected a text or a list of texts, got {describe_value(texts)}")
    if len(set(items)) < len(items):
        raise ValueError("expected different texts, got the same text twice")


def answer_lines(model: ImageTextMatcher, lines: list[str]) -> list[str]:
    """Return a line for each line of an image and texts: the best text, a tab, and its value."""
    rows = []
    for line in lines:
        image, *texts = line.split("\t")
        check_texts(texts)
        rows.append({"image": image, "text": texts if len(texts) > 1 else texts[0]})
    answers = (next(iter(answer.items())) for answer in model(rows))
    return [f"{text}\t{value:.4f}" for text, value in answers]


if __name__ == "__main__":
    run_command_line(ImageTextMatcher, answer_lines, __doc__)
