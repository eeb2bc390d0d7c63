"""Render chat templates, in a separate process with limits of memory and time.

A chat template is a program that comes with a model: it can loop for hours (`9**(9**8)`, nested loops),
request any memory (`'x' * 10**10`) and fail with any of Python's errors, already while it is compiled.
Jinja's sandbox keeps it from files and Python's objects, but limits neither time nor memory. So one worker
process renders all conversations of this process (`smelt.core.isolated_worker`); a request has those of a
data set, in parts.

Templates are rendered as by `apply_chat_template` of transformers (chat_template_utils.py, 5.23): the same
sandbox, filters and functions.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from smelt.core.isolated_worker import IsolatedWorker
from smelt.core.system import MAX_OUTPUT_CHARS, IsolatedProcessError
from smelt.data.prompt_rows import ChatMessage

# A published template takes less than 1 ms and 30 MB for a conversation of some thousand letters.
MEMORY_BYTES = 1_000_000_000
BASE_SECONDS = 5.0
SECONDS_PER_CONVERSATION, SECONDS_PER_CHAR = 0.02, 5e-6
MAX_TEXT_CHARS, TEXT_FACTOR = 20_000_000, 20  # of a request's results: a constant, and per input letter
_REQUEST_CONVERSATIONS, _REQUEST_CHARS = 500, 2_000_000

_worker = IsolatedWorker(f"{__name__}:render_request", MEMORY_BYTES)


class ChatRequest(NamedTuple):
    """A conversation to render. add_generation_prompt: the assistant's turn is begun after it."""

    messages: Sequence[ChatMessage]
    add_generation_prompt: bool


class ChatTemplateError(Exception):
    """The template failed; the message is why, as the end of a sentence.

    request: index of the conversation that it cannot render; None: not one of them in particular.
    """

    def __init__(self, message: str, request: int | None) -> None:
        super().__init__(message)
        self.request = request


def render_chats(
    template: str, special_tokens: Mapping[str, str], requests: Sequence[ChatRequest]
) -> list[str]:
    """Return each conversation as text.

    Args:
        template: Jinja.
        special_tokens: by their names in the template.
        requests: the conversations.

    Raises:
        ChatTemplateError: the template is invalid, fails on a conversation, or exceeds a limit.
    """
    texts: list[str] = []
    for batch in _parts(requests):
        chars = len(template) + sum(map(_size, batch))
        seconds = BASE_SECONDS + SECONDS_PER_CONVERSATION * len(batch) + SECONDS_PER_CHAR * chars
        request = {
            "template": template,
            "special_tokens": dict(special_tokens),
            "requests": batch,
            "max_chars": MAX_TEXT_CHARS + TEXT_FACTOR * chars,
        }
        try:
            reply = _worker.ask(request, seconds)
        except IsolatedProcessError as error:
            raise ChatTemplateError(str(error), None) from error
        if "failed" in reply:
            number = reply["request"]
            raise ChatTemplateError(reply["failed"], None if number is None else len(texts) + number)
        texts += reply["texts"]
    return texts


def _size(request: ChatRequest) -> int:
    return sum(len(message["content"]) for message in request.messages)


def _parts(requests: Sequence[ChatRequest]) -> Iterator[list[ChatRequest]]:
    """Split `requests` into parts of limited size; a longer conversation is a part of its own."""
    batch: list[ChatRequest] = []
    chars = 0
    for request in requests:
        size = _size(request)
        if batch and (len(batch) >= _REQUEST_CONVERSATIONS or chars + size > _REQUEST_CHARS):
            yield batch
            batch, chars = [], 0
        batch.append(request)
        chars += size
    if batch:
        yield batch


def render_request(question: Mapping[str, Any]) -> dict[str, Any]:
    """Answer one request of `render_chats`, in the worker: the texts, or why the template failed."""
    template, remaining_chars = question["template"], question["max_chars"]
    try:
        compiled = _compile(template)
    except MemoryError:
        raise
    except Exception as error:  # a template can fail with any of Python's errors
        return {"failed": f"it is not a valid Jinja template: {_reason(error)}", "request": None}
    texts: list[str] = []
    for number, (messages, add_generation_prompt) in enumerate(question["requests"]):
        parts: list[str] = []
        try:
            for chunk in compiled.generate(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**question["special_tokens"], "enable_thinking": False},
            ):
                parts.append(chunk)
                remaining_chars -= len(chunk)
                if remaining_chars < 0:
                    max_chars = question["max_chars"]
                    return {"failed": f"its text has more than {max_chars:,} letters", "request": number}
        except MemoryError:
            raise
        except Exception as error:
            return {"failed": _reason(error), "request": number}
        texts.append("".join(parts))
    return {"texts": texts}


def _reason(error: Exception) -> str:
    from jinja2 import TemplateError

    text = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
    return text[:MAX_OUTPUT_CHARS]


@functools.lru_cache(maxsize=4)
def _compile(template: str) -> Any:
    """Return `template` compiled by Jinja in a sandbox."""
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
    return environment.from_string(template)
