"""The rows that models are trained, calibrated and scored on.

Reads JSON lines (also .gz), CSV (also .gz), Parquet, and hub ids through `datasets`; for language
modeling also plain text (.txt, also .gz), a row per line. Which column means what is a setting; several
references per example are kept.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict

from smelt.core.errors import InputError, nearest
from smelt.core.files import hash_of
from smelt.core.windows import Windows

SplitName = Literal["train", "validation", "calibration", "test"]
Task = Literal["translation", "summarization", "text-classification", "language-modeling"]
TASKS: tuple[Task, ...] = get_args(Task)
# Tasks in which a text becomes another text.
TEXT_TO_TEXT: frozenset[Task] = frozenset({"translation", "summarization"})


# A class by number or name, a number to be predicted, or several classes; see smelt.core.labels.
Label = int | str | float | tuple[int | str, ...]


class Columns(BaseModel):
    """Names of the columns in the data. `references` may hold a list; it wins over `target`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    source: str = "source"
    target: str = "target"
    references: str = "targets"
    text: str = "text"
    text_pair: str = "text_b"
    label: str = "label"


@dataclass(frozen=True, slots=True)
class Example:
    """One row. Translation, summarization: `text` and `references`; classification: `text` and `label`."""

    text: str
    references: tuple[str, ...] = ()
    text_pair: str | None = None
    label: Label | None = None


@dataclass(frozen=True)
class Split:
    """The rows of one split, in file order, and where they came from.

    windows: how the rows are joined and cut again; only for language modeling.
    """

    origin: str
    examples: tuple[Example, ...] = field(repr=False)
    windows: Windows | None = None

    def __len__(self) -> int:
        return len(self.examples)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the rows' content; equal rows give equal keys wherever they lie."""
        rows = hash_of([[e.text, list(e.references), e.text_pair, e.label] for e in self.examples])
        return rows if self.windows is None else hash_of([rows, self.windows.model_dump()])

    def some(self, places: Iterable[int]) -> Split:
        """Return the rows at `places`."""
        return Split(self.origin, tuple(self.examples[i] for i in places), self.windows)

    def head(self, rows: int | None) -> Split:
        """Return the first `rows` rows (all for None)."""
        return self if rows is None else Split(self.origin, self.examples[:rows], self.windows)


def read_split(origin: str, task: Task, columns: Columns, base: Path, name: str = "test") -> Split:
    """Read the rows of `origin`: a path (relative to `base`) or a hub id.

    Raises:
        InputError: no such file, no rows, a broken line (named), a missing column (with the nearest).
    """
    path = (base / origin).expanduser()
    if path.is_file():
        if task == "language-modeling" and file_kind(path) == ".txt":
            return _read_lines(path, origin, name)
        rows = read_file(path)
    elif path.suffix or origin.startswith((".", "/", "~")) or "/" not in origin:
        raise InputError(f"{path}: no such file (data for '{name}').{_neighbour(path)}")
    else:
        rows = _read_hub(origin, name)
    examples = tuple(_example(row, where, task, columns) for where, row in rows)
    if not examples:
        raise InputError(f"{path}: no rows in this file; '{name}' needs at least one.")
    windows = Windows(separator="\n\n") if task == "language-modeling" else None
    return Split(origin, examples, windows)


def _read_lines(path: Path, origin: str, name: str) -> Split:
    """Read plain text; joined with line ends the rows are the file's text again."""
    lines = read_text_file(path).replace("\r\n", "\n").removesuffix("\n").split("\n")
    if not any(line.strip() for line in lines):
        raise InputError(f"{path}: no text in this file; '{name}' needs some.")
    return Split(origin, tuple(Example(line) for line in lines), Windows(separator="\n"))


def file_kind(path: Path) -> str:
    """Return the suffix that says what a file holds: that before .gz, if there is one."""
    suffixes = [s.lower() for s in path.suffixes]
    if suffixes[-1:] == [".gz"] and len(suffixes) > 1:
        return suffixes[-2]
    return suffixes[-1] if suffixes else ""


def read_text_file(path: Path) -> str:
    """Return the text of a UTF-8 file, unpacked where its name ends in .gz.

    Raises:
        InputError: it cannot be read.
    """
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix.lower() == ".gz" else path.read_bytes()
        return raw.decode("utf-8-sig")
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: not UTF-8 text at byte {error.start}. Convert the file to UTF-8."
        ) from error


def read_file(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield every row of a file with where it stands; CSV and JSON lines are read whole, then row by row.

    Raises:
        InputError: the file cannot be read, or is of an unknown kind.
    """
    kind = file_kind(path)
    if kind == ".parquet":
        return _read_parquet(path)
    if kind not in (".jsonl", ".json", ".ndjson", ".csv", ".tsv"):
        plain = " Plain text (.txt) is for language-modeling." if kind == ".txt" else ""
        raise InputError(
            f"{path}: unknown kind of file '{kind}'. Known: .jsonl, .csv, .tsv (each also .gz), .parquet."
            f"{plain}"
        )
    text = read_text_file(path)
    if kind in (".csv", ".tsv"):
        reader = csv.DictReader(io.StringIO(text), delimiter="\t" if kind == ".tsv" else ",", strict=True)
        return _read_csv(path, reader)
    return _read_json_lines(path, text)


def _read_json_lines(path: Path, text: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InputError(f"{path}:{number}: broken JSON: {error}. Read: {line[:80]!r}") from error
        if not isinstance(row, dict):
            raise InputError(
                f"{path}:{number}: expected a JSON object with named columns, read {line[:80]!r}"
            )
        yield f"{path}:{number}", row


def _read_csv(path: Path, reader: csv.DictReader[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        for row in reader:
            if None in row or None in row.values():
                raise InputError(
                    f"{path}:{reader.line_num}: this row does not have as many fields as the header."
                )
            yield f"{path}:{reader.line_num}", row
    except csv.Error as error:
        raise InputError(f"{path}:{reader.line_num}: broken CSV: {error}.") from error


def _read_parquet(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except Exception as error:  # pyarrow raises many kinds, all of which mean the same here
        raise InputError(f"{path}: not a Parquet file that can be read: {error}") from error
    for number, row in enumerate(rows, start=1):
        yield f"{path} row {number}", row


def _read_hub(origin: str, name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Read a hub data set; `owner/name:config@split` chooses the configuration and the split."""
    import datasets

    repository, _, split = origin.partition("@")
    repository, _, config = repository.partition(":")
    try:
        rows: Iterable[Any] = datasets.load_dataset(repository, config or None, split=split or name)
    except Exception as error:  # the hub client raises many kinds; all mean: not to be had
        raise InputError(f"{origin}: neither a file nor a data set that the hub gives: {error}") from error
    for number, row in enumerate(rows, start=1):
        # translation sets of the hub nest the two sides under "translation"
        yield (
            f"{origin} row {number}",
            row["translation"] if isinstance(row.get("translation"), dict) else row,
        )


def _example(row: Mapping[str, Any], where: str, task: Task, columns: Columns) -> Example:
    if task in TEXT_TO_TEXT:
        references = row.get(columns.references)
        if references is None:
            references = [_text(row, columns.target, where, "target")]
        if not isinstance(references, list) or not all(isinstance(r, str) for r in references):
            raise InputError(
                f"{where}: column '{columns.references}' must be a list of texts,"
                f" read {repr(references)[:80]}"
            )
        if not references or not all(reference.strip() for reference in references):
            raise InputError(
                f"{where}: the target is empty; a model would learn to say nothing. Remove or fill such rows."
            )
        for reference in references:
            _require_characters(reference, where, columns.references)
        return Example(_text(row, columns.source, where, "source"), tuple(references))
    if task == "language-modeling":
        return Example(_text(row, columns.text, where, "text"))
    # a name that the recipe gives must be there; files without null mark its absence by an empty text
    if "text_pair" in columns.model_fields_set and columns.text_pair not in row:
        raise _missing(row, columns.text_pair, where, "text_pair")
    there = row.get(columns.text_pair) is not None
    pair = (_text(row, columns.text_pair, where, "text_pair") or None) if there else None
    if columns.label not in row:
        raise _missing(row, columns.label, where, "label")
    label = _label(row[columns.label], where, columns.label)
    for item in label if isinstance(label, tuple) else (label,):
        _require_characters(str(item), where, columns.label)
    return Example(_text(row, columns.text, where, "text"), text_pair=pair, label=label)


def _label(value: Any, where: str, column: str) -> Label:
    if isinstance(value, list | tuple) and all(_is_class(item) for item in value):
        return tuple(value)
    if _is_class(value) or (isinstance(value, float) and math.isfinite(value)):
        label: Label = value
        return label
    raise InputError(
        f"{where}: column '{column}' must be a whole number or a name, a list of such (several labels),"
        f" or a number (regression), read {repr(value)[:80]}"
    )


def _is_class(value: Any) -> bool:
    return isinstance(value, int | str) and not isinstance(value, bool)


def _text(row: Mapping[str, Any], column: str, where: str, setting: str) -> str:
    if column not in row:
        raise _missing(row, column, where, setting)
    value = row[column]
    if not isinstance(value, str):
        raise InputError(f"{where}: column '{column}' must be text, read {repr(value)[:80]}")
    _require_characters(value, where, column)
    return value


def _require_characters(text: str, where: str, column: str) -> None:
    """Refuse halves of surrogate pairs, which JSON can write and no tokenizer can read.

    Raises:
        InputError: there is one.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise InputError(
            f"{where}: column '{column}' holds {half!r}, half of a surrogate pair, which is no character."
        ) from error


# What public data sets call these columns. They are never guessed, only named in the message.
_ALIASES = {
    "source": ("document", "article", "dialogue", "input", "text", "src", "en"),
    "target": ("summary", "highlights", "abstract", "output", "reference", "tgt", "de"),
}


def _missing(row: Mapping[str, Any], column: str, where: str, setting: str) -> InputError:
    names = ", ".join(map(str, row)) or "none"
    hint = nearest(column, map(str, row))
    usual = next((name for name in _ALIASES.get(setting, ()) if name in row), None)
    if usual:
        hint = f" '{usual}' often holds it."
    return InputError(
        f"{where}: no column '{column}'; there are: {names}.{hint}"
        f" Name the right one with data: {{columns: {{{setting}: {usual or 'NAME'}}}}}."
    )


def _neighbour(path: Path) -> str:
    return nearest(path.name, [p.name for p in path.parent.iterdir()]) if path.parent.is_dir() else ""
