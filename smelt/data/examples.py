"""Convert the values of a row to those of an example; the task's specification says which it needs.

Settings map columns to roles; several references per example are kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from smelt.core.errors import InputError, did_you_mean
from smelt.core.messages import find_lone_surrogate
from smelt.data.images import check_image
from smelt.data.splits import Columns, Example, Label, columns_hint


class MissingColumnError(InputError):
    """A row lacks a column that the task needs."""


def parse_labeled(
    text: str,
    pair: str | None,
    row: Mapping[str, Any],
    location: str,
    columns: Columns,
    lacks_label: bool,
) -> Example:
    """Return an example of `text` and its `pair` with the row's label, if it has one.

    Raises:
        InputError: the column is missing, or has another type.
    """
    if lacks_label:
        return Example(text, text_pair=pair)
    if columns.label not in row:
        raise missing_column(row, columns.label, location, "label")
    label = parse_label(row[columns.label], location, columns.label)
    for item in label if isinstance(label, tuple) else (label,):
        reject_surrogates(str(item), location, columns.label)
    return Example(text, text_pair=pair, label=label)


def parse_pair(row: Mapping[str, Any], location: str, columns: Columns) -> str | None:
    """Return the second text of a row; None without one.

    Raises:
        InputError: a column named in the recipe is missing, or no text.
    """
    # a column named in the recipe must exist; formats without null use an empty text
    if "text_pair" in columns.model_fields_set and columns.text_pair not in row:
        raise missing_column(row, columns.text_pair, location, "text_pair")
    if row.get(columns.text_pair) is None:
        return None
    return text_of_column(row, columns.text_pair, location, "text_pair") or None


def parse_image(row: Mapping[str, Any], location: str, columns: Columns) -> str:
    """Return the row's reference to an image.

    Raises:
        InputError: the column is missing, or there is no such image.
    """
    reference = text_of_column(row, columns.image, location, "image")
    check_image(reference, location)
    return reference


def parse_references(
    row: Mapping[str, Any], location: str, several: str, single: str, setting: str
) -> tuple[str, ...]:
    """Return the target texts of a row.

    Args:
        row: the row.
        location: of the row, for messages.
        several: the column with a list of texts, which takes precedence.
        single: the column with one text.
        setting: the role of `single` in `data.columns`.

    Raises:
        InputError: a column is missing or has another type, or a text is empty.
    """
    references = row.get(several)
    if references is None:
        references = [text_of_column(row, single, location, setting)]
    elif not isinstance(references, list) or not all(isinstance(r, str) for r in references):
        raise InputError(
            f"{location}: column '{several}' must be a list of texts, got {repr(references)[:80]}",
            code="wrong-column-type",
        )
    else:
        for reference in references:
            reject_surrogates(reference, location, several)
    if not references or not all(reference.strip() for reference in references):
        raise InputError(
            f"{location}: the {setting} is empty; a model would learn to generate nothing. Remove or fill"
            " such rows.",
            code="empty-text",
        )
    return tuple(references)


def row_name(row: Mapping[str, Any], location: str) -> str:
    """Return the position of a row, and its id if it has one: several rows may have one line, as in SQuAD."""
    return f"{location} (id {row['id'][:40]!r})" if isinstance(row.get("id"), str) else location


_BOOLEAN_HINT = ". Write true and false as 1 and 0, or in quotes"


def parse_label(value: Any, location: str, column: str) -> Label:
    """Return the label in `value`.

    Raises:
        InputError: it is none.
    """
    if isinstance(value, list | tuple):
        items = [integral_as_int(item) for item in value]
        if all(_is_class(item) for item in items) or (items and all(map(_is_finite_number, items))):
            return tuple(items)
    value = integral_as_int(value)
    if _is_class(value) or _is_finite_number(value):
        label: Label = value
        return label
    raise InputError(
        f"{location}: column '{column}' must be an integer or a name, a list of these (several labels),"
        " a number, or a list of numbers (regression), got"
        f" {repr(value)[:80]}{_BOOLEAN_HINT if isinstance(value, bool) else ''}",
        code="wrong-column-type",
    )


def integral_as_int(value: Any) -> Any:
    """Return 1 for 1.0: pandas writes integers so if a value is missing in another row."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_class(value: Any) -> bool:
    return isinstance(value, int | str) and not isinstance(value, bool)


def _is_finite_number(value: Any) -> bool:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return is_integer or (isinstance(value, float) and math.isfinite(value))


def text_of_column(row: Mapping[str, Any], column: str, location: str, setting: str) -> str:
    """Return the text in `column`.

    Raises:
        InputError: the column is missing, or not text.
    """
    if column not in row:
        raise missing_column(row, column, location, setting)
    value = row[column]
    if not isinstance(value, str):
        raise InputError(
            f"{row_name(row, location)}: column '{column}' must be text, got {repr(value)[:80]}",
            code="wrong-column-type",
        )
    reject_surrogates(value, location, column)
    return value


def nonempty_text(row: Mapping[str, Any], column: str, location: str, setting: str) -> str:
    """Return the text in `column`, which must not be blank.

    Raises:
        InputError: `empty-text`, or the column is missing, or not text.
    """
    value = text_of_column(row, column, location, setting)
    if not value.strip():
        raise InputError(
            f"{row_name(row, location)}: column '{column}' is empty. Remove or fill such rows.",
            code="empty-text",
        )
    return value


def reject_surrogates(text: str, location: str, column: str) -> None:
    """Reject halves of surrogate pairs, which JSON can represent and tokenizers cannot process.

    Raises:
        InputError: there is one.
    """
    if (surrogate := find_lone_surrogate(text)) is not None:
        raise InputError(
            f"{location}: column '{column}' contains {surrogate!r}, a lone surrogate, which is not a valid"
            " character. Remove it.",
            code="lone-surrogate",
        )


# Usual column names of public data sets. They are never used, only suggested in the message.
COLUMN_ALIASES = {
    "source": ("document", "article", "dialogue", "input", "text", "src", "en"),
    "target": ("summary", "highlights", "abstract", "output", "reference", "tgt", "de"),
    "image": ("file_name", "filename", "path", "file", "img", "image_path"),
    "prompt": ("question", "query", "problem", "input", "text", "source"),
    "response": ("answer", "completion", "chosen", "solution", "output", "target"),
}


def missing_column(row: Mapping[str, Any], column: str, location: str, setting: str) -> MissingColumnError:
    """Return the error about `column`, which `row` lacks, with its usual names."""
    names = ", ".join(map(str, row)) or "none"
    hint = did_you_mean(column, map(str, row))
    alias = next((name for name in COLUMN_ALIASES.get(setting, ()) if name in row), None)
    if alias:
        hint = f" '{alias}' usually holds it."
    return MissingColumnError(
        f"{row_name(row, location)}: no column '{column}'; available: {names}.{hint}"
        f" {columns_hint({setting: alias or 'NAME'})}",
        code="missing-column",
    )


def missing_columns_error(
    row: Mapping[str, Any], location: str, roles: tuple[str, ...], columns: Columns
) -> MissingColumnError | None:
    """Return the error about several columns of `roles` that `row` lacks; None if it lacks only one."""
    roles += tuple(role for role in ("text_pair", "label") if role in columns.model_fields_set - {*roles})
    missing = {role: name for role in roles if (name := getattr(columns, role)) not in row}
    if len(missing) < 2:
        return None
    names = ", ".join(map(str, row)) or "none"
    missing_names = ", ".join(f"'{name}'" for name in missing.values())
    suggestions = {
        role: next((n for n in COLUMN_ALIASES.get(role, ()) if n in row), "NAME") for role in missing
    }
    return MissingColumnError(
        f"{row_name(row, location)}: no columns {missing_names}; available: {names}."
        f" {columns_hint(suggestions)}",
        code="missing-column",
    )
