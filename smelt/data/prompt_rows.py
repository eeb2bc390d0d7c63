"""Prompts and responses for text generation: rows of three layouts, and conversations as text.

A row is a prompt with its response, an instruction with an optional input, or a list of messages that ends
with a turn of the assistant. It may have choices, texts of which one is right. The prompt of an example is
plain text; a conversation of several turns, or with a system message, is a JSON list of messages,
`[{"role": ..., "content": ...}, ...]`, without the final turn of the assistant, which is the reference. The
same form is a prompt for `smelt predict`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from smelt.core.errors import InputError
from smelt.core.messages import with_count
from smelt.data.splits import Columns, PromptLayout

ChatMessage: TypeAlias = dict[str, str]
ROLES = ("system", "user", "assistant")
# The columns of each layout, in the order in which a row is tried; the first one is required.
LAYOUT_COLUMNS: dict[PromptLayout, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt": ("prompt", "response", "responses"),
    "instruction": ("instruction", "input", "output"),
}


def parse_conversation(text: str) -> list[ChatMessage] | None:
    """Return the messages of a prompt that is a conversation; None for plain text.

    A conversation is a JSON list of objects with exactly the keys `role` and `content`, both text.
    """
    if not text.lstrip().startswith("["):
        return None
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(messages, list) or not messages:
        return None
    for message in messages:
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            return None
        if not isinstance(message["role"], str) or not isinstance(message["content"], str):
            return None
    return messages


def prompt_messages(text: str) -> list[ChatMessage]:
    """Return the messages of a prompt; plain text is one message of the user.

    Raises:
        InputError: `unknown-role`, or the last message is the assistant's (`no-user-turn`).
    """
    messages = parse_conversation(text)
    if messages is None:
        return [{"role": "user", "content": text}]
    _check_roles(messages, "The prompt")
    if messages[-1]["role"] == "assistant":
        raise InputError(
            "The prompt is a conversation that ends with the assistant's turn, so there is nothing to answer."
            " Remove that turn, or add one of the user.",
            code="no-user-turn",
        )
    return messages


def conversation_text(messages: Sequence[ChatMessage]) -> str:
    """Return the prompt of `messages`: plain text for a single message of the user, else JSON."""
    if len(messages) == 1 and messages[0]["role"] == "user":
        content = messages[0]["content"]
        if parse_conversation(content) is None:
            return content
    return json.dumps(list(messages), ensure_ascii=False)


def row_layout(row: Mapping[str, Any], columns: Columns) -> PromptLayout | None:
    """Return the layout of `row`; None if it lacks the first column of each.

    A layout with a column that the recipe names comes first.
    """
    set_columns = columns.model_fields_set
    order = sorted(LAYOUT_COLUMNS, key=lambda layout: not set_columns & {*LAYOUT_COLUMNS[layout]})
    return next((n for n in order if getattr(columns, LAYOUT_COLUMNS[n][0]) in row), None)


def parse_messages(value: Any, location: str, column: str) -> tuple[list[ChatMessage], str]:
    """Return the messages before the last turn of the assistant, and the text of that turn.

    Args:
        value: the cell: a list of messages, or the same as JSON.
        location: of the row, for messages.
        column: of the cell.

    Raises:
        InputError: `wrong-column-type`, `unknown-role`, `no-assistant-turn`, `empty-text`.
    """
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if not isinstance(value, list) or not value or not all(map(_is_message, value)):
        raise InputError(
            f"{location}: column '{column}' must be a list of messages, each with a role and a content that"
            f' are texts, got {repr(value)[:80]}. Write [{{"role": "user", "content": "..."}}, ...].',
            code="wrong-column-type",
        )
    messages = [{"role": m["role"], "content": m["content"]} for m in value]
    _check_roles(messages, f"{location}: column '{column}'")
    if len(messages) < 2 or messages[-1]["role"] != "assistant" or messages[-2]["role"] != "user":
        raise InputError(
            f"{location}: column '{column}' must end with a turn of the user and the assistant's response;"
            f" the roles are {', '.join(m['role'] for m in messages)}. Complete the conversation, or remove"
            " the row.",
            code="no-assistant-turn",
        )
    blank = next((n for n, m in enumerate(messages, 1) if not m["content"].strip()), None)
    if blank is not None:
        raise InputError(
            f"{location}: column '{column}': message {blank} ({messages[blank - 1]['role']}) is empty. Remove"
            " or fill such rows.",
            code="empty-text",
        )
    return messages[:-1], messages[-1]["content"]


def parse_choices(value: Any, location: str, column: str) -> tuple[str, ...]:
    """Return the choices of a row: a list of texts, or the same as JSON.

    Raises:
        InputError: `wrong-column-type`, `empty-text`, `too-few-choices`, `duplicate-choice`.
    """
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if not isinstance(value, list) or not all(isinstance(choice, str) for choice in value):
        raise InputError(
            f"{location}: column '{column}' must be a list of texts, got {repr(value)[:80]}.",
            code="wrong-column-type",
        )
    blank = next((index for index, choice in enumerate(value) if not choice.strip()), None)
    if blank is not None:
        raise InputError(
            f"{location}: column '{column}': choice {blank} (counted from 0) is empty. Fill or remove it.",
            code="empty-text",
        )
    if len(value) < 2:
        raise InputError(
            f"{location}: column '{column}' has {with_count(len(value), 'choice')}. Give at least two.",
            code="too-few-choices",
        )
    if repeated := next((choice for choice in value if value.count(choice) > 1), None):
        raise InputError(
            f"{location}: column '{column}' has {repeated[:60]!r} twice. Remove one of them.",
            code="duplicate-choice",
        )
    return tuple(value)


def right_choice(value: Any, choices: Sequence[str], location: str, column: str) -> int:
    """Return the index of the right choice: `value` is its text, or its index from 0, also as text.

    Raises:
        InputError: `no-right-choice`.
    """
    if value in choices:
        return choices.index(value)
    index = int(value) if isinstance(value, str) and value.isdecimal() else value
    if isinstance(index, int) and not isinstance(index, bool) and 0 <= index < len(choices):
        return index
    choices_text = ", ".join(repr(choice)[:60] for choice in choices[:5]) + (
        ", ..." if len(choices) > 5 else ""
    )
    raise InputError(
        f"{location}: column '{column}' must be one of the choices ({choices_text}), or an index from 0 to"
        f" {len(choices) - 1}, got {repr(value)[:80]}. Correct it, or remove the row.",
        code="no-right-choice",
    )


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("role"), str)
        and isinstance(value.get("content"), str)
    )


def _check_roles(messages: Sequence[ChatMessage], location: str) -> None:
    for number, message in enumerate(messages, 1):
        if message["role"] not in ROLES:
            raise InputError(
                f"{location}: message {number} has the role {message['role'][:40]!r}; supported roles:"
                f" {', '.join(ROLES)}. Rename the role, or remove the message.",
                code="unknown-role",
            )


def assistant_turns(prompt: str, response: str) -> list[list[ChatMessage]]:
    """Return for each turn of the assistant the conversation that ends with it; the last one is `response`.

    Raises:
        InputError: as `prompt_messages`.
    """
    messages = [*prompt_messages(prompt), {"role": "assistant", "content": response}]
    return [messages[: index + 1] for index, message in enumerate(messages) if message["role"] == "assistant"]
