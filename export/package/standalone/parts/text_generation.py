"""Answers with onnxruntime, numpy, tokenizers and jinja2: python infer.py "PROMPT", or lines on stdin.

A prompt is a text, or a conversation as a JSON list of messages: [{"role": "user", "content": "..."}, ...].
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from smelt.export.package.standalone.parts.session import run_command_line
from smelt.export.package.standalone.parts.writer import Writer


class GenerationBlocks(jinja2.ext.Extension):
    """Renders `{% generation %}` blocks of chat templates as their content."""

    tags = {"generation"}  # noqa: RUF012, as in the base class

    def parse(self, parser: Any) -> Any:
        """Return the content of the block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def compile_template(template: str) -> Any:
    """Return a chat template, compiled in a sandbox."""

    def raise_exception(message: str) -> str:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, **options: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **options})

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
    return environment.from_string(template)


def messages_of(prompt: str) -> list[dict[str, str]] | None:
    """Return the messages of a prompt that is a conversation; None for plain text."""
    if not prompt.lstrip().startswith("["):
        return None
    try:
        found = json.loads(prompt)
    except (ValueError, RecursionError):
        return None
    keys = {"role", "content"}
    whole = isinstance(found, list) and all(
        isinstance(m, dict) and set(m) == keys and all(isinstance(v, str) for v in m.values()) for m in found
    )
    return found if found and whole else None


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
        rendered = self.chat.render(
            messages=messages_of(text) or [{"role": "user", "content": text}],
            tools=None,
            documents=None,
            add_generation_prompt=True,
            **{**self.template["special_tokens"], "enable_thinking": False},
        )
        return list(self.tokenizer.inner.encode(rendered, add_special_tokens=False).ids)

    def answer(self, text: str, row: list[int], tail: list[int]) -> str:
        """Return the response."""
        return self.tokenizer.decode(tail)


if __name__ == "__main__":
    run_command_line(Answerer, Answerer.__call__, __doc__)
