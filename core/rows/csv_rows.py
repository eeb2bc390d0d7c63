"""CSV as people have it: separated by commas, semicolons or tabs, with fields of any length."""

from __future__ import annotations

import csv
import io
import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError
from smelt.core.rows.text_files import file_kind, open_text

# The longest field. Python's own limit, 131,072, is less than some documents; without any, a quote that
# is never closed would make the rest of the file one field.
MOST_CHARACTERS = 16 * 2**20
_SAMPLE_CHARACTERS = 65_536
_SAMPLE_RECORDS = 50
_NAMES = {",": "commas", ";": "semicolons", "\t": "tabs"}


def csv_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the rows of a CSV file by the names in its first line, each with where it ends.

    A line of a tab-separated file that has as many fields as the header is a row as it stands: a quote that
    is not closed within its field is a character of the text, and does not begin a field of several lines.

    Raises:
        InputError: the file cannot be read, a row has not as many fields as the first line
            (`csv-field-count`), or two columns have one name (`duplicate-column`).
    """
    delimiter = delimiter_of(path)
    with open_text(path, newline="") as stream, _long_fields():
        lines = _Lines(stream)
        records = _tab_records(lines) if delimiter == "\t" else _records(lines, delimiter)
        try:
            names = next(records, [])
            if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
                raise InputError(
                    f"{path}:1: several columns are called '{twice[0][:80]}'. Rename or remove all but one.",
                    code="duplicate-column",
                    file=str(path),
                )
            for record in records:
                where = f"{path}:{lines.number}"
                if len(record) != len(names):
                    raise InputError(
                        f"{where}: this row has {len(record)} fields and the header has {len(names)},"
                        f" separated by {_NAMES[delimiter]}.",
                        code="csv-field-count",
                    ).at(where)
                yield where, dict(zip(names, record, strict=True))
        except csv.Error as error:
            long = "field limit" in str(error)
            why = f"a field of more than {MOST_CHARACTERS:,} characters; is its quote closed?" if long else ""
            raise InputError(
                f"{path}:{lines.number}: broken CSV: {why or f'{error}.'}",
                code="field-too-long" if long else "invalid-csv",
                file=str(path),
                line=lines.number,
            ) from error


class _Lines:
    """The lines of a stream, counted."""

    def __init__(self, stream: Iterable[str]) -> None:
        self._lines = iter(stream)
        self.number = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self.number += 1
        return line


def _records(lines: Iterable[str], delimiter: str) -> Iterator[list[str]]:
    return (record for record in csv.reader(lines, delimiter=delimiter, strict=True) if record)


def _tab_records(lines: _Lines) -> Iterator[list[str]]:
    """Yield the fields of each row, the header's first; where that is quoted, all rows are."""
    first = next(lines, "")
    if '"' in first:
        yield from _records(itertools.chain([first], lines), "\t")
        return
    names = first.rstrip("\r\n").split("\t")
    yield names
    for line in lines:
        fields = line.rstrip("\r\n").split("\t")
        if fields == [""]:
            continue
        if len(fields) == len(names):
            yield [_unquoted(field) for field in fields]
        else:  # a tab or the end of a line within quotes
            yield next(csv.reader(itertools.chain([line], lines), delimiter="\t", strict=True))


def _unquoted(field: str) -> str:
    """Return the text of a field that is quoted because of the quotes in it, which are doubled then."""
    inside = field[1:-1]
    quoted = len(field) > 2 and field[0] == field[-1] == '"' and '""' in inside
    return inside.replace('""', '"') if quoted and '"' not in inside.replace('""', "") else field


def delimiter_of(path: Path) -> str:
    """Return what separates the fields: a comma, a semicolon or a tab.

    The header decides: whatever it has several names between. Where it could be several, that with which
    the first rows have as many fields as the header, then that with more names, then the comma (of .tsv
    the tab). So a semicolon in a text means nothing.
    """
    usual = "\t" if file_kind(path) == ".tsv" else ","
    with open_text(path, newline="") as stream:
        sample = stream.read(_SAMPLE_CHARACTERS)
    whole = len(sample) < _SAMPLE_CHARACTERS
    ranks = {}
    for delimiter in _NAMES:
        names, even = _try(sample, delimiter, whole)
        if names > 1:
            ranks[delimiter] = (even, names, delimiter == usual)
    return max(ranks, key=ranks.__getitem__, default=usual)


def _try(sample: str, delimiter: str, whole: bool) -> tuple[int, bool]:
    """Return how many names the header has with `delimiter`, and whether all sampled rows have as many."""
    reader = csv.reader(io.StringIO(sample, newline=""), delimiter=delimiter, strict=True)
    sizes: list[int] = []
    try:
        sizes += (len(record) for record in itertools.islice(reader, _SAMPLE_RECORDS) if record)
    except csv.Error:
        if whole or not sizes:
            return (sizes or [0])[0], False
    if not whole and len(sizes) > 1 and len(sizes) < _SAMPLE_RECORDS:
        sizes.pop()  # the sample's end cuts it
    return (sizes or [0])[0], len(set(sizes)) == 1


class _Limit:
    """The limit of the csv module is the process's: raised while somebody reads, then as it was."""

    lock = threading.Lock()
    readers = 0
    before = 0


@contextmanager
def _long_fields() -> Iterator[None]:
    """Allow fields of `MOST_CHARACTERS` until this context ends, whatever other threads read."""
    with _Limit.lock:
        if _Limit.readers == 0:
            _Limit.before = csv.field_size_limit()
            csv.field_size_limit(max(_Limit.before, MOST_CHARACTERS))
        _Limit.readers += 1
    try:
        yield
    finally:
        with _Limit.lock:
            _Limit.readers -= 1
            if _Limit.readers == 0:
                csv.field_size_limit(_Limit.before)
