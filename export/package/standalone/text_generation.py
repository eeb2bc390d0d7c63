"""Answers with onnxruntime, numpy, tokenizers and jinja2: python infer.py "PROMPT", or lines on stdin.

A prompt is a text, or a conversation as a JSON list of messages: [{"role": "user", "content": "..."}, ...].
"""

from __future__ import annotations

import json
from pathlib import Path

from smelt.export.package.standalone.prompt_rendering import compile_template, render_chat
from smelt.export.package.standalone.session import run_command_line
from smelt.export.package.standalone.writer import Writer


class Answerer(Writer):
    """Answerer(folder)(prompts) -> responses. Thread-safe; `threads` is per call."""

    def __init__(self, folder: str | Path = Path(__file__).parent, threads: int | None = None) -> None:
        super().__init__(folder, threads)
        config = json.loads((Path(folder) / "infer.json").read_text(encoding="utf-8"))
        self.template = config["prompt_template"]
        chat = self.template["chat_template"]
        self.chat = compile_template(chat) if chat else None

    def encode(self, text: str) -> list[int]:
        """Return all ids of the rendered prompt; a rendered chat contains its special tokens."""
        if self.chat is None:
            return super().encode(self.template["template"].replace("{prompt}", text))
        rendered = render_chat(self.chat, text, self.template["special_tokens"])
        return list(self.tokenizer.inner.encode(rendered, add_special_tokens=False).ids)

    def answer(self, text: str, row: list[int], tail: list[int]) -> str:
        """Return the response."""
        return self.tokenizer.decode(tail)


if __name__ == "__main__":
    run_command_line(Answerer, Answerer.__call__, __doc__)
