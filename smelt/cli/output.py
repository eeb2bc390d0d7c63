"""What commands print, and standard streams that are closed, full, without a reader or in another encoding.

Standard error has messages and progress: if it cannot be written, they are dropped and the command goes on.
Standard output has results: if it cannot be written, the command fails with `OutputError`, unless the result
is also in a file (`print_summary`). If its reader has ended (`smelt stages | head -1`), the rest is dropped.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

from smelt.core.errors import RunError
from smelt.core.messages import escape_controls

# Characters that smelt's tables and pages use, for encodings without them.
_ASCII_FORMS = {
    "├": "|", "└": "`", "│": "|", "─": "-", "–": "-", "−": "-", "…": "~", "×": "x", "·": ",", "→": "->",
    "←": "<-", "±": "+-", "◆": "*", "✓": "+", "✗": "x",
}  # fmt: skip
_ASCII_ERRORS = "smelt-ascii"


class OutputError(RunError):
    """Standard output cannot be written."""


class _StandardFile(io.RawIOBase):
    """The file of standard output or standard error."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream  # it would close its file if it were deleted
        self._raw = getattr(stream.buffer, "raw", stream.buffer)  # python -u has no buffer

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._stream.fileno()

    def isatty(self) -> bool:
        """Return whether it is a terminal."""
        return self._stream.isatty()


class _MessagesFile(_StandardFile):
    """The file of standard error: what cannot be written is dropped."""

    def write(self, data: Any, /) -> int | None:
        """Write `data`, return how many bytes were written or dropped."""
        size = memoryview(data).nbytes
        try:
            num_written = self._raw.write(data)
        except OSError:
            return size
        return size if num_written is None else num_written  # None: a non-blocking stream that is full


class _ResultsFile(_StandardFile):
    """The file of standard output: the first failure is raised, or noted if the reader has ended."""

    reader_has_ended = False
    _has_failed = False

    def write(self, data: Any, /) -> int | None:
        """Write `data`, return how many bytes were written or dropped.

        Raises:
            OutputError: it cannot be written.
        """
        if self._has_failed or self.reader_has_ended:  # Python writes again what remains, also at its exit
            return memoryview(data).nbytes
        try:
            num_written: int | None = self._raw.write(data)
        except BrokenPipeError:
            self.reader_has_ended = True
            return memoryview(data).nbytes
        except OSError as error:
            self._has_failed = True
            reason = "it is closed" if error.errno == errno.EBADF else error.strerror
            raise OutputError(
                f"standard output: cannot be written: {reason}. Redirect it to a file that can be written.",
                code="unwritable-output",
            ) from error
        return num_written


def open_standard_streams() -> None:
    """Replace standard output and standard error by streams that behave as the module describes."""
    _open_missing_descriptors()
    codecs.register_error(_ASCII_ERRORS, _replace_by_ascii)
    sys.stdout = _open_stream(sys.stdout, 1, _ResultsFile)
    sys.stderr = _open_stream(sys.stderr, 2, _MessagesFile)


def run_program(command: Callable[[], Any]) -> None:
    """Run `command` with the streams of this module."""
    open_standard_streams()
    try:
        command()
    except OutputError as error:  # from --help, which is printed before a command is invoked
        print_untrusted(f"error[{error.code}]: {error}", err=True)
        sys.exit(error.exit_code)


def _open_missing_descriptors() -> None:
    """Open the null device for each closed standard descriptor.

    Otherwise the next file that is opened, such as a log or weights, would get its number, and libraries that
    write to standard error would write into that file. Standard input and output are opened in the contrary
    mode, so that using them still fails (as in gnulib's stdopen).
    """
    for descriptor, mode in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, mode)  # gets the lowest free number, which is `descriptor`


def _open_stream(stream: TextIO | None, descriptor: int, kind: type[_StandardFile]) -> TextIO:
    """Return a stream like `stream`, which is None if it was closed, with a file of the class `kind`."""
    if stream is None:
        stream = open(descriptor, "w", closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(
        io.BufferedWriter(kind(stream)),
        encoding=stream.encoding,
        errors=_ASCII_ERRORS,
        line_buffering=True,
    )


def _replace_by_ascii(error: UnicodeError) -> tuple[str, int]:
    r"""Return the ASCII forms of characters that an encoding lacks: `x` for `×`, `\u4e2d` for others."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    characters = error.object[error.start : error.end]
    forms = (_ASCII_FORMS.get(c) or c.encode("ascii", "backslashreplace").decode() for c in characters)
    return "".join(forms), error.end


def reader_has_ended() -> bool:
    """Return whether nobody reads standard output any more."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return isinstance(raw, _ResultsFile) and raw.reader_has_ended


def print_untrusted(text: str, err: bool = False) -> None:
    """Print untrusted text, from data, model folders or recipes, with control characters escaped.

    Raises:
        OutputError: standard output cannot be written.
    """
    print(escape_controls(text), file=sys.stderr if err else sys.stdout, flush=True)


def print_result(text: str) -> None:
    """Print a result unchanged, for files and programs; on a terminal with control characters escaped.

    Raises:
        OutputError: standard output cannot be written.
    """
    print(escape_controls(text) if sys.stdout.isatty() else text, flush=True)


def print_json(text: str) -> None:
    """Print JSON, which is UTF-8 in files and for programs, whatever the terminal's encoding is.

    Raises:
        OutputError: standard output cannot be written.
    """
    if sys.stdout.isatty():
        print_untrusted(text)
    else:
        print_bytes(f"{text}\n".encode())


def print_summary(text: str) -> None:
    """Print what is also written to a file; if that fails, warn and go on."""
    try:
        print_untrusted(text)
    except OutputError as error:
        print_untrusted(f"warning: {error}", err=True)


def print_bytes(content: bytes) -> None:
    """Print the content of a file unchanged.

    Raises:
        OutputError: standard output cannot be written.
    """
    sys.stdout.buffer.write(content)
    sys.stdout.buffer.flush()
