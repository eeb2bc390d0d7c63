"""Read the rows of a file or of a hub data set, each with its position, independent of the task.

JSON lines and JSON (also .gz), CSV and TSV (also .gz), Parquet, hub ids through `datasets`. Text files are
read as a stream: one row at a time is in memory, not the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError
from smelt.core.hub import hub_cache_only, hub_unreachable_reason
from smelt.core.readers.csv_rows import read_csv_rows
from smelt.core.readers.json_rows import (
    DuplicateKeyError,
    read_json_rows,
    reject_duplicate_keys,
    require_object,
)
from smelt.core.readers.text_files import data_suffix, open_text

RowIterator = Iterator[tuple[str, Mapping[str, Any]]]
_JSON_LINES_SUFFIXES = (".jsonl", ".ndjson")
_TABLE_SUFFIXES = (".csv", ".tsv")


def read_file_rows(path: Path) -> RowIterator:
    """Yield every row of a file with its position.

    Raises:
        InputError: the file cannot be read, or has an unknown format.
    """
    kind = data_suffix(path)
    if kind == ".parquet":
        return _flatten_translation(_read_parquet(path))
    if kind in _TABLE_SUFFIXES:
        return read_csv_rows(path)
    if kind in _JSON_LINES_SUFFIXES:
        return _flatten_translation(_read_json_lines(path))
    if kind == ".json":
        return _flatten_translation(read_json_rows(path))
    plain = " Plain text (.txt) is for language-modeling." if kind == ".txt" else ""
    raise InputError(
        f"{path}: unknown file format '{kind}'. Supported: .jsonl, .json, .csv, .tsv (each also .gz),"
        f" .parquet.{plain}",
        code="unknown-file-type",
        file=str(path),
    )


def _flatten_translation(rows: RowIterator) -> RowIterator:
    """Yield rows with the columns inside of `translation`, which some hub data sets nest."""
    for where, row in rows:
        inner = row.get("translation")
        yield where, inner if isinstance(inner, Mapping) else row


def _read_json_lines(path: Path) -> RowIterator:
    with open_text(path, newline="\n") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line, object_pairs_hook=reject_duplicate_keys)
            except DuplicateKeyError as error:
                raise InputError(
                    f"{path}:{number}: {error}", code="duplicate-column", file=str(path), line=number
                ) from error
            except (ValueError, RecursionError) as error:
                # a line that does not start like a JSON value is of another format
                plain = "" if line.lstrip()[0] in '{["' else " Plain text (.txt) is for language-modeling."
                what = str(error)
                if isinstance(error, json.JSONDecodeError):  # its own text counts lines within this line
                    what = f"{error.msg} at character {error.pos + 1}"
                raise InputError(
                    f"{path}:{number}: invalid JSON: {what}. Got: {line[:80]!r}.{plain}",
                    code="invalid-json",
                    file=str(path),
                    line=number,
                ) from error
            yield f"{path}:{number}", require_object(row, f"{path}:{number}")


def _read_parquet(path: Path) -> RowIterator:
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
                raise InputError(
                    f"{path}: several columns are named '{twice[0][:80]}'. Rename or remove all but one.",
                    code="duplicate-column",
                    file=str(path),
                )
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path} row {number}", row
    except InputError:
        raise
    except Exception as error:  # pyarrow raises many types of errors
        raise InputError(
            f"{path}: not a readable Parquet file: {error}", code="damaged-file", file=str(path)
        ) from error


def read_hub_rows(origin: str, name: str) -> RowIterator:
    """Yield the rows of a hub data set; `owner/name:config@split` selects configuration and split.

    name: the default split.

    Raises:
        InputError: it cannot be loaded.
    """
    import datasets

    repository, _, split = origin.partition("@")
    repository, _, config = repository.partition(":")
    lack = hub_unreachable_reason()
    try:
        with hub_cache_only(lack):
            rows: Iterable[Any] = datasets.load_dataset(repository, config or None, split=split or name)
    except Exception as error:  # the hub client raises many types of errors
        why = f"nor cached on this machine; {lack}." if lack else f"nor a usable data set of the hub: {error}"
        raise InputError(f"{origin}: neither a local file, {why}", code="missing-data") from error
    yield from _flatten_translation(
        (f"{origin} row {number}", row) for number, row in enumerate(rows, start=1)
    )
