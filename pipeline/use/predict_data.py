"""The texts that `smelt predict` is given: words of the command line, lines, or rows of a file."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from smelt.core.data import IMAGES, SIMILARITY, TEXT_TO_TEXT, Columns, Example
from smelt.core.errors import InputError, nearest
from smelt.core.rows.images import image_rows, require_image
from smelt.core.rows.reading import read_file
from smelt.core.rows.text_files import file_kind, read_text_file
from smelt.core.text import half_character
from smelt.use.loaded import CLASSIFIES

# Tasks whose rows may be pairs of texts.
_PAIRED = (CLASSIFIES, SIMILARITY)


def examples_of(texts: Sequence[str], task: str, name: str = "text") -> list[Example]:
    """Return texts as rows; for classifiers and sentence embedders a tab parts the two texts of a pair.

    Args:
        texts: of a command line, or lines.
        task: the artifact's.
        name: what a message calls one of them.

    Raises:
        InputError: one was not UTF-8; Python hands such bytes on as halves of surrogate pairs.
    """
    for at, text in enumerate(texts, 1):
        if half_character(text) is not None:
            raise InputError(
                f"{name} {at}: not UTF-8 text, read {repr(text)[:60]}. Convert it to UTF-8.", code="not-utf8"
            )
    if task == IMAGES:
        for at, text in enumerate(texts, 1):
            require_image(text, f"{'image' if name == 'text' else name} {at}")
    return [_pair(text) if task in _PAIRED else Example(text) for text in texts]


def lines_of(stream: Iterable[str]) -> list[str]:
    """Return the lines of `stream` without their ends and without the mark that a file may begin with.

    A line is what the stream takes for one: `str.splitlines` would end it at U+2028 too, and there would be
    more answers than lines.
    """
    lines = [line.removesuffix("\n") for line in stream]
    return [line.removeprefix("\ufeff") for line in lines[:1]] + lines[1:]


def _pair(text: str) -> Example:
    first, tab, second = text.partition("\t")
    return Example(first, text_pair=second if tab else None)


def read_examples(path: Path, task: str, given: Sequence[str]) -> list[Example]:
    """Read the texts in `path`: a table with named columns, or plain text, a text per line.

    Args:
        path: a file of any kind that data may have, or .txt.
        task: the artifact's.
        given: names of columns: NAME for the text, or ROLE=NAME with the role source, text or text_pair.

    Raises:
        InputError: the file cannot be read, holds no rows, or lacks a column.
    """
    if task == IMAGES:
        return _images(path, given)
    if not path.is_file():
        code, why = (
            ("not-a-file", "a folder; name a file in it")
            if path.is_dir()
            else ("missing-file", "no such file")
        )
        raise InputError(f"--data {path}: {why}.", code=code, file=str(path))
    if file_kind(path) == ".txt":
        if given:
            raise InputError(
                f"--column {given[0]}: {path} is plain text and has no columns.",
                code="no-columns",
                file=str(path),
            )
        lines = lines_of(io.StringIO(read_text_file(path), newline=None))
        return _some(examples_of(lines, task), path)
    text, pair = _columns(given, task)
    # a column that nobody named need not be there
    wanted = {text: "text"} | ({pair: "text_pair"} if pair and _named(given) else {})
    rows = []
    for where, row in read_file(path):
        for name in wanted:
            if name not in row:
                raise _missing(row, name, where)
        second = row.get(pair) if pair else None
        other = _value(second, where, str(pair)) if second else None
        rows.append(Example(_value(row[text], where, text), text_pair=other))
    return _some(rows, path)


def _images(path: Path, given: Sequence[str]) -> list[Example]:
    """Read the images of `path`: what data may be (without labels too), or a list of files (.txt)."""
    columns = Columns(image=given[0].removeprefix("image=")) if given else Columns()
    if len(given) > 1:
        raise InputError(f"--column {given[1]}: name one column, that of the image.", code="wrong-value")
    if not path.exists():
        raise InputError(f"--data {path}: no such file or folder.", code="missing-file", file=str(path))
    if path.is_file() and file_kind(path) == ".txt":
        lines = [line for line in lines_of(io.StringIO(read_text_file(path), newline=None)) if line.strip()]
        return _some(examples_of([str(path.parent / line) for line in lines], IMAGES, f"{path} line"), path)
    rows = []
    for where, row in image_rows(path, columns.image, columns.label):
        if columns.image not in row:
            raise _missing(row, columns.image, where)
        reference = _value(row[columns.image], where, columns.image)
        require_image(reference, where)
        rows.append(Example(reference))
    return _some(rows, path)


def _some(rows: list[Example], path: Path) -> list[Example]:
    if not rows:
        raise InputError(f"{path}: no rows in this file.", code="empty-data", file=str(path))
    return rows


def _named(given: Sequence[str]) -> bool:
    return any(item.startswith("text_pair=") for item in given)


def _columns(given: Sequence[str], task: str) -> tuple[str, str | None]:
    """Return the names of the columns that hold a row's text, and a classifier's second text."""
    usual = Columns()
    text = usual.source if task in TEXT_TO_TEXT else usual.text
    pair = usual.text_pair if task in _PAIRED else None
    seen: dict[bool, str] = {}
    for item in given:
        role, sep, name = item.partition("=")
        second = bool(sep) and role == "text_pair"
        if (other := seen.setdefault(second, item)) != item:
            raise InputError(
                f"--column {other} and --column {item}: name one column for a text.", code="settings-conflict"
            )
        if second:
            if task not in _PAIRED:
                raise InputError(
                    f"--column {item}: a model for {task} reads no pairs of texts.", code="does-not-fit-task"
                )
            pair = name
        elif sep and role in ("source", "text"):
            text = name
        else:
            text = item
    return text, pair


def _missing(row: Mapping[str, Any], name: str, where: str) -> InputError:
    known = ", ".join(map(str, row)) or "none"
    return InputError(
        f"{where}: no column '{name}'; there are: {known}.{nearest(name, map(str, row))}"
        " Name the right one with --column NAME.",
        code="missing-column",
    ).at(where)


def _value(value: Any, where: str, column: str) -> str:
    if not isinstance(value, str):
        raise InputError(
            f"{where}: column '{column}' must be text, read {repr(value)[:80]}", code="wrong-column-type"
        ).at(where)
    if (half := half_character(value)) is not None:
        raise InputError(
            f"{where}: column '{column}' holds {half!r}, half of a surrogate pair, which is no character.",
            code="lone-surrogate",
        ).at(where)
    return value
