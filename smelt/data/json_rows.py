"""Read .json and .jsonl files as rows, and UTF-8 text files, with or without gzip, whole or as a stream.

The rows of .json are a list of objects, an object with one such list, or consecutive objects. The standard
library parses a whole file at once. Here one value is parsed at a time from a window of the text, so that
memory holds the longest row and not the file.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError
from smelt.data.tasks import task_names


def data_suffix(path: Path) -> str:
    """Return the suffix of the data format: the one before .gz, if there is one."""
    suffixes = [s.lower() for s in path.suffixes]
    if suffixes[-1:] == [".gz"] and len(suffixes) > 1:
        return suffixes[-2]
    return suffixes[-1] if suffixes else ""


def read_text_file(path: Path) -> str:
    """Return the text of a UTF-8 file, decompressed if its name ends in .gz.

    Raises:
        InputError: it cannot be read.
    """
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix.lower() == ".gz" else path.read_bytes()
        return raw.decode("utf-8-sig")
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(
            f"{path}: cannot be read: {error}", code="unreadable-file", file=str(path)
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: not UTF-8 text at byte {error.start}. Convert the file to UTF-8.",
            code="not-utf8",
            file=str(path),
        ) from error


@contextmanager
def open_text(path: Path, newline: str) -> Iterator[io.TextIOBase]:
    r"""Open a UTF-8 file as a text stream, decompressed if its name ends in .gz.

    newline: as for `open`; line ends are never translated with "" and "\n".

    Raises:
        InputError: it cannot be read; also raised while reading inside the context.
    """
    packed = path.suffix.lower() == ".gz"
    try:
        with (gzip.open if packed else open)(path, "rt", encoding="utf-8-sig", newline=newline) as stream:
            yield stream
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(
            f"{path}: cannot be read: {error}", code="unreadable-file", file=str(path)
        ) from error
    except UnicodeDecodeError:
        read_text_file(path)  # raises, and names the byte
        raise


MAX_LINE_CHARACTERS = 64 * 2**20
"""The longest line, or JSON value. A small packed file may have one that exceeds the memory."""


def read_lines(path: Path, stream: io.TextIOBase) -> Iterator[str]:
    """Yield the lines of a stream with their line ends.

    Raises:
        InputError: a line has more than `MAX_LINE_CHARACTERS` (`line-too-long`).
    """
    number = 0
    while line := stream.readline(MAX_LINE_CHARACTERS + 1):
        number += 1
        if len(line) > MAX_LINE_CHARACTERS:
            raise _too_long(path, number, "line")
        yield line


def _too_long(path: Path, line: int, what: str) -> InputError:
    return InputError(
        f"{path}:{line}: this {what} has more than {MAX_LINE_CHARACTERS:,} characters. Divide it, or check"
        " that the file is what you meant.",
        code="line-too-long",
        file=str(path),
        line=line,
    )


_CHUNK_CHARACTERS = 1 << 16
# A value that ends this close to the end of the window may be truncated.
_MAX_TOKEN_CHARACTERS = 16
_WHITESPACE = " \t\r\n"

_Row = tuple[str, Mapping[str, Any]]


def read_json_rows(path: Path) -> Iterator[_Row]:
    """Yield the rows of a .json file, each with its first line, or its number.

    Raises:
        InputError: it cannot be read, is not JSON, or has no list of rows, or several.
    """
    with open_text(path, newline="\n") as stream:
        scan = _JsonScanner(path, stream)
        if scan.peek() == "[":
            yield from scan.iter_rows()
            scan.expect_end()
            return
        holder = _rows_key(scan) if scan.peek() == "{" else None
    with open_text(path, newline="\n") as stream:
        scan = _JsonScanner(path, stream)
        if holder is None:
            while scan.peek():
                location = scan.location
                yield location, require_object(scan.read_value(), location)
            return
        for name in scan.iter_keys():
            if name == holder:
                yield from scan.iter_rows()
            else:
                scan.skip_value()


class DuplicateKeyError(ValueError):
    """A JSON object has a key twice; a parser would silently keep the last."""


def reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; an `object_pairs_hook`.

    Raises:
        DuplicateKeyError: a key occurs twice.
    """
    keys_to_values = dict(pairs)
    if len(keys_to_values) < len(pairs):
        names = [name for name, _ in pairs]
        duplicate = next(name for name in names if names.count(name) > 1)
        raise DuplicateKeyError(f"'{duplicate[:80]}'")
    return keys_to_values


def require_object(row: Any, location: str) -> Mapping[str, Any]:
    """Return `row` if it is a JSON object.

    Raises:
        InputError: it is not.
    """
    if isinstance(row, dict):
        return row
    is_list_of_rows = isinstance(row, list) and bool(row) and isinstance(row[0], dict)
    hint = " If the file is one list of rows, rename it to end in .json." if is_list_of_rows else ""
    row_text = json.dumps(row, ensure_ascii=False)[:80]
    raise InputError(
        f"{location}: expected a JSON object with named columns, got {row_text!r}.{hint}",
        code="not-an-object",
    ).with_location(location)


def _rows_key(scan: _JsonScanner) -> str | None:
    """Return the key of the only list of objects in the object that starts here.

    None if the object is a row itself: it has no such list, or more objects follow it.

    Raises:
        InputError: there are several lists of objects, or columns instead of rows.
    """
    lists, kinds = [], []
    for name in scan.iter_keys():
        kind = scan.skip_value()
        kinds.append(kind)
        lists += [name] if kind == "rows" else []
    if scan.peek() or (not lists and set(kinds) - {"values", "object"}):
        return None
    if len(lists) == 1:
        return lists[0]
    if lists:
        raise InputError(
            f"{scan.path}: this file contains several lists of rows ({', '.join(lists[:5])}); only one"
            " is supported. Write each split to a separate file.",
            code="several-row-lists",
            file=str(scan.path),
        )
    if len(kinds) > 1:
        raise InputError(
            f"{scan.path}: this file contains columns, not rows. Write a list of objects; with pandas:"
            " to_json(FILE, orient='records').",
            code="columns-not-rows",
            file=str(scan.path),
        )
    return None


class _JsonScanner:
    """Reads JSON from `stream` piece by piece; `line` is the line of the next piece."""

    def __init__(self, path: Path, stream: Any) -> None:
        self.path, self.stream = path, stream
        self.text, self.at, self.line = "", 0, 1
        self.decoder = json.JSONDecoder(object_pairs_hook=reject_duplicate_keys)

    @property
    def location(self) -> str:
        """The file and the line of the next piece."""
        return f"{self.path}:{self.line}"

    def peek(self) -> str:
        """Skip white space; return the next character, "" at the end."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in _WHITESPACE:
                self._advance(self.at + 1)
            if self.at < len(self.text):
                return self.text[self.at]
            if not self._read_more():
                return ""

    def read_value(self) -> Any:
        """Read one value of any type and return it."""
        self.peek()
        while True:
            try:
                value, end = self.decoder.raw_decode(self.text, self.at)
            except RecursionError as error:
                raise InputError(
                    f"{self.location}: invalid JSON: nested too deeply.", code="nested-too-deep"
                ).with_location(self.location) from error
            except json.JSONDecodeError as error:
                is_incomplete = (
                    error.msg.startswith("Unterminated") or len(self.text) - error.pos < _MAX_TOKEN_CHARACTERS
                )
                if is_incomplete and self._read_more():
                    continue
                raise self._syntax_error(error.msg, error.pos) from error
            except DuplicateKeyError as error:
                raise InputError(
                    f"{self.location}: this row has the key {error} twice. Rename or remove one of the two.",
                    code="duplicate-column",
                ).with_location(self.location) from error
            except ValueError as error:  # an integer with thousands of digits
                raise InputError(
                    f"{self.location}: invalid JSON: {error}.", code="invalid-json"
                ).with_location(self.location) from error
            if end == len(self.text) and self.text[end - 1] not in '}]"' and self._read_more():
                continue  # the rest of a number may follow
            self._advance(end)
            return value

    def iter_rows(self) -> Iterator[_Row]:
        """Read a list; yield each of its objects with its first line, or its number.

        pandas writes all rows in one line, so only the first is identified by its line.
        """
        before = 0
        for number, start in enumerate(self._iter_items("[", "]"), start=1):
            line, location = self.line, start if self.line != before else f"{self.path} row {number}"
            yield location, require_object(self.read_value(), location)
            before = line

    def iter_keys(self) -> Iterator[str]:
        """Read an object; yield each key. Its value must be read before the next key."""
        for location in self._iter_items("{", "}"):
            key = self.read_value()
            if not isinstance(key, str):
                raise InputError(
                    f"{location}: invalid JSON: expected a name in quotes, got {str(key)[:40]!r}.",
                    code="invalid-json",
                ).with_location(location)
            self._expect(":")
            yield key

    def skip_value(self) -> str:
        """Skip a value; return its kind: rows (a list of objects), values (other list), object or single."""
        start = self.peek()
        if start != "[":
            self.read_value()
            return "object" if start == "{" else "single"
        objects = [isinstance(self.read_value(), dict) for _ in self._iter_items("[", "]")]
        return "rows" if objects and all(objects) else "values"

    def expect_end(self) -> None:
        """Require the end of the text.

        Raises:
            InputError: more text follows.
        """
        if self.peek():
            raise self._syntax_error("more text after the end of the list", self.at, "text-after-end")

    def _iter_items(self, begin: str, end: str) -> Iterator[str]:
        """Read `begin`, commas and `end`; yield at the start of each item, which the caller must read."""
        self._expect(begin)
        if self.peek() != end:
            while True:
                self.peek()
                yield self.location
                if self.peek() != ",":
                    break
                self._advance(self.at + 1)
        self._expect(end)

    def _expect(self, character: str) -> None:
        if self.peek() != character:
            raise self._syntax_error(f"expected '{character}'", self.at)
        self._advance(self.at + 1)

    def _syntax_error(self, what: str, position: int, code: str = "invalid-json") -> InputError:
        line = self.line + self.text.count("\n", self.at, position)
        upcoming = self.text[position : position + 40]
        actual = f"got {upcoming!r}" if upcoming else "got the end of the file"
        return InputError(
            f"{self.path}:{line}: invalid JSON: {what}, {actual}.",
            code=code,
            file=str(self.path),
            line=line,
        )

    def _advance(self, to: int) -> None:
        self.line += self.text.count("\n", self.at, to)
        self.at = to

    def _read_more(self) -> bool:
        """Read on and drop what was read; the window doubles each time, so that no row is quadratic."""
        unread = self.text[self.at :]
        if len(unread) > MAX_LINE_CHARACTERS:
            raise _too_long(self.path, self.line, "JSON value")
        chunk = self.stream.read(max(_CHUNK_CHARACTERS, len(unread)))
        if chunk:
            self.text, self.at = unread + chunk, 0
        return bool(chunk)


PLAIN_TEXT_HINT = f" Plain text (.txt) is for {task_names(samples='running-text')}."
# json.loads with a hook makes a decoder for each line
_ROW_DECODER = json.JSONDecoder(object_pairs_hook=reject_duplicate_keys)


def read_json_lines(path: Path) -> Iterator[_Row]:
    """Yield the rows of a file with a JSON object per line, each with its line.

    Raises:
        InputError: the file cannot be read, or a line is not an object.
    """
    with open_text(path, newline="\n") as stream:
        for number, line in enumerate(read_lines(path, stream), start=1):
            if not line.strip():
                continue
            try:
                row = _ROW_DECODER.decode(line)
            except DuplicateKeyError as error:
                raise InputError(
                    f"{path}:{number}: this row has the key {error} twice. Rename or remove one of the two.",
                    code="duplicate-column",
                    file=str(path),
                    line=number,
                ) from error
            except (ValueError, RecursionError) as error:
                # a line that does not start like a JSON value is of another format
                text_hint = "" if line.lstrip()[0] in '{["' else PLAIN_TEXT_HINT
                problem = str(error)
                if isinstance(error, json.JSONDecodeError):  # its own text counts lines within this line
                    problem = f"{error.msg} at character {error.pos + 1}"
                raise InputError(
                    f"{path}:{number}: invalid JSON: {problem}. Got: {line[:80]!r}.{text_hint}",
                    code="invalid-json",
                    file=str(path),
                    line=number,
                ) from error
            yield f"{path}:{number}", require_object(row, f"{path}:{number}")
