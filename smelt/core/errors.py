"""Exceptions, by the exit code of the command line.

A message has what happened, the value or place, and what to do. The command line prints the message
and exits with `exit_code`. Of any other error it prints the first line and writes the traceback to a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar, Self

if TYPE_CHECKING:
    from smelt.core.messages import Message

DEFAULT_CODE = "error"  # the code of an error without a specific code
_MAX_LINE, _MAX_LINES = 2_000, 200  # characters and lines of a message


class SmeltError(Exception):
    """Base of all errors with a message for the user.

    Args:
        message: what happened, the value or place, and what to do.
        code: a slug that names the kind of error, such as `unknown-label`. Code and tests compare it,
            never the message.
        setting, file, line: the place, if known.
        found: the single mistakes, if the error reports several.
    """

    exit_code: ClassVar[int] = 1

    def __init__(
        self,
        message: object = "",
        *,
        code: str = "",
        setting: str | None = None,
        file: str | None = None,
        line: int | None = None,
        found: Iterable[Message] = (),
    ) -> None:
        text = _shorten(str(message))
        super().__init__(text)
        self.code = code
        self.setting, self.file, self.line = setting, file, line
        self.found = tuple(found)

    def with_location(self, place: str) -> Self:
        """Set file and line from `place` if it is ``FILE:LINE``, and return the error."""
        file, _, line = place.rpartition(":")
        if file and line.isdecimal():
            self.file, self.line = file, int(line)
        return self

    def as_message(self, step: str | None = None) -> Message:
        """Return the error as a `Message`, for a report."""
        from smelt.core.messages import Message  # imports pydantic, which `import smelt` must not

        return Message(
            code=self.code or DEFAULT_CODE,
            severity="error",
            message=str(self),
            step=step,
            setting=self.setting,
            file=self.file,
            line=self.line,
        )


def _shorten(message: str) -> str:
    """Return `message` with the middle of very long inputs removed."""
    lines = [
        line if len(line) <= _MAX_LINE else f"{line[: _MAX_LINE // 2]} [...] {line[-_MAX_LINE // 4 :]}"
        for line in message.split("\n")
    ]
    if len(lines) > _MAX_LINES:  # the mistake is at the beginning, the fix at the end
        tail = _MAX_LINES // 4
        head = _MAX_LINES - tail - 1
        lines = [*lines[:head], f"[... {len(lines) - head - tail:,} lines ...]", *lines[-tail:]]
    return "\n".join(lines)


class InputError(SmeltError):
    """A mistake in the recipe, data, model folder or command line, found before work starts."""

    exit_code = 2


def combined_error(mistakes: Iterable[Message], error_class: type[InputError] = InputError) -> InputError:
    """Return the error that reports `mistakes`, one per line.

    The code is that of the mistakes if all have the same; a single one also sets setting, file and line.
    """
    messages = tuple(mistakes)
    kinds = {message.code for message in messages}
    code = kinds.pop() if len(kinds) == 1 else "several-mistakes"
    error = error_class("\n".join(map(str, messages)), code=code, found=messages)
    if len(messages) == 1:
        [only] = messages
        error.setting, error.file, error.line = only.setting, only.file, only.line
    return error


class RunError(SmeltError):
    """A stage, a runner or a measurement failed while it worked."""

    exit_code = 1


@contextmanager
def rust_panics_as_errors() -> Iterator[None]:
    """Convert a panic of a Rust library (tokenizers, safetensors) inside the context to a RunError.

    pyo3's panic exception is not an `Exception`, so ordinary handlers would let it end the process.
    A tokenizer panics if one of its regular expressions takes too many steps for a text.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise RunError(
            f"A library failed: {error}. Probably a regular expression in the model's tokenizer.json takes"
            " too"
            " many steps for a text. Shorten long texts, or use another tokenizer.",
            code="library-panic",
        ) from error


class ParityError(RunError):
    """The outputs of an exported graph differ from those of its source."""


class SettingError(ValueError):
    """A setting that a validator of its settings class rejects; pydantic passes it on.

    Args:
        message: what happened, the value, and what to do.
        code: a slug that names the kind of mistake.
    """

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class MissingDependencyError(InputError):
    """A package that a step needs is not installed; the message contains how to install it."""


class DeviceWarning(UserWarning):
    """A model runs on another device than intended; the message has the reason."""


class TruncationWarning(UserWarning):
    """`count` texts were longer than the model's `limit` of tokens and were truncated."""

    def __init__(self, count: int, total: int, limit: int) -> None:
        self.count, self.limit = count, limit
        what = f"{total} text{'s' if total > 1 else ''} {'was' if count == 1 else 'were'}"
        super().__init__(
            f"{count} of {what} longer than the model's limit ({limit} tokens) and truncated."
            " Shorten or split long texts."
        )


class PlanWarning(UserWarning):
    """A warning of the plan of a run; `code` names its kind, and `message` has its place too."""

    def __init__(self, message: Message) -> None:
        self.message, self.code = message, message.code
        super().__init__(str(message))


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the known name that `word` is a typo of, else "".

    A typo has a few wrong, missing or swapped letters (at most three in ten, ignoring case), or is a whole
    prefix or suffix between hyphens: `int8` for `int8-dynamic`. Names that are merely similar, such as
    `negative` and `positive` or `rouge3` and `rouge1`, are not suggested.
    """
    wanted = word.casefold()[:_MAX_WORD_LENGTH]
    found = [
        (slip, name)
        for name in candidates
        if name != word and (slip := _typo_distance(wanted, name.casefold()[:_MAX_WORD_LENGTH])) is not None
    ]
    return f" Did you mean '{min(found)[1]}'?" if found else ""


_MAX_WORD_LENGTH = 100  # letters that are compared
_MAX_TYPO_DISTANCE = 0.3  # fraction of wrong letters
_AFFIX_DISTANCE = 1e-3  # ranks a suffix after a prefix and before wrong letters
_MIN_AFFIX_LENGTH = 3  # letters of an abbreviation
_DIGITS_TO_ZERO = str.maketrans("123456789", "0" * 9)


def _typo_distance(word: str, name: str) -> float | None:
    """Return the distance of `word` from `name`, 0 to 1; None if it is no typo of it."""
    if word != name and word.translate(_DIGITS_TO_ZERO) == name.translate(_DIGITS_TO_ZERO):
        return None
    if len(word) >= _MIN_AFFIX_LENGTH and name.startswith((f"{word}-", f"{word}_")):
        return 0.0
    if len(word) >= _MIN_AFFIX_LENGTH and name.endswith((f"-{word}", f"_{word}")):
        return _AFFIX_DISTANCE
    longest = max(len(word), len(name))
    allowed = max(1, int(_MAX_TYPO_DISTANCE * longest)) if longest > 2 else 0
    if abs(len(word) - len(name)) > allowed:
        return None
    edits = _edit_distance(word, name)
    return edits / longest if edits <= allowed and longest else None


def _edit_distance(one: str, other: str) -> int:
    """Return the number of edits: change, insert, delete, or swap neighbouring letters.

    The optimal string alignment distance: Damerau 1964, https://doi.org/10.1145/363958.363994.
    """
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, start=1):
        before, above, row = row, before, [i]
        for j, its in enumerate(other, start=1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != its))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == its:
                cost = min(cost, above[j - 2] + 1)
            row.append(cost)
    return row[-1]
