"""Read the inputs of `smelt predict`: arguments, lines of standard input, or a file."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from smelt.api.loaded_model import CLASSIFICATION_TASK
from smelt.core.data import IMAGE_CLASSIFICATION, SENTENCE_SIMILARITY, TEXT_TO_TEXT_TASKS, Columns, Example
from smelt.core.errors import InputError, did_you_mean
from smelt.core.readers.file_rows import read_file_rows
from smelt.core.readers.image_rows import check_image, read_image_rows
from smelt.core.readers.text_files import data_suffix, read_text_file
from smelt.core.text import find_lone_surrogate

# Tasks whose samples may be pairs of texts.
_PAIR_TASKS = (CLASSIFICATION_TASK, SENTENCE_SIMILARITY)


def as_examples(texts: Sequence[str], task: str, name: str = "text") -> list[Example]:
    """Return texts as samples; for classifiers and sentence embedders a tab separates the texts of a pair.

    Args:
        texts: arguments or lines.
        task: the artifact's task.
        name: what a message calls one text.

    Raises:
        InputError: a text is not valid UTF-8 (Python represents invalid bytes as lone surrogates).
    """
    for at, text in enumerate(texts, 1):
        if find_lone_surrogate(text) is not None:
            raise InputError(
                f"{name} {at}: not UTF-8 text, got {repr(text)[:60]}. Convert it to UTF-8.", code="not-utf8"
            )
    if task == IMAGE_CLASSIFICATION:
        for at, text in enumerate(texts, 1):
            check_image(text, f"{'image' if name == 'text' else name} {at}")
    return [_split_pair(text) if task in _PAIR_TASKS else Example(text) for text in texts]


def strip_lines(stream: Iterable[str]) -> list[str]:
    """Return the lines of `stream` without line ends and byte order mark.

    Not `str.splitlines`, which also splits at U+2028, so that there would be more outputs than lines.
    """
    lines = [line.removesuffix("\n") for line in stream]
    return [line.removeprefix("\ufeff") for line in lines[:1]] + lines[1:]


def _split_pair(text: str) -> Example:
    first, tab, second = text.partition("\t")
    return Example(first, text_pair=second if tab else None)


def read_examples(path: Path, task: str, given: Sequence[str]) -> list[Example]:
    """Read the samples in `path`: a table, or a .txt file with one text per line.

    Args:
        path: a file in any format for data, or .txt.
        task: the artifact's task.
        given: columns: NAME for the text, or ROLE=NAME with the role source, text or text_pair.

    Raises:
        InputError: the file cannot be read, is empty, or lacks a column.
    """
    if task == IMAGE_CLASSIFICATION:
        return _read_images(path, given)
    if not path.is_file():
        code, why = (
            ("not-a-file", "a folder, expected a file") if path.is_dir() else ("missing-file", "no such file")
        )
        raise InputError(f"--data {path}: {why}.", code=code, file=str(path))
    if data_suffix(path) == ".txt":
        if given:
            raise InputError(
                f"--column {given[0]}: {path} is plain text and has no columns. Remove --column.",
                code="no-columns",
                file=str(path),
            )
        lines = strip_lines(io.StringIO(read_text_file(path), newline=None))
        return _require_rows(as_examples(lines, task), path)
    text, pair = _column_names(given, task)
    # a column for pairs is required only if it was named
    wanted = {text: "text"} | ({pair: "text_pair"} if pair and _has_column_names(given) else {})
    rows = []
    for where, row in read_file_rows(path):
        for name in wanted:
            if name not in row:
                raise _missing_column(row, name, where)
        second = row.get(pair) if pair else None
        other = _cell_text(second, where, str(pair)) if second else None
        rows.append(Example(_cell_text(row[text], where, text), text_pair=other))
    return _require_rows(rows, path)


def _read_images(path: Path, given: Sequence[str]) -> list[Example]:
    """Read the images of `path`: any format for data (labels are optional), or a list of files (.txt)."""
    columns = Columns(image=given[0].removeprefix("image=")) if given else Columns()
    if len(given) > 1:
        raise InputError(
            f"--column {given[1]}: expected only one column, the image column.", code="wrong-value"
        )
    if not path.exists():
        raise InputError(f"--data {path}: no such file or folder.", code="missing-file", file=str(path))
    if path.is_file() and data_suffix(path) == ".txt":
        lines = [
            line for line in strip_lines(io.StringIO(read_text_file(path), newline=None)) if line.strip()
        ]
        return _require_rows(
            as_examples([str(path.parent / line) for line in lines], IMAGE_CLASSIFICATION, f"{path} line"),
            path,
        )
    rows = []
    for where, row in read_image_rows(path, columns.image, columns.label):
        if columns.image not in row:
            raise _missing_column(row, columns.image, where)
        reference = _cell_text(row[columns.image], where, columns.image)
        check_image(reference, where)
        rows.append(Example(reference))
    return _require_rows(rows, path)


def _require_rows(rows: list[Example], path: Path) -> list[Example]:
    if not rows:
        raise InputError(f"{path}: the file contains no samples.", code="empty-data", file=str(path))
    return rows


def _has_column_names(given: Sequence[str]) -> bool:
    return any(item.startswith("text_pair=") for item in given)


def _column_names(given: Sequence[str], task: str) -> tuple[str, str | None]:
    """Return the columns of the text and, for tasks with pairs, of the second text."""
    usual = Columns()
    text = usual.source if task in TEXT_TO_TEXT_TASKS else usual.text
    pair = usual.text_pair if task in _PAIR_TASKS else None
    seen: dict[bool, str] = {}
    for item in given:
        role, sep, name = item.partition("=")
        second = bool(sep) and role == "text_pair"
        if (other := seen.setdefault(second, item)) != item:
            raise InputError(
                f"--column {other} and --column {item}: two columns for the same text. Remove one.",
                code="settings-conflict",
            )
        if second:
            if task not in _PAIR_TASKS:
                raise InputError(
                    f"--column {item}: a model for {task} does not support pairs of texts. Remove it.",
                    code="does-not-fit-task",
                )
            pair = name
        elif sep and role in ("source", "text"):
            text = name
        else:
            text = item
    return text, pair


def _missing_column(row: Mapping[str, Any], name: str, where: str) -> InputError:
    known = ", ".join(map(str, row)) or "none"
    return InputError(
        f"{where}: no column '{name}'. Columns: {known}.{did_you_mean(name, map(str, row))}"
        " Set the right one with --column NAME.",
        code="missing-column",
    ).with_location(where)


def _cell_text(value: Any, where: str, column: str) -> str:
    if not isinstance(value, str):
        raise InputError(
            f"{where}: column '{column}': expected text, got {repr(value)[:80]}.", code="wrong-column-type"
        ).with_location(where)
    if (half := find_lone_surrogate(value)) is not None:
        raise InputError(
            f"{where}: column '{column}' contains {half!r}, a lone surrogate, which is not a valid character."
            " Remove it.",
            code="lone-surrogate",
        ).with_location(where)
    return value
