"""Messages to the user as data: a code to compare, and a text to read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal

Severity = Literal["info", "warning", "error"]
_CODE_PATTERN = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@dataclass(frozen=True)
class Message:
    """A warning, an error or information about a run, a step or a plan.

    code: a slug that names the kind of message, such as `few-calibration-tokens`. Code and tests compare it,
        never the text.
    message: what happened, the value or place, what to do.
    severity: info; warning, if results may be worse than they look; error.
    step, setting, file, line: the place, if known.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {
        "extra": "forbid"
    }  # importing smelt imports no pydantic
    code: str
    message: str
    severity: Severity = "warning"
    step: str | None = None
    setting: str | None = None
    file: str | None = None
    line: int | None = None

    def __post_init__(self) -> None:
        if not _CODE_PATTERN.fullmatch(self.code):
            raise ValueError(f"a code consists of lower-case letters, digits and hyphens, got {self.code!r}")

    def __str__(self) -> str:
        place = self.file or ("line" if self.line is not None else "")
        at = "" if self.line is None else f":{self.line}" if self.file else f" {self.line}"
        where = f"{place}{at}"
        if re.match(rf"{re.escape(where)}(?!\w)", self.message):
            where = ""  # the text of an error already has it
        return ": ".join(part for part in (where, self.step or "", self.message) if part)

    def with_prefix(self, prefix: str) -> Message:
        """Return the same message with `prefix` before its text."""
        return replace(self, message=f"{prefix}{self.message}")


def warning(
    code: str,
    message: str,
    *,
    step: str | None = None,
    setting: str | None = None,
    file: str | None = None,
    line: int | None = None,
) -> Message:
    """Return a `Message` of severity `warning`."""
    return Message(code, message, step=step, setting=setting, file=file, line=line)


def error_message(
    code: str,
    message: str,
    *,
    setting: str | None = None,
    file: str | None = None,
    line: int | None = None,
) -> Message:
    """Return a `Message` of severity `error`: one of several mistakes of an error."""
    return Message(code=code, severity="error", message=message, setting=setting, file=file, line=line)


def info(code: str, message: str) -> Message:
    """Return a `Message` of severity `info`."""
    return Message(code, message, severity="info")


def message_codes(messages: Iterable[Message]) -> list[str]:
    """Return the codes of `messages`, in their order."""
    return [message.code for message in messages]


def messages_to_json(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Return `messages` as JSON-able dictionaries, without unknown places."""
    return [
        {name: value for name, value in asdict(message).items() if value is not None} for message in messages
    ]
