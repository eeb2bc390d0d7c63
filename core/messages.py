"""What smelt has to say to a person, as data: a code to compare, and a text to read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

Severity = Literal["info", "warning", "error"]


class Message(BaseModel):
    """A warning, an error or a piece of information about a run, a step or a plan.

    code: a slug that names the kind of message, such as `few-calibration-tokens`. Code and tests compare it,
        never the text.
    severity: info; warning, where results may be worse than they look; error.
    message: what happened, the values, what to do.
    step, setting, file, line: where it applies, where that is known.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    code: Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
    severity: Severity = "warning"
    message: str
    step: str | None = None
    setting: str | None = None
    file: str | None = None
    line: int | None = None

    @model_serializer(mode="wrap")
    def _without_empty_places(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in serialize(self).items() if value is not None}

    def __str__(self) -> str:
        place = self.file or ("line" if self.line is not None else "")
        at = "" if self.line is None else f":{self.line}" if self.file else f" {self.line}"
        where = "" if self.message.startswith(f"{place}{at}") else f"{place}{at}"  # an error's text has it
        return ": ".join(part for part in (where, self.step or "", self.message) if part)

    def prefixed(self, prefix: str) -> Message:
        """Return the same message with `prefix` before its text."""
        return self.model_copy(update={"message": f"{prefix}{self.message}"})


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
    return Message(code=code, message=message, step=step, setting=setting, file=file, line=line)


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
    return Message(code=code, severity="info", message=message)


def codes(messages: Iterable[Message]) -> list[str]:
    """Return the codes of `messages`, in their order."""
    return [message.code for message in messages]


def as_json(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Return `messages` as JSON-able dictionaries."""
    return [message.model_dump(mode="json") for message in messages]
