"""What can go wrong, sorted by the exit code it leads to.

Messages say what is wrong, what was read, and how to mend it. The command line prints the message
and exits with `exit_code`. Of any other error it shows the first line; the traceback goes into a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar, Self

if TYPE_CHECKING:
    from smelt.core.messages import Message

UNNAMED = "error"  # the code of an error of no particular kind
_LINE, _LINES = 2_000, 200  # characters and lines of a message


class SmeltError(Exception):
    """Base of all errors that smelt explains to the user.

    Args:
        message: what is wrong, what was read, and how to fix it.
        code: a slug that names the kind of error, such as `unknown-label`. Code and tests compare it,
            never the message.
        setting, file, line: where it applies, where that is known.
        found: of an error that reports several mistakes together, each of them.
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
        text = _short(str(message))
        super().__init__(text)
        self.code = code
        self.setting, self.file, self.line = setting, file, line
        self.found = tuple(found)

    def at(self, place: str) -> Self:
        """Return the error itself, with the file and line of `place` where that is ``FILE:LINE``."""
        file, _, line = place.rpartition(":")
        if file and line.isdecimal():
            self.file, self.line = file, int(line)
        return self

    def as_message(self, step: str | None = None) -> Message:
        """Return the error as data, for a report."""
        from smelt.core.messages import Message  # pydantic, which `import smelt` does without

        return Message(
            code=self.code or UNNAMED,
            severity="error",
            message=str(self),
            step=step,
            setting=self.setting,
            file=self.file,
            line=self.line,
        )


def _short(message: str) -> str:
    """Return `message` without the middle of what repeats more of an input than anybody reads."""
    lines = [
        line if len(line) <= _LINE else f"{line[: _LINE // 2]} [...] {line[-_LINE // 4 :]}"
        for line in message.split("\n")
    ]
    if len(lines) > _LINES:  # what is wrong stands at the beginning, how to mend it at the end
        tail = _LINES // 4
        head = _LINES - tail - 1
        lines = [*lines[:head], f"[... {len(lines) - head - tail:,} lines ...]", *lines[-tail:]]
    return "\n".join(lines)


class InputError(SmeltError):
    """Something that can be known before work starts: recipe, data, model folder, command line."""

    exit_code = 2


def together(found: Iterable[Message], kind: type[InputError] = InputError) -> InputError:
    """Return the error that reports `found`, one per line.

    It has their code where all have the same, and of a single one its setting, file and line.
    """
    messages = tuple(found)
    kinds = {message.code for message in messages}
    code = kinds.pop() if len(kinds) == 1 else "several-mistakes"
    error = kind("\n".join(map(str, messages)), code=code, found=messages)
    if len(messages) == 1:
        [only] = messages
        error.setting, error.file, error.line = only.setting, only.file, only.line
    return error


class RunError(SmeltError):
    """A stage, a runner or a measurement failed while it worked."""

    exit_code = 1


@contextmanager
def panics_explained() -> Iterator[None]:
    """Turn a panic of a Rust library (tokenizers, safetensors) inside into a RunError.

    pyo3's exception of a panic is no Exception, so that whoever catches those would let it end the process.
    A tokenizer panics where a regular expression of it takes too many steps for a text.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise RunError(
            f"A library gave up: {error}. The model's tokenizer, most likely: a regular expression in its"
            " tokenizer.json takes too many steps for a text.",
            code="library-panic",
        ) from error


class ParityError(RunError):
    """An exported graph does not compute what its parent computes."""


class SettingError(ValueError):
    """A setting that is refused by a validator of its settings class; pydantic passes it on.

    Args:
        message: what is wrong, what was read, and how to fix it.
        code: a slug that names the kind of mistake.
    """

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class MissingDependencyError(InputError):
    """A package that a step needs is not installed; the message says how to install it."""


class DeviceWarning(UserWarning):
    """A model runs on another device than it was made for; the message says why."""


class TruncationWarning(UserWarning):
    """Texts were longer than the model takes and were cut: `count` of them, at `limit` tokens."""

    def __init__(self, count: int, total: int, limit: int) -> None:
        self.count, self.limit = count, limit
        what = f"{total} text{'s' if total > 1 else ''} {'was' if count == 1 else 'were'}"
        super().__init__(
            f"{count} of {what} longer than the model takes ({limit} tokens) and cut."
            " Shorten or split what is longer."
        )


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the known word that `word` is a slip of, or an empty string.

    A slip is a few wrong, missing or swapped letters (three in ten at most, upper and lower case alike),
    or a whole beginning, else an end, between hyphens: `int8` for `int8-dynamic`. Words that only resemble
    each other, as `negative` and `positive` or `rouge3` and `rouge1` do, are not proposed: they are other
    things.
    """
    wanted = word.casefold()[:_LONGEST]
    found = [
        (slip, name)
        for name in known
        if name != word and (slip := _slip(wanted, name.casefold()[:_LONGEST])) is not None
    ]
    return f" Did you mean '{min(found)[1]}'?" if found else ""


_LONGEST = 100  # letters that are compared
_SHARE = 0.3  # of wrong letters
_AN_END = 1e-3  # less likely meant than a beginning, and more than wrong letters
_LEAST_PART = 3  # letters of a part that may stand for the whole
_NUMBERS = str.maketrans("123456789", "0" * 9)


def _slip(word: str, name: str) -> float | None:
    """Return how far `word` is from `name`, 0 to 1; None where it is no slip of it."""
    if word != name and word.translate(_NUMBERS) == name.translate(_NUMBERS):
        return None
    if len(word) >= _LEAST_PART and name.startswith((f"{word}-", f"{word}_")):
        return 0.0
    if len(word) >= _LEAST_PART and name.endswith((f"-{word}", f"_{word}")):
        return _AN_END
    longest = max(len(word), len(name))
    allowed = max(1, int(_SHARE * longest)) if longest > 2 else 0
    if abs(len(word) - len(name)) > allowed:
        return None
    edits = _edits(word, name)
    return edits / longest if edits <= allowed and longest else None


def _edits(one: str, other: str) -> int:
    """Return how many letters must be changed, added, left out or swapped with their neighbour.

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
