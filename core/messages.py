"""What smelt has to say to a person, as data: a code to compare, and a text to read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal

Severity = Literal["info", "warning", "error"]
_SLUG = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@dataclass(frozen=True)
class Message:
    """A warning, an error or a piece of information about a run, a step or a plan.

    code: a slug that names the kind of message, such as `few-calibration-tokens`. Code and tests compare it,
        never the text.
    message: what happened, the values, what to do.
    severity: info; warning, where results may be worse than they look; error.
    step, setting, file, line: where it applies, where that is known.
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
        if not _SLUG.fullmatch(self.code):
            raise ValueError(f"a code is a slug of small letters, digits and hyphens, read {self.code!r}")

    def __str__(self) -> str:
        place = self.file or ("line" if self.line is not None else "")
        at = "" if self.line is None else f":{self.line}" if self.file else f" {self.line}"
        where = f"{place}{at}"
        if re.match(rf"{re.escape(where)}(?!\w)", self.message):
            where = ""  # an error's text has it
        return ": ".join(part for part in (where, self.step or "", self.message) if part)

    def prefixed(self, prefix: str) -> Message:
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


def mistake(
    code: str,
    message: str,
    *,
    setting: str | None = None,
    file: str | None = None,
    line: int | None = None,
) -> Message:
    """Return a `Message` of severity `error`: one of several mistakes that an error reports together."""
    return Message(code=code, severity="error", message=message, setting=setting, file=file, line=line)


def info(code: str, message: str) -> Message:
    """Return a `Message` of severity `info`."""
    return Message(code, message, severity="info")


def codes(messages: Iterable[Message]) -> list[str]:
    """Return the codes of `messages`, in their order."""
    return [message.code for message in messages]


def as_json(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Return `messages` as JSON-able dictionaries, without the places that are not known."""
    return [{name: value for name, value in asdict(one).items() if value is not None} for one in messages]
