r"""Answers to questions with onnxruntime, numpy and tokenizers: python infer.py $'QUESTION\tCONTEXT'.

Or lines on stdin; a tab separates the question and its context, a text with the answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from smelt.export.package.standalone.batches import length_batches
from smelt.export.package.standalone.classes import CONTROLS
from smelt.export.package.standalone.finite_outputs import finite_outputs
from smelt.export.package.standalone.json_values import describe_value, read_text
from smelt.export.package.standalone.session import open_graph, run_command_line


class QuestionAnswerer:
    """QuestionAnswerer(folder)(pairs) -> the answer to each (question, context). Thread-safe.

    `threads` is per call. An answer is a dict: `answer` (its text, context[start:end], "" if the question is
    unanswerable), `score` (its probability among the best spans), `start` and `end` (characters, end
    exclusive). `cut` counts truncated questions; long contexts are read in windows.
    """

    def __init__(self, folder: str | Path = Path(__file__).parent, threads: int | None = None) -> None:
        self.config = json.loads((Path(folder) / "infer.json").read_text(encoding="utf-8"))
        self.settings, self.cut = self.config["tokenizer"], 0
        self.first_input = {"question": "Is it warm?", "context": "Warm up."}
        self.max_length = min(self.config["max_length"], self.settings["limit"] or self.config["max_length"])
        self.tokenizer = tokenizers.Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        self.graph = open_graph(
            Path(folder) / "model.onnx", threads or self.config["threads"], pad=self.settings["pad"]
        )
        self.inputs = {value.name for value in self.graph.get_inputs()}

    def __call__(
        self, pairs: Iterable[tuple[str, str]], batch_size: int = 32, may_be_unanswerable: bool = True
    ) -> list[dict[str, Any]]:
        """Return the answer to each question, in their order.

        Without `may_be_unanswerable` the best span of the context is the answer.
        """
        items = list(pairs)
        windows = [(i, *window) for i, item in enumerate(items) for window in self.windows(*item)]
        spans: list[list[tuple[float, int, int]]] = [[] for _ in items]
        empty = [float("inf")] * len(items)
        rows = [ids for _, ids, _, _ in windows]
        for indices, ids, mask in length_batches(rows, self.settings["pad"], batch_size):
            types = np.zeros_like(ids)
            for batch_index, i in enumerate(indices):
                types[batch_index, : len(windows[i][2])] = windows[i][2]
            feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
            feeds = {name: value for name, value in feeds.items() if name in self.inputs}
            for i, logits in zip(indices, self.graph.run(["logits"], feeds)[0], strict=True):
                number, row, _, offsets = windows[i]
                values = finite_outputs(logits[: len(row)]).astype(np.float64)
                spans[number] += self.spans(values, offsets)
                empty[number] = min(empty[number], float(values[0].sum()))
        return [
            self.best(context, spans[i], empty[i] if may_be_unanswerable else None)
            for i, (_, context) in enumerate(items)
        ]

    def from_json(self, value: Any) -> tuple[str, str]:
        """Return question and context of a JSON value; raise ValueError if it has none."""
        if isinstance(value, dict) and value.keys() == {"question", "context"}:
            value = [value["question"], value["context"]]
        if not isinstance(value, list) or len(value) != 2:
            raise ValueError(f"expected an object with question and context, got {describe_value(value)}")
        return read_text(value[0], "a question"), read_text(value[1], "a context")

    def windows(self, question: str, context: str) -> list[Any]:
        """Return ids, token types and the characters in the context (None for others) of each window."""
        question = self.settings["prefix"] + question
        if self.settings["lower"]:  # characters that would become several are kept, so that offsets stay
            question, context = (
                "".join(low if len(low := character.lower()) == 1 else character for character in text)
                for text in (question, context)
            )
        encoding = self.tokenizer.encode(question, context)
        owners = encoding.sequence_ids
        of_question, of_context, special = (
            [i for i, owner in enumerate(owners) if owner == which] for which in (0, 1, None)
        )
        room = max(2, self.max_length - len(special))
        if len(of_question) + len(of_context) > room and len(of_question) > room // 2:
            self.cut += 1
            of_question = of_question[: room // 2]
        size = max(1, room - len(of_question))
        step = size - min(self.config["stride"], size // 2)
        windows = []
        for start in range(0, max(1, len(of_context) - size + step), step):
            positions = sorted([*special, *of_question, *of_context[start : start + size]])
            offsets = [encoding.offsets[i] if owners[i] == 1 else None for i in positions]
            ids, types = ([values[i] for i in positions] for values in (encoding.ids, encoding.type_ids))
            windows.append((ids, types, offsets))
        return windows

    def spans(self, logits: Any, offsets: list[Any]) -> list[tuple[float, int, int]]:
        """Return score, start and end of the best spans of a window; logits: float64 [L, 2]."""
        best_starts, best_ends = (
            np.argsort(logits[:, side])[: -self.config["n_best"] - 1 : -1].tolist() for side in (0, 1)
        )
        return [
            (float(logits[first, 0] + logits[last, 1]), offsets[first][0], offsets[last][1])
            for first in best_starts
            for last in best_ends
            if offsets[first] is not None
            and offsets[last] is not None
            and first <= last < first + self.config["max_answer_tokens"]
        ]

    def best(self, context: str, spans: list[tuple[float, int, int]], empty: float | None) -> dict[str, Any]:
        """Return the best answer; empty: the score of no answer, None if the question has one."""
        none = [] if empty is None else [(empty, 0, 0)]
        best = sorted([*spans, *none], key=lambda span: -span[0])[: self.config["n_best"]]
        best += [span for span in none if span not in best]
        if not best:
            return {"answer": "", "score": 0.0, "start": 0, "end": 0}
        odds = np.exp([span[0] - best[0][0] for span in best])
        odds /= odds.sum()
        index = next((i for i, span in enumerate(best) if context[span[1] : span[2]].strip()), None)
        if index is None or (empty is not None and empty > best[index][0]):
            index = best.index(none[0]) if none else 0
            return {"answer": "", "score": float(odds[index]), "start": 0, "end": 0}
        text = context[best[index][1] : best[index][2]]
        start = best[index][1] + len(text) - len(text.lstrip())
        end = start + len(text.strip())
        return {"answer": context[start:end], "score": float(odds[index]), "start": start, "end": end}


def answer_lines(model: QuestionAnswerer, texts: list[str]) -> list[str]:
    """Return the answer to each question, `text [start:end score]`; `[score]` if it is unanswerable."""
    if (without := next((text for text in texts if "\t" not in text), None)) is not None:
        raise ValueError(f"no context: write a tab between question and context, got {without[:60]!r}")
    lines = []
    for answer in model([(text.split("\t", 1)[0], text.split("\t", 1)[1]) for text in texts]):
        text, score = answer["answer"].translate(CONTROLS), f"{answer['score']:.3f}"
        lines.append(f"{text} [{answer['start']}:{answer['end']} {score}]" if text else f"[{score}]")
    return lines


if __name__ == "__main__":
    run_command_line(QuestionAnswerer, answer_lines, __doc__)
