"""Prompts rendered by a model's chat template, with jinja2.

A prompt is a text, or a conversation as a JSON list of messages: [{"role": "user", "content": "..."}, ...].
"""

from __future__ import annotations

import datetime
import json
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox


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
        parsed = json.loads(prompt)
    except (ValueError, RecursionError):
        return None
    keys = {"role", "content"}
    is_chat = isinstance(parsed, list) and all(
        isinstance(m, dict) and set(m) == keys and all(isinstance(v, str) for v in m.values()) for m in parsed
    )
    return parsed if parsed and is_chat else None


def render_chat(chat: Any, prompt: str, special_tokens: dict[str, str]) -> str:
    """Return the text of a prompt, with the assistant's turn begun. chat: of `compile_template`."""
    text: str = chat.render(
        messages=messages_of(prompt) or [{"role": "user", "content": prompt}],
        tools=None,
        documents=None,
        add_generation_prompt=True,
        **{**special_tokens, "enable_thinking": False},
    )
    return text
