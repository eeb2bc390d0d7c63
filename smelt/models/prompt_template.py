"""The template that turns a prompt into a model's input text, without torch and transformers.

A template is the tokenizer's chat template, or a text with `{prompt}`. A chat template is rendered as by
`apply_chat_template` of transformers (chat_template_utils.py, 5.23): the same sandbox, filters and special
tokens, and `enable_thinking` false, so that models such as Qwen3 answer directly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError
from smelt.core.files import load_json, read_json_object
from smelt.data.prompt_rows import ChatMessage, parse_conversation, prompt_messages

CHAT = "chat"
PROMPT_FIELD = "{prompt}"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
_TOKENIZER_CONFIG_FILE, _TOKENS_FILE = "tokenizer_config.json", "special_tokens_map.json"
_NAMED_TOKENS = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip


@dataclass(frozen=True)
class ResponseParts:
    """A conversation up to a turn of the assistant, rendered.

    prompt: the input text of the model, up to where the response begins. response: the rest of the turn, with
    the text that ends it, "" at the end where the template has none. ended: whether it has one.
    """

    prompt: str
    response: str
    ended: bool


@dataclass(frozen=True)
class PromptTemplate:
    """template: a text with `{prompt}`, or "chat". chat_template: Jinja, for "chat".

    special_tokens: by their names in a chat template (`bos_token`, `eos_token`).
    """

    template: str
    chat_template: str = ""
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_chat(self) -> bool:
        """Whether it is a chat template, whose result has all special tokens of the input."""
        return self.template == CHAT

    @cached_property
    def _compiled(self) -> Any:
        return _compile(self.chat_template)

    def render(self, prompt: str) -> str:
        """Return the input text of `prompt`, plain text or a conversation (`smelt.data.prompt_rows`).

        Raises:
            InputError: `needs-chat-template`: a conversation, and this is a text with `{prompt}`;
                `unknown-role`, `no-user-turn`; `chat-template-failed`.
        """
        if self.is_chat:
            return self.render_chat(prompt_messages(prompt), True)
        if parse_conversation(prompt) is not None and prompt_messages(prompt):
            raise InputError(
                f"The prompt is a conversation ({prompt[:60]!r}), but the prompt template"
                f" {self.template!r} is for single texts. Use a model with a chat template and"
                " prompt_template: chat, or pass the prompt as plain text.",
                code="needs-chat-template",
            )
        return self.template.replace(PROMPT_FIELD, prompt)

    def render_response(self, messages: Sequence[ChatMessage]) -> ResponseParts:
        """Return the prompt and the response of a conversation that ends with a turn of the assistant.

        Raises:
            InputError: as `render`.
        """
        before, answer = messages[:-1], messages[-1]["content"]
        if not self.is_chat:
            text = before[0]["content"] if len(before) == 1 else json.dumps(before, ensure_ascii=False)
            return ResponseParts(self.render(text), answer, False)
        prompt, whole = self.render_chat(before, True), self.render_chat(messages, False)
        if not whole.startswith(prompt):  # the template changes earlier text, as some do after the last turn
            return ResponseParts(prompt, answer, False)
        response = whole[len(prompt) :].rstrip()
        return ResponseParts(prompt, response, not response.endswith(answer.strip()))

    def render_chat(self, messages: Sequence[ChatMessage], add_generation_prompt: bool) -> str:
        """Return `messages` as text; with `add_generation_prompt` the assistant's turn is begun.

        Raises:
            InputError: `chat-template-failed`: the template is invalid, or refuses the messages.
        """
        from jinja2 import TemplateError

        values = {**self.special_tokens, "enable_thinking": False}
        try:
            text: str = self._compiled.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **values,
            )
        except (TemplateError, TypeError, ValueError, AttributeError, OverflowError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise InputError(
                f"The model's chat template cannot render a conversation with the roles {roles}: {error}. Set"
                ' data: {prompt_template: "..."} to a text with {prompt}, or change the conversation.',
                code="chat-template-failed",
            ) from error
        return text


def _compile(template: str) -> Any:
    """Return `template` compiled by Jinja in a sandbox.

    Raises:
        InputError: `chat-template-failed`: it is not valid.
    """
    from datetime import datetime

    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlocks(Extension):
        """Renders `{% generation %}` blocks, which mark the turns of the assistant, as their content."""

        tags = {"generation"}  # noqa: RUF012, as in the base class

        def parse(self, parser: Any) -> nodes.Node | list[nodes.Node]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    def raise_exception(message: str) -> str:
        raise TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    def strftime_now(pattern: str) -> str:
        return datetime.now().strftime(pattern)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    try:
        return environment.from_string(template)
    except TemplateError as error:
        raise InputError(
            f"The model's chat template is not a valid Jinja template: {error}. Mend {CHAT_TEMPLATE_FILE}, or"
            ' set data: {prompt_template: "..."} to a text with {prompt}.',
            code="chat-template-failed",
        ) from error


def read_chat_template(folder: Path) -> str | None:
    """Return the chat template of the tokenizer in `folder`; None if it has none.

    In the order of transformers: `chat_template.jinja`, then `chat_template` of tokenizer_config.json, of
    several templates the one named default.

    Raises:
        InputError: a file cannot be read.
    """
    path = folder / CHAT_TEMPLATE_FILE
    try:
        if path.is_file():
            return path.read_text(encoding="utf-8")
        config = (
            load_json(folder / _TOKENIZER_CONFIG_FILE) if (folder / _TOKENIZER_CONFIG_FILE).is_file() else {}
        )
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"{folder}: the chat template cannot be read: {error}", code="damaged-file"
        ) from error
    found = config.get("chat_template") if isinstance(config, dict) else None
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def read_special_tokens(folder: Path) -> dict[str, str]:
    """Return the named special tokens in the tokenizer's files, such as `{"eos_token": "</s>"}`."""
    found: dict[str, str] = {}
    for file in (_TOKENS_FILE, _TOKENIZER_CONFIG_FILE):
        if not (folder / file).is_file():
            continue
        for name, value in read_json_object(folder / file).items():
            text = value.get("content") if isinstance(value, dict) else value
            if name in _NAMED_TOKENS and isinstance(text, str):
                found[name] = text
    return found


def open_prompt_template(folder: Path, template: str, special_tokens: Mapping[str, str]) -> PromptTemplate:
    """Return the prompt template of the model in `folder`.

    Args:
        folder: of the tokenizer's files.
        template: "chat", or a text with `{prompt}`.
        special_tokens: the tokens by name, as transformers reads them; empty: those in the files.

    Raises:
        InputError: `no-chat-template`: "chat", and the tokenizer has none.
    """
    if template != CHAT:
        return PromptTemplate(template)
    chat = read_chat_template(folder)
    if chat is None:
        raise InputError(
            f"{folder}: prompt_template is chat, but the tokenizer has no chat template"
            f" ({CHAT_TEMPLATE_FILE}, or chat_template in {_TOKENIZER_CONFIG_FILE}). Add one, or set"
            ' data: {prompt_template: "..."} to a text with {prompt}.',
            code="no-chat-template",
            setting="data.prompt_template",
        )
    return PromptTemplate(CHAT, chat, special_tokens or read_special_tokens(folder))
