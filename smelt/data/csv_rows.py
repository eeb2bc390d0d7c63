"""Read the rows of a file, a folder or a hub data set, each with its position, independent of the task.

Formats: JSON lines and JSON (also .gz; SQuAD's as `smelt.data.squad_rows`, queries as
`smelt.data.ranking_rows`), CSV and TSV (also .gz; commas, semicolons or tabs; fields of any length),
sentences in columns (`smelt.data.conll_rows`), Parquet, folders of `datasets` and hub ids through `datasets`.
Files are read as a stream: one row at a time is in memory, not the file.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError, did_you_mean
from smelt.core.hub import hub_cache_only, hub_unreachable_reason
from smelt.data.conll_rows import CONLL_SUFFIXES, read_conll_rows
from smelt.data.json_rows import (
    DuplicateKeyError,
    data_suffix,
    open_text,
    read_json_rows,
    read_lines,
    reject_duplicate_keys,
    require_object,
)
from smelt.data.ranking_rows import flatten_queries
from smelt.data.squad_rows import flatten_articles
from smelt.data.tasks import task_names

# The longest field. Python's own limit, 131,072, is less than some documents; without a limit, an unclosed
# quote would make the rest of the file one field.
MAX_FIELD_CHARACTERS = 16 * 2**20
_PLAIN_TEXT_HINT = f" Plain text (.txt) is for {task_names(samples='running-text')}."
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


RowIterator = Iterator[tuple[str, Mapping[str, Any]]]
_JSON_LINES_SUFFIXES = (".jsonl", ".ndjson")
TABLE_SUFFIXES = (".csv", ".tsv")


def read_file_rows(path: Path, split: str = "train") -> RowIterator:
    """Yield every row of a file, or of the `split` of a folder, with its position.

    Raises:
        InputError: the file cannot be read, or has an unknown format.
    """
    if path.is_dir():
        return _flatten_nested(_read_folder(path, split))
    kind = data_suffix(path)
    if kind == ".parquet":
        return _flatten_nested(_read_parquet(path))
    if kind in TABLE_SUFFIXES:
        return read_csv_rows(path)
    if kind in _JSON_LINES_SUFFIXES:
        return _flatten_nested(_read_json_lines(path))
    if kind == ".json":
        return _flatten_nested(read_json_rows(path))
    if kind in CONLL_SUFFIXES:
        return read_conll_rows(path)
    text_hint = _PLAIN_TEXT_HINT if kind == ".txt" else ""
    raise InputError(
        f"{path}: unknown file format '{kind}'. Supported: .jsonl, .json, .csv, .tsv, .conll, .conllu,"
        f" .bio, .iob (each also .gz), .parquet.{text_hint}",
        code="unknown-file-type",
        file=str(path),
    )


def _flatten_nested(rows: RowIterator) -> RowIterator:
    return flatten_queries(flatten_articles(_flatten_translation(rows)))


def _flatten_translation(rows: RowIterator) -> RowIterator:
    """Yield rows with the columns inside of `translation`, which some hub data sets nest."""
    for location, row in rows:
        inner = row.get("translation")
        yield location, inner if isinstance(inner, Mapping) else row


# json.loads with a hook makes a decoder for each line
_ROW_DECODER = json.JSONDecoder(object_pairs_hook=reject_duplicate_keys)


def _read_json_lines(path: Path) -> RowIterator:
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
                text_hint = "" if line.lstrip()[0] in '{["' else _PLAIN_TEXT_HINT
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


class ClassIndices(list[int]):
    """Indices of classes in a column of lists, with the names of the classes, as `datasets` stores them."""

    def __init__(self, indices: Iterable[int], names: Sequence[str]) -> None:
        super().__init__(indices)
        self.names = names


def _class_lists(features: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the names of the classes of each column with lists of them, from `Features.to_dict`."""
    names_by_column = {}
    for column, feature in features.items():
        inner = feature[0] if isinstance(feature, list) and feature else None
        inner = feature.get("feature") if isinstance(feature, Mapping) else inner
        if isinstance(inner, Mapping) and inner.get("_type") == "ClassLabel":
            names_by_column[column] = list(map(str, inner["names"]))
    return names_by_column


def _with_class_names(row: dict[str, Any], names: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    named = {
        column: ClassIndices(row[column], class_names)
        for column, class_names in names.items()
        if isinstance(row.get(column), list)
    }
    return row | named


def _read_parquet(path: Path) -> RowIterator:
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if repeated := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
                raise InputError(
                    f"{path}: several columns are named '{repeated[0][:80]}'. Rename or remove all but one.",
                    code="duplicate-column",
                    file=str(path),
                )
            stored = json.loads((file.schema_arrow.metadata or {}).get(b"huggingface", b"{}"))
            class_names = _class_lists(stored.get("info", {}).get("features") or {})
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path} row {number}", _with_class_names(row, class_names)
    except InputError:
        raise
    except Exception as error:  # pyarrow raises many types of errors
        raise InputError(
            f"{path}: not a readable Parquet file: {error}", code="damaged-file", file=str(path)
        ) from error


_PARQUET, _DICT_FILE, _STATE_FILE = "*.parquet", "dataset_dict.json", "state.json"
_SHARD = re.compile(r"(?P<split>[^/]+)-\d{5}-of-\d{5}")


def folder_splits(folder: Path) -> list[str] | None:
    """Return the splits of a folder of a data set, empty if it is one split; None if it is no such folder.

    Such folders are those of `save_to_disk` of a Dataset or DatasetDict, and those with Parquet files, of one
    split, or named after splits as hub data sets (`train-00000-of-00002.parquet`, `test.parquet`).

    Raises:
        InputError: its list of splits cannot be read.
    """
    if not folder.is_dir():
        return None
    if (listing := folder / _DICT_FILE).is_file():
        try:
            return [str(name) for name in json.loads(listing.read_text(encoding="utf-8"))["splits"]]
        except (ValueError, KeyError, TypeError) as error:
            raise _damaged_folder(folder, listing, error) from error
    if (folder / _STATE_FILE).is_file():
        return []
    names = [path.stem for path in sorted(folder.glob(_PARQUET))]
    if not names:
        return None
    splits = [match["split"] if (match := _SHARD.fullmatch(name)) else name for name in names]
    return list(dict.fromkeys(splits)) if _SPLIT_NAMES.intersection(splits) else []


_SPLIT_NAMES = {"train", "validation", "test"}


def _damaged_folder(folder: Path, file: Path, error: Exception) -> InputError:
    return InputError(
        f"{file}: {folder} is not a readable data set of save_to_disk: {error!r}. Save it again.",
        code="damaged-file",
        file=str(file),
    )


def _read_folder(folder: Path, split: str) -> RowIterator:
    """Yield the rows of a split of a folder of a data set."""
    splits = folder_splits(folder)
    if splits is None:
        raise InputError(
            f"{folder}: this is a folder without Parquet files or a data set of save_to_disk.",
            code="not-a-file",
            file=str(folder),
        )
    if splits and split not in splits:
        raise InputError(
            f"{folder}: this data set has the splits {', '.join(splits)}, not '{split}'."
            f"{did_you_mean(split, splits)} Give the file, or the folder, of another split.",
            code="missing-split",
            file=str(folder),
        )
    if (folder / _DICT_FILE).is_file():
        return _read_saved(folder / split)
    if (folder / _STATE_FILE).is_file():
        return _read_saved(folder)
    files = [
        path
        for path in sorted(folder.glob(_PARQUET))
        if not splits or split in (path.stem, (_SHARD.fullmatch(path.stem) or {"split": None})["split"])
    ]
    return itertools.chain.from_iterable(map(_read_parquet, files))


def _read_saved(folder: Path) -> RowIterator:
    import datasets

    try:
        dataset: Any = datasets.load_from_disk(str(folder))
        class_names = _class_lists(dataset.features.to_dict())
        for number, row in enumerate(dataset, start=1):
            yield f"{folder} row {number}", _with_class_names(row, class_names)
    except InputError:
        raise
    except Exception as error:  # datasets and pyarrow raise many types of errors
        raise _damaged_folder(folder, folder / _STATE_FILE, error) from error


def read_hub_rows(origin: str, name: str) -> RowIterator:
    """Yield the rows of a hub data set; `owner/name:config@split` selects configuration and split.

    name: the default split.

    Raises:
        InputError: it cannot be loaded.
    """
    import datasets

    repository, _, split = origin.partition("@")
    repository, _, config = repository.partition(":")
    hub_failure = hub_unreachable_reason()
    try:
        with hub_cache_only(hub_failure):
            dataset: Any = datasets.load_dataset(repository, config or None, split=split or name)
    except Exception as error:  # the hub client raises many types of errors
        reason = (
            f"nor cached on this machine; {hub_failure}."
            if hub_failure
            else f"nor a usable data set of the hub: {error}"
        )
        raise InputError(f"{origin}: neither a local file, {reason}", code="missing-data") from error
    features = getattr(dataset, "features", None)
    class_names = _class_lists(features.to_dict()) if features is not None else {}
    yield from _flatten_translation(
        (f"{origin} row {number}", _with_class_names(row, class_names))
        for number, row in enumerate(dataset, start=1)
    )
