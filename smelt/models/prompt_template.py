"""The template that turns a prompt into a model's input text, without torch and transformers.

A template is the tokenizer's chat template, or a text with `{prompt}`. A chat template is rendered as by
transformers, in a separate process (`smelt.models.chat_rendering`), with the same special tokens, and
`enable_thinking` false, so that models such as Qwen3 answer directly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from smelt.core.errors import InputError
from smelt.core.files import load_json, read_json_object
from smelt.data.prompt_rows import ChatMessage, parse_conversation, prompt_messages
from smelt.models.chat_rendering import ChatRequest, ChatTemplateError, render_chats

CHAT = "chat"
PROMPT_FIELD = "{prompt}"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
_TOKENIZER_CONFIG_FILE, _TOKENS_FILE = "tokenizer_config.json", "special_tokens_map.json"
_NAMED_TOKENS = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip


_FIRST_MARK, _LAST_MARK = 0xE000, 0xF8FF  # private use: letters that no text and no template has


@dataclass(frozen=True)
class ResponseParts:
    """A conversation up to a turn of the assistant, rendered.

    prompt: the input text of the model, up to where the response begins. lead: what the template writes
    between it and the content, often nothing. content: of the turn, as the template writes it. end: the text
    that ends the turn, "" where the template has none.
    """

    prompt: str
    lead: str
    content: str
    end: str

    @property
    def response(self) -> str:
        """What follows the prompt, to the end of the turn."""
        return self.lead + self.content + self.end


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

    def render(self, prompt: str) -> str:
        """Return the input text of `prompt`; see `render_prompts`."""
        return self.render_prompts([prompt])[0]

    def render_response(self, messages: Sequence[ChatMessage]) -> ResponseParts:
        """Return the prompt and the response of a conversation; see `render_responses`."""
        return self.render_responses([messages])[0]

    def render_prompts(self, prompts: Sequence[str]) -> list[str]:
        """Return the input text of each prompt, plain text or a conversation (`smelt.data.prompt_rows`).

        Raises:
            InputError: `needs-chat-template`: a conversation, and this is a text with `{prompt}`;
                `unknown-role`, `no-user-turn`; `chat-template-failed`.
        """
        if self.is_chat:
            return self.render_chats([ChatRequest(prompt_messages(prompt), True) for prompt in prompts])
        for prompt in prompts:
            if parse_conversation(prompt) is not None and prompt_messages(prompt):
                raise InputError(
                    f"The prompt is a conversation ({prompt[:60]!r}), but the prompt template"
                    f" {self.template!r} is for single texts. Use a model with a chat template and"
                    " prompt_template: chat, or pass the prompt as plain text.",
                    code="needs-chat-template",
                )
        return [self.template.replace(PROMPT_FIELD, prompt) for prompt in prompts]

    def render_responses(self, conversations: Sequence[Sequence[ChatMessage]]) -> list[ResponseParts]:
        """Return the prompt and the response of conversations that end with a turn of the assistant.

        In a chat the content and the end of the last turn are recognized by rendering it a second time with
        a mark as its content: a response may consist of the same letters as the text that ends it.

        Raises:
            InputError: as `render_prompts`.
        """
        if not self.is_chat:
            texts = [
                conversation[0]["content"]
                if len(conversation) == 2
                else json.dumps(conversation[:-1], ensure_ascii=False)
                for conversation in conversations
            ]
            prompts = self.render_prompts(texts)
            return [
                ResponseParts(prompt, "", conversation[-1]["content"], "")
                for prompt, conversation in zip(prompts, conversations, strict=True)
            ]
        placeholders = [_unused_letter(self.chat_template, conversation) for conversation in conversations]
        requests = []
        for conversation, placeholder in zip(conversations, placeholders, strict=True):
            marked = [*conversation[:-1], {**conversation[-1], "content": placeholder}]
            requests += [
                ChatRequest(conversation[:-1], True),
                ChatRequest(conversation, False),
                ChatRequest(marked, False),
            ]
        rendered = iter(self.render_chats(requests))
        return [
            _split_response(
                next(rendered), next(rendered), next(rendered), placeholder, conversation[-1]["content"]
            )
            for placeholder, conversation in zip(placeholders, conversations, strict=True)
        ]

    def render_chats(self, requests: Sequence[ChatRequest]) -> list[str]:
        """Return conversations as text.

        Raises:
            InputError: `chat-template-failed`: the template is invalid, refuses the messages, or takes too
                much time or memory.
        """
        try:
            return render_chats(self.chat_template, self.special_tokens, requests)
        except ChatTemplateError as error:
            conversation = "the conversations"
            if error.request is not None:
                roles = ", ".join(message["role"] for message in requests[error.request].messages)
                conversation = f"a conversation with the roles {roles}"
            raise InputError(
                f"The model's chat template cannot render {conversation}: {error}. Mend"
                f' {CHAT_TEMPLATE_FILE}, set data: {{prompt_template: "..."}} to a text with {{prompt}}, or'
                " change the conversation.",
                code="chat-template-failed",
            ) from error


def _unused_letter(template: str, messages: Sequence[ChatMessage]) -> str:
    texts = [template, *(message["content"] for message in messages)]
    return next(
        (c for c in map(chr, range(_FIRST_MARK, _LAST_MARK)) if not any(c in text for text in texts)),
        chr(_LAST_MARK),
    )


def _split_response(prompt: str, rendered: str, marked: str, mark: str, answer: str) -> ResponseParts:
    """Return the parts of a rendered conversation.

    Args:
        prompt: the conversation before the last turn, with that turn begun.
        rendered: the conversation.
        marked: the same with `mark` as the content of the last turn.
        mark: a letter that occurs nowhere else.
        answer: the content of the last turn.
    """
    before, matched_mark, after = marked.rpartition(mark)
    if not matched_mark:  # the template does not render the turn
        return ResponseParts(prompt, "", answer, "")
    candidates = [
        (prompt, ""),
        (before, ""),
    ]  # the template may begin a response otherwise than it renders one
    if before.startswith(prompt):  # usual; the turn may still begin otherwise with this content
        candidates = [(before, before[len(prompt) :]), (prompt, "")]
    for begin, leading_text in candidates:
        length = len(rendered) - len(begin) - len(after)
        if length >= 0 and rendered.startswith(begin) and rendered.endswith(after):
            return ResponseParts(prompt, leading_text, rendered[len(begin) :][:length], after.rstrip())
    return ResponseParts(prompt, "", answer, after.rstrip())


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
    template = config.get("chat_template") if isinstance(config, dict) else None
    if isinstance(template, list):
        templates_by_name = {
            entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)
        }
        template = templates_by_name.get("default")
    return template if isinstance(template, str) else None


def read_special_tokens(folder: Path) -> dict[str, str]:
    """Return the named special tokens in the tokenizer's files, such as `{"eos_token": "</s>"}`."""
    special_tokens: dict[str, str] = {}
    for file in (_TOKENS_FILE, _TOKENIZER_CONFIG_FILE):
        if not (folder / file).is_file():
            continue
        for name, value in read_json_object(folder / file).items():
            text = value.get("content") if isinstance(value, dict) else value
            if name in _NAMED_TOKENS and isinstance(text, str):
                special_tokens[name] = text
    return special_tokens


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
