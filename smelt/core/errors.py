"""Exceptions, by the exit code of the command line.

A message has what happened, the value or place, and what to do. The command line prints the message
and exits with `exit_code`. Of any other error it prints the first line and writes the traceback to a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
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
        messages: the single errors, if the error reports several.
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
        messages: Iterable[Message] = (),
    ) -> None:
        text = _shorten(str(message))
        super().__init__(text)
        self.code = code
        self.setting, self.file, self.line = setting, file, line
        self.messages = tuple(messages)

    def with_location(self, location: str) -> Self:
        """Set file and line from `location` if it is ``FILE:LINE``, and return the error."""
        file, _, line = location.rpartition(":")
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
    if len(lines) > _MAX_LINES:  # the error is at the beginning, the fix at the end
        tail = _MAX_LINES // 4
        head = _MAX_LINES - tail - 1
        lines = [*lines[:head], f"[... {len(lines) - head - tail:,} lines ...]", *lines[-tail:]]
    return "\n".join(lines)


class InputError(SmeltError):
    """An error in the recipe, data, model folder or command line, found before work starts."""

    exit_code = 2


def combined_error(errors: Iterable[Message], error_class: type[InputError] = InputError) -> InputError:
    """Return the error that reports `errors`, one per line.

    The code is that of the errors if all have the same; a single one also sets setting, file and line.
    """
    messages = tuple(errors)
    kinds = {message.code for message in messages}
    code = kinds.pop() if len(kinds) == 1 else "several-errors"
    error = error_class("\n".join(map(str, messages)), code=code, messages=messages)
    if len(messages) == 1:
        [single_message] = messages
        error.setting, error.file, error.line = (
            single_message.setting,
            single_message.file,
            single_message.line,
        )
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
        code: a slug that names the kind of error.
    """

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class MissingDependencyError(InputError):
    """A package that a step needs is not installed; the message contains how to install it."""


class DeviceWarning(UserWarning):
    """A model runs on another device than intended; the message has the reason."""


class EngineWarning(UserWarning):
    """TensorRT warned about an engine, or the engine is slower than need be, by its `code`.

    Codes: `tensorrt-warning`, a warning of TensorRT itself; `other-gpu-model`, it was built on another model
    of GPU; `rows-split`, a batch has more rows than it was built for, so that each token takes several runs.
    """

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class TruncationWarning(UserWarning):
    """`count` texts were longer than the model's `limit` of tokens and were truncated."""

    def __init__(self, count: int, total: int, limit: int) -> None:
        self.count, self.limit = count, limit
        super().__init__(truncation_text(count, total, limit))


def truncation_text(count: int, total: int, limit: int) -> str:
    """Return the warning that `count` of `total` texts were truncated to `limit` tokens."""
    texts_phrase = f"{total} text{'s' if total > 1 else ''} {'was' if count == 1 else 'were'}"
    return (
        f"{count} of {texts_phrase} longer than the model's limit ({limit} tokens) and truncated."
        " Shorten or split long texts."
    )


class PlanWarning(UserWarning):
    """A warning of the plan of a run; `code` names its kind, and `message` has its place too."""

    def __init__(self, message: Message) -> None:
        self.message, self.code = message, message.code
        super().__init__(str(message))


def did_you_mean(typed_name: str, candidates: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the known name that `typed_name` is a typo of, else "".

    A typo is at least 80 percent similar by `difflib` (less up to five letters; ignoring case), or is a whole
    prefix or suffix between hyphens: `int8` for `int8-dynamic`. Names that differ in digits only, such as
    `rouge3` and `rouge1`, and names that are merely similar, such as `negative` and `positive`, are not
    suggested.
    """
    folded_word = typed_name.casefold()[:_MAX_WORD_LENGTH]
    names = {name.casefold()[:_MAX_WORD_LENGTH]: name for name in candidates if name != typed_name}
    if len(folded_word) >= _MIN_AFFIX_LENGTH:
        prefixed = [name for name in names if name.startswith((f"{folded_word}-", f"{folded_word}_"))]
        suffixed = [name for name in names if name.endswith((f"-{folded_word}", f"_{folded_word}"))]
        if affixed := sorted(prefixed) or sorted(suffixed):
            return f" Did you mean '{names[affixed[0]]}'?"
    pattern = folded_word.translate(_DIGITS_TO_ZERO)
    same_digit_names = [
        name for name in names if name == folded_word or name.translate(_DIGITS_TO_ZERO) != pattern
    ]
    # two swapped letters of `run` or `bleu`, but not `negative` for `positive`, which has 0.75
    cutoff = {1: 1.0, 2: 1.0, 3: 0.65, 4: 0.75, 5: 0.75}.get(len(folded_word), 0.8)
    similar = get_close_matches(folded_word, same_digit_names, n=1, cutoff=cutoff)
    return f" Did you mean '{names[similar[0]]}'?" if similar else ""


_MAX_WORD_LENGTH = 100  # letters that are compared
_MIN_AFFIX_LENGTH = 3  # letters of an abbreviation
_DIGITS_TO_ZERO = str.maketrans("123456789", "0" * 9)
