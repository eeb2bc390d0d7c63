"""A .json file as rows: a list of objects, an object that holds one such list, or objects in a row.

The standard library parses a whole file at once. Here one value is parsed at a time from a window of the
text, so that what is held is the longest row and not the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError
from smelt.core.rows.text_files import open_text

_READ_CHARACTERS = 1 << 16
# A value that ends so near to the window's end may be one that the window cuts.
_CUT_CHARACTERS = 16
_BLANK = " \t\r\n"

_Row = tuple[str, Mapping[str, Any]]


def json_rows(path: Path) -> Iterator[_Row]:
    """Yield the rows of a .json file, each with the line that it begins in, or its number.

    Raises:
        InputError: it cannot be read, is no JSON, or holds no list of rows, or several.
    """
    with open_text(path, newline="\n") as stream:
        scan = _Scan(path, stream)
        if scan.peek() == "[":
            yield from scan.rows()
            scan.expect_end()
            return
        holder = _holder(scan) if scan.peek() == "{" else None
    with open_text(path, newline="\n") as stream:
        scan = _Scan(path, stream)
        if holder is None:
            while scan.peek():
                where = scan.where
                yield where, object_row(scan.value(), where)
            return
        for name in scan.members():
            if name == holder:
                yield from scan.rows()
            else:
                scan.skip()


class DuplicateKeyError(ValueError):
    """An object of JSON has a key twice, of which a parser would keep the last without a word."""


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; an `object_pairs_hook`.

    Raises:
        DuplicateKeyError: a key is there twice.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise DuplicateKeyError(
            f"this row has the key '{twice[:80]}' twice. Rename or remove one of the two."
        )
    return found


def object_row(row: Any, where: str) -> Mapping[str, Any]:
    """Return `row` if it is a JSON object.

    Raises:
        InputError: it is none.
    """
    if isinstance(row, dict):
        return row
    listed = isinstance(row, list) and bool(row) and isinstance(row[0], dict)
    hint = " A file that is one list of rows is read when its name ends in .json." if listed else ""
    read = json.dumps(row, ensure_ascii=False)[:80]
    raise InputError(
        f"{where}: expected a JSON object with named columns, read {read!r}.{hint}", code="not-an-object"
    ).at(where)


def _holder(scan: _Scan) -> str | None:
    """Return the name of the one list of objects in the object that begins here.

    None where the object is a row itself: it holds no such list, or more objects follow it.

    Raises:
        InputError: there are several lists of objects, or columns instead of rows.
    """
    lists, kinds = [], []
    for name in scan.members():
        kind = scan.skip()
        kinds.append(kind)
        lists += [name] if kind == "rows" else []
    if scan.peek() or (not lists and set(kinds) - {"values", "object"}):
        return None
    if len(lists) == 1:
        return lists[0]
    if lists:
        raise InputError(
            f"{scan.path}: holds several lists of rows ({', '.join(lists[:5])}); smelt reads one list from a"
            " file. Write each split to a file of its own.",
            code="several-row-lists",
            file=str(scan.path),
        )
    if len(kinds) > 1:
        raise InputError(
            f"{scan.path}: holds columns, not rows. Write a list of objects; with pandas:"
            " to_json(FILE, orient='records').",
            code="columns-not-rows",
            file=str(scan.path),
        )
    return None


class _Scan:
    """Reads JSON from `stream` piece by piece; `line` is where the next piece begins."""

    def __init__(self, path: Path, stream: Any) -> None:
        self.path, self.stream = path, stream
        self.text, self.at, self.line = "", 0, 1
        self.decoder = json.JSONDecoder(object_pairs_hook=unique_keys)

    @property
    def where(self) -> str:
        """The file and the line of what comes next."""
        return f"{self.path}:{self.line}"

    def peek(self) -> str:
        """Pass what is blank; return the next character, nothing at the end."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in _BLANK:
                self._pass(self.at + 1)
            if self.at < len(self.text):
                return self.text[self.at]
            if not self._more():
                return ""

    def value(self) -> Any:
        """Pass one value of any kind and return it."""
        self.peek()
        while True:
            try:
                found, end = self.decoder.raw_decode(self.text, self.at)
            except RecursionError as error:
                raise InputError(f"{self.where}: broken JSON: nested too deeply.", code="nested-too-deep").at(
                    self.where
                ) from error
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated") or len(self.text) - error.pos < _CUT_CHARACTERS
                if cut and self._more():
                    continue
                raise self._broken(error.msg, error.pos) from error
            except DuplicateKeyError as error:
                raise InputError(f"{self.where}: {error}", code="duplicate-column").at(self.where) from error
            except ValueError as error:  # a number with thousands of digits
                raise InputError(f"{self.where}: broken JSON: {error}.", code="invalid-json").at(
                    self.where
                ) from error
            if end == len(self.text) and self.text[end - 1] not in '}]"' and self._more():
                continue  # the rest of a number may follow
            self._pass(end)
            return found

    def rows(self) -> Iterator[_Row]:
        """Pass a list; yield each of its objects with the line that it begins in, or its number.

        pandas writes all rows in one line, of which only the first is found by it.
        """
        before = 0
        for number, at in enumerate(self._items("[", "]"), start=1):
            line, where = self.line, at if self.line != before else f"{self.path} row {number}"
            yield where, object_row(self.value(), where)
            before = line

    def members(self) -> Iterator[str]:
        """Pass an object; yield each key. Its value must be passed before the next one is asked for."""
        for where in self._items("{", "}"):
            key = self.value()
            if not isinstance(key, str):
                raise InputError(
                    f"{where}: broken JSON: expected a name in quotes, read {str(key)[:40]!r}.",
                    code="invalid-json",
                ).at(where)
            self._expect(":")
            yield key

    def skip(self) -> str:
        """Pass a value; return its kind: rows (a list of objects), values (another), object or single."""
        start = self.peek()
        if start != "[":
            self.value()
            return "object" if start == "{" else "single"
        objects = [isinstance(self.value(), dict) for _ in self._items("[", "]")]
        return "rows" if objects and all(objects) else "values"

    def expect_end(self) -> None:
        """Make sure that nothing follows.

        Raises:
            InputError: something does.
        """
        if self.peek():
            raise self._broken("more text after the end of the list", self.at, "text-after-end")

    def _items(self, begin: str, end: str) -> Iterator[str]:
        """Pass `begin`, the commas and `end`; yield where each item begins, which must be passed then."""
        self._expect(begin)
        if self.peek() != end:
            while True:
                self.peek()
                yield self.where
                if self.peek() != ",":
                    break
                self._pass(self.at + 1)
        self._expect(end)

    def _expect(self, character: str) -> None:
        if self.peek() != character:
            raise self._broken(f"expected '{character}'", self.at)
        self._pass(self.at + 1)

    def _broken(self, what: str, at: int, code: str = "invalid-json") -> InputError:
        line = self.line + self.text.count("\n", self.at, at)
        read = self.text[at : at + 40]
        shown = f"read {read!r}" if read else "read the end of the file"
        return InputError(
            f"{self.path}:{line}: broken JSON: {what}, {shown}.",
            code=code,
            file=str(self.path),
            line=line,
        )

    def _pass(self, to: int) -> None:
        self.line += self.text.count("\n", self.at, to)
        self.at = to

    def _more(self) -> bool:
        """Read on, forgetting what was passed; each time as much again, so that no row is quadratic."""
        rest = self.text[self.at :]
        more = self.stream.read(max(_READ_CHARACTERS, len(rest)))
        if more:
            self.text, self.at = rest + more, 0
        return bool(more)
