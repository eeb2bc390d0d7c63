"""Text classification with onnxruntime, numpy and tokenizers: python infer.py "TEXT", or lines on stdin.

A tab separates the two texts of a pair.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from smelt.export.package.standalone.batches import length_batches
from smelt.export.package.standalone.classes import json_predictions, predict_class, prediction_line
from smelt.export.package.standalone.finite_outputs import finite_outputs
from smelt.export.package.standalone.json_values import read_text
from smelt.export.package.standalone.session import open_graph, run_command_line


class Classifier:
    """Classifier(folder)(texts) -> (label, probabilities) of each text or pair, a tuple of two texts.

    The label is a name; for a multi-label model, the tuple of labels with a probability above their
    threshold; for a regression model, the number, or the tuple of its numbers. Thread-safe;
    `threads` is per call.
    """

    def __init__(self, folder: str | Path = Path(__file__).parent, threads: int | None = None) -> None:
        config = json.loads((Path(folder) / "infer.json").read_text(encoding="utf-8"))
        self.labels, self.problem, self.tokenizer_settings, self.cut = (
            config["labels"],
            config["problem"],
            config["tokenizer"],
            0,
        )
        self.thresholds = config.get("thresholds")
        self.tokenizer = tokenizers.Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        self.graph = open_graph(
            Path(folder) / "model.onnx", threads or config["threads"], pad=config["tokenizer"]["pad"]
        )
        self.inputs = {value.name for value in self.graph.get_inputs()}

    def __call__(self, texts: Iterable[str | tuple[str, str]], batch_size: int = 32) -> list[tuple[Any, Any]]:
        """Return label and probabilities, a dict by label, for each text or pair, in their order."""
        encoded = [self.encode(text) for text in texts]
        answers: list[tuple[Any, Any]] = [("", {})] * len(encoded)
        for indices, ids, mask in length_batches(
            [row for row, _ in encoded], self.tokenizer_settings["pad"], batch_size
        ):
            types = np.zeros_like(ids)
            for batch_index, i in enumerate(indices):
                types[batch_index, : len(encoded[i][1])] = encoded[i][1]
            feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
            feeds = {name: value for name, value in feeds.items() if name in self.inputs}
            for i, logits in zip(indices, finite_outputs(self.graph.run(["logits"], feeds)[0]), strict=True):
                answers[i] = predict_class(logits, self.labels, self.problem, self.thresholds)
        return answers

    def from_json(self, value: Any) -> str | tuple[str, str]:
        """Return the text or pair of a JSON value; raise ValueError if it is none."""
        if isinstance(value, list) and len(value) == 2:
            return read_text(value[0]), read_text(value[1])
        return read_text(value, "a text or a list of two")

    def to_json(self, predictions: list[tuple[Any, Any]]) -> list[dict[str, Any]]:
        """Return predictions as JSON values."""
        return json_predictions(predictions)

    def encode(self, text: str | tuple[str, str]) -> tuple[list[int], list[int]]:
        """Return ids and token types; in a pair that is too long the longer text is truncated first."""
        first, second = (text, None) if isinstance(text, str) else text
        first = self.tokenizer_settings["prefix"] + first
        encoding = self.tokenizer.encode(first.lower() if self.tokenizer_settings["lower"] else first, second)
        types = encoding.type_ids if self.tokenizer_settings["types"] else []
        limit, owners = self.tokenizer_settings["limit"], encoding.sequence_ids
        if limit is None or len(owners) <= limit:
            return list(encoding.ids), list(types)
        self.cut += 1
        token_indices = [[index for index, owner in enumerate(owners) if owner == which] for which in (0, 1)]
        max_tokens = max(0, limit - owners.count(None))
        short, long = sorted(map(len, token_indices))
        long = max(short, max_tokens - short)
        short, long = (
            (short, long) if short + long <= max_tokens else (max_tokens // 2, max_tokens - max_tokens // 2)
        )
        counts = (long, short) if len(token_indices[0]) > len(token_indices[1]) else (short, long)
        dropped: set[int] = set()
        for part, count in zip(token_indices, counts, strict=True):
            dropped |= set(
                part[: len(part) - count]
                if self.tokenizer_settings["truncation_side"] == "left"
                else part[count:]
            )
        kept_indices = [index for index in range(len(owners)) if index not in dropped]
        return [encoding.ids[index] for index in kept_indices], [
            types[index] for index in kept_indices if types
        ]


def answer_lines(model: Classifier, texts: list[str]) -> list[str]:
    """Return a line for each text, or pair of texts separated by a tab."""
    pairs: Any = [tuple(text.split("\t", 1)) if "\t" in text else text for text in texts]
    return [prediction_line(*prediction) for prediction in model(pairs)]


if __name__ == "__main__":
    run_command_line(Classifier, answer_lines, __doc__)
