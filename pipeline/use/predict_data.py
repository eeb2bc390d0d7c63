"""The texts that `smelt predict` is given: words of the command line, lines, or rows of a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from smelt.core.data import TEXT_TO_TEXT, Columns, Example
from smelt.core.errors import InputError, nearest
from smelt.core.rows.reading import read_file
from smelt.core.rows.text_files import file_kind, read_text_file
from smelt.core.text import half_character
from smelt.use.loaded import CLASSIFIES


def examples_of(texts: Sequence[str], task: str) -> list[Example]:
    """Return the texts of a command line as rows; for a classifier a tab parts the two texts of a pair."""
    return [_pair(text) if task == CLASSIFIES else Example(text) for text in texts]


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
    if not path.is_file():
        raise InputError(f"--data {path}: no such file.")
    if file_kind(path) == ".txt":
        if given:
            raise InputError(f"--column {given[0]}: {path} is plain text and has no columns.")
        return examples_of(read_text_file(path).removesuffix("\n").splitlines(), task)
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
    if not rows:
        raise InputError(f"{path}: no rows in this file.")
    return rows


def _named(given: Sequence[str]) -> bool:
    return any(item.startswith("text_pair=") for item in given)


def _columns(given: Sequence[str], task: str) -> tuple[str, str | None]:
    """Return the names of the columns that hold a row's text, and a classifier's second text."""
    usual = Columns()
    text = usual.source if task in TEXT_TO_TEXT else usual.text
    pair = usual.text_pair if task == CLASSIFIES else None
    for item in given:
        role, sep, name = item.partition("=")
        if sep and role == "text_pair":
            if task != CLASSIFIES:
                raise InputError(f"--column {item}: only a classifier reads pairs of texts.")
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
        " Name the right one with --column NAME."
    )


def _value(value: Any, where: str, column: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{where}: column '{column}' must be text, read {repr(value)[:80]}")
    if (half := half_character(value)) is not None:
        raise InputError(
            f"{where}: column '{column}' holds {half!r}, half of a surrogate pair, which is no character."
        )
    return value
