"""What can go wrong, sorted by the exit code it leads to.

Messages say what is wrong, what was read, and how to mend it. The command line prints the message
and exits with `exit_code`. Of any other error it shows the first line; the traceback goes into a file.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import ClassVar


class SmeltError(Exception):
    """Base of all errors that smelt explains to the user."""

    exit_code: ClassVar[int] = 1


class InputError(SmeltError):
    """Something that can be known before work starts: recipe, data, model folder, command line."""

    exit_code = 2


class RunError(SmeltError):
    """A stage, a runner or a measurement failed while it worked."""

    exit_code = 1


class ParityError(RunError):
    """An exported graph does not compute what its parent computes."""


class MissingDependencyError(InputError):
    """A package that a step needs is not installed; the message says how to install it."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the known word nearest to `word`, or an empty string."""
    matches = get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" Did you mean '{matches[0]}'?" if matches else ""
