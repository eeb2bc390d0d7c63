"""How errors about columns name the setting: that of a recipe, or the option of a command that reads data."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple


class _ColumnOption(NamedTuple):
    """roles: those that the command reads; empty: all. is_name_only: its value is NAME, not ROLE=NAME."""

    roles: tuple[str, ...]
    is_name_only: bool


_column_option: ContextVar[_ColumnOption | None] = ContextVar("column_option", default=None)


@contextmanager
def column_options(*roles: str, is_name_only: bool = False) -> Iterator[None]:
    """Let errors about columns name the option `--column` of a command, which reads the columns `roles`."""
    token = _column_option.set(_ColumnOption(roles, is_name_only))
    try:
        yield
    finally:
        _column_option.reset(token)


def columns_hint(names: Mapping[str, str]) -> str:
    """Return how to set the columns `names`, by role, in a recipe; in `column_options` by the option."""
    if (option := _column_option.get()) is None:
        example = ", ".join(f"{role}: {name}" for role, name in names.items())
        return f"Name the right {'one' if len(names) == 1 else 'ones'} with data: {{columns: {{{example}}}}}."
    values = [
        name if option.is_name_only else f"{role}={name}"
        for role, name in names.items()
        if not option.roles or role in option.roles
    ]
    return f"Set the right names with {' '.join(f'--column {shlex.quote(value)}' for value in values)}."
