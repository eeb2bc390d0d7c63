"""Read the rows of CSV and TSV files (also .gz) as a stream, with commas, semicolons or tabs."""

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
from smelt.data.json_rows import data_suffix, open_text, read_lines

TABLE_SUFFIXES = (".csv", ".tsv")
# The longest field. Python's own limit, 131,072, is less than some documents; without a limit, an unclosed
# quote would make the rest of the file one field.
MAX_FIELD_CHARACTERS = 16 * 2**20
_SAMPLE_CHARACTERS = 65_536
_SAMPLE_RECORDS = 50
_DELIMITER_NAMES = {",": "commas", ";": "semicolons", "\t": "tabs"}


def read_csv_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the rows of a CSV file by the names in its first line, each with its end position.

    In a tab-separated file, a line with as many fields as the header is a complete row: a quote that is not
    closed within its field is an ordinary character and does not start a field of several lines.

    Raises:
        InputError: the file cannot be read, the number of fields of a row differs from the header
            (`csv-field-count`), or two columns have the same name (`duplicate-column`).
    """
    delimiter = detect_delimiter(path)
    with open_text(path, newline="") as stream, _long_fields_allowed():
        lines = _CountedLines(read_lines(path, stream))
        records = _read_tab_records(lines) if delimiter == "\t" else _read_records(lines, delimiter)
        try:
            names = next(records, [])
            if doubles := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
                raise InputError(
                    f"{path}:1: several columns are named '{doubles[0][:80]}'. Rename or remove all but one.",
                    code="duplicate-column",
                    file=str(path),
                )
            for record in records:
                location = f"{path}:{lines.number}"
                if len(record) != len(names):
                    raise InputError(
                        f"{location}: this row has {len(record)} fields, but the header has {len(names)},"
                        f" separated by {_DELIMITER_NAMES[delimiter]}.",
                        code="csv-field-count",
                    ).with_location(location)
                yield location, dict(zip(names, record, strict=True))
        except csv.Error as error:
            is_too_long = "field limit" in str(error)
            explanation = (
                f"a field has more than {MAX_FIELD_CHARACTERS:,} characters; check that its quote is closed."
                if is_too_long
                else ""
            )
            raise InputError(
                f"{path}:{lines.number}: invalid CSV: {explanation or f'{error}.'}",
                code="field-too-long" if is_too_long else "invalid-csv",
                file=str(path),
                line=lines.number,
            ) from error


class _CountedLines:
    """The lines of a stream, with a line counter."""

    def __init__(self, stream: Iterable[str]) -> None:
        self._lines = iter(stream)
        self.number = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self.number += 1
        return line


def _read_records(lines: Iterable[str], delimiter: str) -> Iterator[list[str]]:
    return (record for record in csv.reader(lines, delimiter=delimiter, strict=True) if record)


def _read_tab_records(lines: _CountedLines) -> Iterator[list[str]]:
    """Yield the fields of each row, starting with the header; if that is quoted, all rows are."""
    first = next(lines, "")
    if '"' in first:
        yield from _read_records(itertools.chain([first], lines), "\t")
        return
    names = first.rstrip("\r\n").split("\t")
    yield names
    for line in lines:
        fields = line.rstrip("\r\n").split("\t")
        if fields == [""]:
            continue
        if len(fields) == len(names):
            yield [_unquote(field) for field in fields]
        else:  # a tab or a line break within quotes
            yield next(csv.reader(itertools.chain([line], lines), delimiter="\t", strict=True))


def _unquote(field: str) -> str:
    """Return the text of a quoted field, with doubled quotes undone."""
    content = field[1:-1]
    quoted = len(field) > 2 and field[0] == field[-1] == '"' and '""' in content
    return content.replace('""', '"') if quoted and '"' not in content.replace('""', "") else field


def detect_delimiter(path: Path) -> str:
    """Return the field separator: a comma, a semicolon or a tab.

    The header decides: the separator must give several names. If several separators do, the one with which
    the first rows have as many fields as the header wins, then the one with more names, then the comma (in
    .tsv the tab). So a semicolon in a text does not matter.
    """
    default_delimiter = "\t" if data_suffix(path) == ".tsv" else ","
    with open_text(path, newline="") as stream:
        sample = stream.read(_SAMPLE_CHARACTERS)
    is_complete = len(sample) < _SAMPLE_CHARACTERS
    ranks = {}
    for delimiter in _DELIMITER_NAMES:
        names, is_consistent = _try_delimiter(sample, delimiter, is_complete)
        if names > 1:
            ranks[delimiter] = (is_consistent, names, delimiter == default_delimiter)
    return max(ranks, key=ranks.__getitem__, default=default_delimiter)


def _try_delimiter(sample: str, delimiter: str, is_complete: bool) -> tuple[int, bool]:
    """Return the number of names in the header with `delimiter`, and whether all sampled rows match."""
    reader = csv.reader(io.StringIO(sample, newline=""), delimiter=delimiter, strict=True)
    sizes: list[int] = []
    try:
        sizes += (len(record) for record in itertools.islice(reader, _SAMPLE_RECORDS) if record)
    except csv.Error:
        if is_complete or not sizes:
            return (sizes or [0])[0], False
    if not is_complete and len(sizes) > 1 and len(sizes) < _SAMPLE_RECORDS:
        sizes.pop()  # it is cut at the end of the sample
    return (sizes or [0])[0], len(set(sizes)) == 1


class _FieldSizeLimit:
    """The csv module's field limit is global: raised while any reader is active, then restored."""

    lock = threading.Lock()
    readers = 0
    previous = 0


@contextmanager
def _long_fields_allowed() -> Iterator[None]:
    """Allow fields of `MAX_FIELD_CHARACTERS` inside the context, in all threads."""
    with _FieldSizeLimit.lock:
        if _FieldSizeLimit.readers == 0:
            _FieldSizeLimit.previous = csv.field_size_limit()
            csv.field_size_limit(max(_FieldSizeLimit.previous, MAX_FIELD_CHARACTERS))
        _FieldSizeLimit.readers += 1
    try:
        yield
    finally:
        with _FieldSizeLimit.lock:
            _FieldSizeLimit.readers -= 1
            if _FieldSizeLimit.readers == 0:
                csv.field_size_limit(_FieldSizeLimit.previous)
