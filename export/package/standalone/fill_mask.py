"""Tokens for masks with onnxruntime, numpy and tokenizers: python infer.py "TEXT", or lines on stdin."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from smelt.export.package.standalone.batches import length_batches
from smelt.export.package.standalone.finite_outputs import finite_outputs
from smelt.export.package.standalone.json_values import read_text
from smelt.export.package.standalone.session import open_graph, run_command_line
from smelt.export.package.standalone.tokenizers_reader import Tokenizer


class MaskFiller:
    """MaskFiller(folder)(texts) -> for each mask of a text its likeliest tokens. Thread-safe.

    A token is a dict: `token_str`, `token` (its id), `score` (its probability). `threads` is per call.
    """

    def __init__(self, folder: str | Path = Path(__file__).parent, threads: int | None = None) -> None:
        config = json.loads((Path(folder) / "infer.json").read_text(encoding="utf-8"))
        self.tokenizer, self.mask = Tokenizer(Path(folder), config["tokenizer"]), config["tokenizer"]["mask"]
        self.graph = open_graph(
            Path(folder) / "model.onnx", threads or config["threads"], pad=config["tokenizer"]["pad"]
        )
        self.inputs = {value.name for value in self.graph.get_inputs()}
        self.mask_token = self.first_input = self.tokenizer.inner.id_to_token(self.mask)

    def from_json(self, value: Any) -> str:
        """Return the text of a JSON value; raise ValueError if it is none, or has no mask token."""
        text = read_text(value)
        self.require_mask(text)
        return text

    def require_mask(self, text: str) -> None:
        """Raise ValueError for a text without a mask token within the model's limit."""
        if self.mask not in self.tokenizer.encode(text):
            raise ValueError(f"no mask token; write {self.mask_token} in place of the token to predict")

    def __call__(self, texts: Iterable[str], batch_size: int = 32, top_k: int = 5) -> list[Any]:
        """Return for each text, in their order, a list with the `top_k` tokens of each mask."""
        token_rows = [self.tokenizer.encode(text) for text in texts]
        answers: list[Any] = [[] for _ in token_rows]
        for indices, ids, mask in length_batches(token_rows, self.tokenizer.settings["pad"], batch_size):
            feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
            feeds = {name: value for name, value in feeds.items() if name in self.inputs}
            logits = self.graph.run(["logits"], feeds)[0]
            for i, row, row_logits in zip(indices, ids * mask, logits, strict=True):
                masked = finite_outputs(row_logits[row == self.mask])
                answers[i] = [self.likeliest(values, top_k) for values in masked.astype(np.float64)]
        return answers

    def likeliest(self, values: Any, top_k: int) -> list[dict[str, Any]]:
        """Return the `top_k` tokens of one mask; values: logits, float64 [V]."""
        odds = np.exp(values - values.max())
        best = np.argsort(-odds, kind="stable")[:top_k]
        return [
            {
                "score": float(odds[i] / odds.sum()),
                "token": int(i),
                "token_str": self.tokenizer.decode([int(i)]),
            }
            for i in best
        ]


def answer_lines(model: MaskFiller, texts: list[str]) -> list[str]:
    """Return for each text its likeliest tokens, joined by |, a tab, and their probabilities.

    Raises:
        ValueError: a text has no mask token.
    """
    lines = []
    for text, masks in zip(texts, model(texts), strict=True):
        model.require_mask(text)
        best = [tokens[0] for tokens in masks]
        words, scores = (token["token_str"] for token in best), (f"{token['score']:.3f}" for token in best)
        lines.append("|".join(words) + "\t" + "|".join(scores))
    return lines


if __name__ == "__main__":
    run_command_line(MaskFiller, answer_lines, __doc__)
