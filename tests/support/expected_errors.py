"""Expect errors by their codes: tests compare what kind of error it is, never its words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from pydantic import ValidationError

from smelt.core.errors import DEFAULT_CODE, SettingError, SmeltError
from smelt.core.messages import Message


def raises_code(code: str, kind: type[SmeltError] = SmeltError) -> Any:
    """Expect an error of `kind` with `code`; entered, it gives pytest's ExceptionInfo.

    A recipe with one error, or several of one kind, has the error's code, else `several-errors`; its
    `found` has each error with its setting, file and line.
    """
    return pytest.raises(kind, check=lambda error: error.code == code)


def raises_setting_codes(*codes: str) -> Any:
    """Expect settings to be refused with `codes`, in their order.

    Of a validator of ours the code of its SettingError, of one of pydantic its type, such as
    `greater_than_equal` (https://docs.pydantic.dev/latest/errors/validation_errors/).
    """
    return pytest.raises(ValidationError, check=lambda error: setting_codes(error) == list(codes))


def setting_codes(error: ValidationError) -> list[str]:
    """Return the codes of all errors that pydantic found."""
    causes = [(detail["type"], detail.get("ctx", {}).get("error")) for detail in error.errors()]
    return [cause.code if isinstance(cause, SettingError) else kind for kind, cause in causes]


def command_error(result: Any) -> SmeltError:
    """Return the error that a command of `harness.smelt` ended with; it is on the terminal with its code."""
    error: SmeltError | None = result.error
    assert error is not None, result.output
    assert f"error[{error.code or DEFAULT_CODE}]: " in result.output, result.output
    return error


def error_codes(error: SmeltError) -> list[str]:
    """Return the code of each error that `error` reports, in their order."""
    return [message.code for message in error.messages] or [error.code]


def message_locations(messages: Iterable[Message]) -> list[tuple[str, str | None, int | None]]:
    """Return code, setting and line of each message, in their order."""
    return [(message.code, message.setting, message.line) for message in messages]
