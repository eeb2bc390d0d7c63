"""Sentence embeddings with onnxruntime, numpy and tokenizers: python infer.py "TEXT", or lines on stdin.

A tab separates the two texts of a pair, whose cosine similarity is printed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from smelt.export.package.standalone.batches import length_batches
from smelt.export.package.standalone.finite_outputs import finite_outputs
from smelt.export.package.standalone.session import open_graph, run_command_line
from smelt.export.package.standalone.tokenizers_reader import Tokenizer


class Embedder:
    """Embedder(folder)(texts) -> vectors. Thread-safe; `threads` is per call."""

    def __init__(self, folder: str | Path = Path(__file__).parent, threads: int | None = None) -> None:
        config = json.loads((Path(folder) / "infer.json").read_text(encoding="utf-8"))
        self.tokenizer, self.width = Tokenizer(Path(folder), config["tokenizer"]), config["width"]
        self.graph = open_graph(
            Path(folder) / "model.onnx", threads or config["threads"], pad=config["tokenizer"]["pad"]
        )

    def __call__(self, texts: Iterable[str], batch_size: int = 32) -> Any:
        """Return the vectors of the texts in their order, float32 [n, D]."""
        token_rows = [self.tokenizer.encode(text) for text in texts]
        vectors = np.zeros((len(token_rows), self.width), dtype=np.float32)
        for indices, ids, mask in length_batches(token_rows, self.tokenizer.settings["pad"], batch_size):
            feeds = {"input_ids": ids, "attention_mask": mask}
            vectors[indices] = finite_outputs(self.graph.run(["sentence_embedding"], feeds)[0])
        return vectors

    def to_json(self, vectors: Any) -> list[list[float]]:
        """Return vectors as JSON values."""
        return [[round(x, 7) for x in vector.tolist()] for vector in vectors]


def answer_lines(model: Embedder, texts: list[str]) -> list[str]:
    """Return the vector of each text as JSON, or for two texts separated by a tab their cosine similarity."""
    pairs = [text.partition("\t") for text in texts]
    second = [index for index, (_, tab, _) in enumerate(pairs) if tab]
    embeddings = model([text for text, _, _ in pairs] + [pairs[index][2] for index in second]).astype(
        np.float64
    )
    answers = [json.dumps([round(x, 7) for x in vector.tolist()]) for vector in embeddings[: len(texts)]]
    for index, other in zip(second, embeddings[len(texts) :], strict=True):
        lengths = np.linalg.norm(embeddings[index]) * np.linalg.norm(other)
        answers[index] = f"{np.clip(embeddings[index] @ other / lengths, -1, 1) if lengths else 0:.4f}"
    return answers


if __name__ == "__main__":
    run_command_line(Embedder, answer_lines, __doc__)
