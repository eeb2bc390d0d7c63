"""Generate the continuations of prompts with the generation graph."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from smelt.export.package.standalone.batches import length_batches
from smelt.export.package.standalone.generation_inputs import generation_inputs, new_tokens
from smelt.export.package.standalone.session import open_graph
from smelt.export.package.standalone.tokenizers_reader import Tokenizer


class Writer:
    """Writer(folder)(texts) -> texts with continuations. Thread-safe; `threads` is per call."""

    def __init__(self, folder: str | Path = Path(__file__).parent, threads: int | None = None) -> None:
        config = json.loads((Path(folder) / "infer.json").read_text(encoding="utf-8"))
        self.tokenizer, self.generation = Tokenizer(Path(folder), config["tokenizer"]), config["generation"]
        self.graph = open_graph(Path(folder) / self.generation["graph"], threads or config["threads"])

    def __call__(self, texts: Iterable[str], batch_size: int = 32) -> list[str]:
        """Return each text with the generated continuation, in their order."""
        answers = list(texts)
        prompts = [self.prompt(text) for text in answers]
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        for (new, *_), group in groupby(order, lambda i: self.limits(len(prompts[i]))):
            group_indices = list(group)
            for positions, ids, mask in length_batches(
                [prompts[i] for i in group_indices], self.tokenizer.settings["pad"], batch_size, True
            ):
                prompt = ids.shape[1]
                feeds = {"input_ids": ids, "attention_mask": mask} | generation_inputs(
                    self.generation, prompt, new
                )
                sequences = self.graph.run(["sequences"], feeds)[0]
                for i, row in zip(
                    [group_indices[position] for position in positions], sequences, strict=True
                ):
                    tail = new_tokens(row, prompt, self.generation["eos"])
                    answers[i] = self.answer(answers[i], prompts[i], tail)
        return answers

    def answer(self, text: str, row: list[int], tail: list[int]) -> str:
        """Return `text`, whose ids are `row`, with its continuation `tail`."""
        full_text, prompt_text = map(self.tokenizer.decode, (row + tail, row))  # keeps the space
        return text + (
            full_text[len(prompt_text) :]
            if full_text.startswith(prompt_text)
            else self.tokenizer.decode(tail)
        )

    def encode(self, text: str) -> list[int]:
        """Return all ids of `text` with the special tokens."""
        return self.tokenizer.encode(text)

    def limits(self, prompt: int) -> tuple[int, int, bool]:
        """Return the most and fewest new tokens after `prompt` tokens, and whether the first is forced."""
        settings = self.generation
        max_new = min(
            self.requested_new_tokens(prompt), max(1, (settings["positions"] or 10**9) + 1 - prompt)
        )
        return (
            max_new,
            max(0, (settings["min_length"] or 0) - prompt),
            bool(settings["forced_bos"]) and prompt == 1,
        )

    def requested_new_tokens(self, prompt: int) -> int:
        """Return the requested number of new tokens after `prompt` tokens."""
        by_length = max(0, (self.generation["max_length"] or 0) - prompt)
        return int(self.generation["max_new_tokens"] or by_length or 128)

    def prompt(self, text: str) -> list[int]:
        """Return the ids of `text` after the start token; a long text is truncated at its start."""
        begin, limit = self.tokenizer.settings["bos"], self.generation["limit"]
        ids = self.encode(text) or [self.tokenizer.settings["eos"] if begin is None else begin]
        max_prompt_tokens = (
            len(ids) if limit is None else max(1, limit // 2, limit + 1 - self.requested_new_tokens(len(ids)))
        )
        self.tokenizer.cut += len(ids) > max_prompt_tokens
        first = ids[:1] if len(ids) > max_prompt_tokens > 1 and ids[0] == begin else []
        return first + ids[max(0, len(ids) - max_prompt_tokens + len(first)) :]
