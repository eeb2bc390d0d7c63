"""Rows of a file or of a data set of the hub, each with where it stands; what they mean is not known here.

JSON lines and JSON (also .gz), CSV and TSV (also .gz), Parquet, hub ids through `datasets`. Text files are
read as a stream: what is held is one row, not the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError
from smelt.core.hub import cache_alone, hub_lacks
from smelt.core.rows.csv_rows import csv_rows
from smelt.core.rows.json_rows import DuplicateKeyError, json_rows, object_row, unique_keys
from smelt.core.rows.text_files import file_kind, open_text

Rows = Iterator[tuple[str, Mapping[str, Any]]]
_LINES = (".jsonl", ".ndjson")
_TABLES = (".csv", ".tsv")


def read_file(path: Path) -> Rows:
    """Yield every row of a file with where it stands.

    Raises:
        InputError: the file cannot be read, or is of an unknown kind.
    """
    kind = file_kind(path)
    if kind == ".parquet":
        return _unnested(_parquet_rows(path))
    if kind in _TABLES:
        return csv_rows(path)
    if kind in _LINES:
        return _unnested(_json_lines(path))
    if kind == ".json":
        return _unnested(json_rows(path))
    plain = " Plain text (.txt) is for language-modeling." if kind == ".txt" else ""
    raise InputError(
        f"{path}: unknown kind of file '{kind}'. Known: .jsonl, .json, .csv, .tsv (each also .gz),"
        f" .parquet.{plain}",
        code="unknown-file-type",
        file=str(path),
    )


def _unnested(rows: Rows) -> Rows:
    """Yield rows with the columns inside of `translation`, where sets of the hub nest their two sides."""
    for where, row in rows:
        inner = row.get("translation")
        yield where, inner if isinstance(inner, Mapping) else row


def _json_lines(path: Path) -> Rows:
    with open_text(path, newline="\n") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line, object_pairs_hook=unique_keys)
            except DuplicateKeyError as error:
                raise InputError(
                    f"{path}:{number}: {error}", code="duplicate-column", file=str(path), line=number
                ) from error
            except (ValueError, RecursionError) as error:
                # a line that begins no value of JSON at all is of another kind of file
                plain = "" if line.lstrip()[0] in '{["' else " Plain text (.txt) is for language-modeling."
                what = str(error)
                if isinstance(error, json.JSONDecodeError):  # whose own words count the lines of this one
                    what = f"{error.msg} at character {error.pos + 1}"
                raise InputError(
                    f"{path}:{number}: broken JSON: {what}. Read: {line[:80]!r}.{plain}",
                    code="invalid-json",
                    file=str(path),
                    line=number,
                ) from error
            yield f"{path}:{number}", object_row(row, f"{path}:{number}")


def _parquet_rows(path: Path) -> Rows:
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
                raise InputError(
                    f"{path}: several columns are called '{twice[0][:80]}'. Rename or remove all but one.",
                    code="duplicate-column",
                    file=str(path),
                )
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path} row {number}", row
    except InputError:
        raise
    except Exception as error:  # pyarrow raises many kinds, all of which mean the same here
        raise InputError(
            f"{path}: not a Parquet file that can be read: {error}", code="damaged-file", file=str(path)
        ) from error


def hub_rows(origin: str, name: str) -> Rows:
    """Yield the rows of a hub data set; `owner/name:config@split` chooses configuration and split.

    name: the split where `origin` names none.

    Raises:
        InputError: it cannot be had.
    """
    import datasets

    repository, _, split = origin.partition("@")
    repository, _, config = repository.partition(":")
    lack = hub_lacks()
    try:
        with cache_alone(lack):
            rows: Iterable[Any] = datasets.load_dataset(repository, config or None, split=split or name)
    except Exception as error:  # the hub client raises many kinds; all mean: not to be had
        why = f"nor kept on this machine; {lack}." if lack else f"nor a data set that the hub gives: {error}"
        raise InputError(f"{origin}: neither a file here, {why}", code="missing-data") from error
    yield from _unnested((f"{origin} row {number}", row) for number, row in enumerate(rows, start=1))
