"""From the rows of a file to the examples of a task.

Reads what `smelt.core.rows.reading` reads; for language modeling also plain text (.txt, also .gz), a row
per line. Which column means what is a setting; several references per example are kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from smelt.core.data import (
    CLASSIFICATION,
    CUSTOM,
    IMAGES,
    SIMILARITY,
    TEXT_TO_TEXT,
    Columns,
    Example,
    Label,
    Split,
    Task,
    split_of,
)
from smelt.core.errors import InputError, nearest
from smelt.core.files import placed
from smelt.core.rows.arrays import NO_AXES, Axes, read_arrays
from smelt.core.rows.images import image_rows, require_image
from smelt.core.rows.reading import Rows, hub_rows, read_file
from smelt.core.rows.scores import read_score, require_alike
from smelt.core.rows.text_files import file_kind, read_text_file
from smelt.core.text import half_character
from smelt.core.windows import Windows


def read_split(
    origin: str, task: Task, columns: Columns, base: Path, name: str = "test", axes: Axes = NO_AXES
) -> Split:
    """Read the rows of `origin`: a path (relative to `base`) or a hub id.

    axes: of arrays, where their rows lie.

    Raises:
        InputError: no such file, no rows, broken lines (the first ones are named), a missing column (with
            the nearest).
    """
    path = placed(base, origin)
    if task == CUSTOM:
        return split_of(origin, read_arrays(path, name, axes))
    if task == IMAGES:
        return _read_images(path, origin, columns, name)
    if path.is_file():
        if task == "language-modeling" and file_kind(path) == ".txt":
            return _read_lines(path, origin, name)
        rows = read_file(path)
    elif path.is_dir():
        raise InputError(
            f"{path}: a folder, not a file of rows (data for '{name}'){_or_hub(origin)}.",
            code="not-a-file",
            file=str(path),
        )
    elif path.suffix or origin.startswith((".", "/", "~")) or "/" not in origin:
        raise InputError(
            f"{path}: no such file (data for '{name}').{_neighbour(path)}",
            code="missing-file",
            file=str(path),
        )
    else:
        rows = hub_rows(origin, name)
    examples = _examples(rows, task, columns)
    if not examples:
        raise InputError(
            f"{path}: no rows in this file; '{name}' needs at least one.", code="empty-data", file=str(path)
        )
    windows = Windows(separator="\n\n") if task == "language-modeling" else None
    return Split(origin, examples, windows)


def _or_hub(origin: str) -> str:
    """Say what becomes of a data set of the hub whose name a folder has."""
    hub = "/" in origin and not origin.startswith((".", "/", "~"))
    return "; a data set of that name on the hub is looked for where there is no such folder" if hub else ""


_NAMED = 5  # wrong rows that are named; of the others there is a count


def _examples(rows: Rows, task: Task, columns: Columns) -> tuple[Example, ...]:
    """Read every row; what is wrong with several of them is said together.

    Raises:
        InputError: a row cannot be an example. A missing column is most often missing everywhere, so it
            ends the reading.
    """
    found: list[Example] = []
    mistakes: list[InputError] = []
    try:
        for number, (where, row) in enumerate(rows, start=1):
            try:
                found.append(replace(_example(row, where, task, columns), row=number))
            except _MissingColumnError as error:
                raise (_all_missing(row, where, task, columns) or error).at(where) from error
            except InputError as error:
                mistakes.append(error.at(where))
    except InputError as error:  # the file itself is broken here
        mistakes.append(error)
    if mistakes:
        raise _together(mistakes)
    if task == SIMILARITY:
        lines = [example.line or number for number, example in enumerate(found, start=1)]
        require_alike((e.text_pair is not None for e in found), lines, columns.text_pair, "second text")
        require_alike((e.label is not None for e in found), lines, columns.label, "score")
    return tuple(found)


def _together(mistakes: Sequence[InputError]) -> InputError:
    """Return the error that names the first of `mistakes`, and counts the others."""
    others = len(mistakes) - _NAMED
    named = [str(one) for one in mistakes[:_NAMED]]
    named += [f"{others} more rows of this file are wrong."] if others > 0 else []
    kinds = {one.code for one in mistakes}
    first = mistakes[0]
    return InputError(
        "\n".join(named),
        code=kinds.pop() if len(kinds) == 1 else "several-mistakes",
        file=first.file,
        line=first.line,
        found=[one.as_message() for one in mistakes],
    )


def _read_images(path: Path, origin: str, columns: Columns, name: str) -> Split:
    """Read rows that name images, each of which is looked at."""
    if not path.exists():
        raise InputError(
            f"{path}: no such file or folder (data for '{name}').{_neighbour(path)}",
            code="missing-file",
            file=str(path),
        )
    examples = _examples(image_rows(path, columns.image, columns.label), IMAGES, columns)
    if not examples:
        raise InputError(
            f"{path}: no rows in this file; '{name}' needs at least one.", code="empty-data", file=str(path)
        )
    return Split(origin, examples, images=True)


def _read_lines(path: Path, origin: str, name: str) -> Split:
    """Read plain text; joined with line ends the rows are the file's text again."""
    lines = read_text_file(path).replace("\r\n", "\n").removesuffix("\n").split("\n")
    if not any(line.strip() for line in lines):
        raise InputError(
            f"{path}: no text in this file; '{name}' needs some.", code="empty-data", file=str(path)
        )
    rows = tuple(Example(line, line=number) for number, line in enumerate(lines, start=1))
    return Split(origin, rows, Windows(separator="\n"))


class _MissingColumnError(InputError):
    """A row lacks a column that the task needs."""


def _example(row: Mapping[str, Any], where: str, task: Task, columns: Columns) -> Example:
    tail = where.rpartition(":")[2]
    line = int(tail) if tail.isdecimal() else None
    if task in TEXT_TO_TEXT:
        references = _references(row, where, columns)
        return Example(_filled(row, columns.source, where, "source"), references, line=line)
    if task == "language-modeling":
        return Example(_text(row, columns.text, where, "text"), line=line)
    if task == IMAGES:
        return replace(_labelled(_image(row, where, columns), None, row, where, columns), line=line)
    # a name that the recipe gives must be there; files without null mark its absence by an empty text
    if "text_pair" in columns.model_fields_set and columns.text_pair not in row:
        raise _missing(row, columns.text_pair, where, "text_pair")
    there = row.get(columns.text_pair) is not None
    pair = (_text(row, columns.text_pair, where, "text_pair") or None) if there else None
    if task == SIMILARITY:
        if "label" in columns.model_fields_set and columns.label not in row:
            raise _missing(row, columns.label, where, "label")
        score = read_score(row.get(columns.label), where, columns.label)
        if score is not None and pair is None:
            raise InputError(
                f"{where}: a score ('{columns.label}') says how similar two texts are, and there is no second"
                f" one in '{columns.text_pair}'. Name its column with data: {{columns: {{text_pair:"
                " NAME}}.",
                code="missing-column",
            )
        return Example(_filled(row, columns.text, where, "text"), text_pair=pair, label=score, line=line)
    return replace(_labelled(_filled(row, columns.text, where, "text"), pair, row, where, columns), line=line)


def _labelled(text: str, pair: str | None, row: Mapping[str, Any], where: str, columns: Columns) -> Example:
    if columns.label not in row:
        raise _missing(row, columns.label, where, "label")
    label = _label(row[columns.label], where, columns.label)
    for item in label if isinstance(label, tuple) else (label,):
        _require_characters(str(item), where, columns.label)
    return Example(text, text_pair=pair, label=label)


def _image(row: Mapping[str, Any], where: str, columns: Columns) -> str:
    reference = _text(row, columns.image, where, "image")
    require_image(reference, where)
    return reference


def _references(row: Mapping[str, Any], where: str, columns: Columns) -> tuple[str, ...]:
    references = row.get(columns.references)
    if references is None:
        references = [_text(row, columns.target, where, "target")]
    if not isinstance(references, list) or not all(isinstance(r, str) for r in references):
        raise InputError(
            f"{where}: column '{columns.references}' must be a list of texts, read {repr(references)[:80]}",
            code="wrong-column-type",
        )
    if not references or not all(reference.strip() for reference in references):
        raise InputError(
            f"{where}: the target is empty; a model would learn to say nothing. Remove or fill such rows.",
            code="empty-text",
        )
    for reference in references:
        _require_characters(reference, where, columns.references)
    return tuple(references)


_OF_TRUTH = ". Write true and false as 1 and 0, or in quotes"


def _label(value: Any, where: str, column: str) -> Label:
    if isinstance(value, list | tuple):
        items = [_whole_or_itself(item) for item in value]
        if all(_is_class(item) for item in items):
            return tuple(items)
    value = _whole_or_itself(value)
    if _is_class(value) or (isinstance(value, float) and math.isfinite(value)):
        label: Label = value
        return label
    raise InputError(
        f"{where}: column '{column}' must be a whole number or a name, a list of such (several labels),"
        f" or a number (regression), read {repr(value)[:80]}{_OF_TRUTH if isinstance(value, bool) else ''}",
        code="wrong-column-type",
    )


def _whole_or_itself(value: Any) -> Any:
    """Return 1 for 1.0: pandas writes whole numbers so where another row has none."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_class(value: Any) -> bool:
    return isinstance(value, int | str) and not isinstance(value, bool)


def _text(row: Mapping[str, Any], column: str, where: str, setting: str) -> str:
    if column not in row:
        raise _missing(row, column, where, setting)
    value = row[column]
    if not isinstance(value, str):
        raise InputError(
            f"{where}: column '{column}' must be text, read {repr(value)[:80]}", code="wrong-column-type"
        )
    _require_characters(value, where, column)
    return value


def _filled(row: Mapping[str, Any], column: str, where: str, setting: str) -> str:
    """Return the text in `column`, which must hold more than blanks.

    Raises:
        InputError: `empty-text`, or there is no such column, or no text in it.
    """
    value = _text(row, column, where, setting)
    if not value.strip():
        raise InputError(f"{where}: column '{column}' is empty. Remove or fill such rows.", code="empty-text")
    return value


def _require_characters(text: str, where: str, column: str) -> None:
    """Refuse halves of surrogate pairs, which JSON can write and no tokenizer can read.

    Raises:
        InputError: there is one.
    """
    if (half := half_character(text)) is not None:
        raise InputError(
            f"{where}: column '{column}' holds {half!r}, half of a surrogate pair, which is no character.",
            code="lone-surrogate",
        )


# What public data sets call these columns. They are never guessed, only named in the message.
_ALIASES = {
    "source": ("document", "article", "dialogue", "input", "text", "src", "en"),
    "target": ("summary", "highlights", "abstract", "output", "reference", "tgt", "de"),
    "image": ("file_name", "filename", "path", "file", "img", "image_path"),
}


def _missing(row: Mapping[str, Any], column: str, where: str, setting: str) -> _MissingColumnError:
    names = ", ".join(map(str, row)) or "none"
    hint = nearest(column, map(str, row))
    usual = next((name for name in _ALIASES.get(setting, ()) if name in row), None)
    if usual:
        hint = f" '{usual}' often holds it."
    return _MissingColumnError(
        f"{where}: no column '{column}'; there are: {names}.{hint}"
        f" Name the right one with data: {{columns: {{{setting}: {usual or 'NAME'}}}}}.",
        code="missing-column",
    )


def _all_missing(
    row: Mapping[str, Any], where: str, task: Task, columns: Columns
) -> _MissingColumnError | None:
    """Return the error about all columns that `row` lacks; None where it lacks one alone."""
    roles: tuple[str, ...] = ("text",)
    if task in TEXT_TO_TEXT:
        roles = ("source",) if columns.references in row else ("source", "target")
    elif task in CLASSIFICATION:
        roles = ("image" if task == IMAGES else "text", "label")
    roles += tuple(role for role in ("text_pair", "label") if role in columns.model_fields_set - {*roles})
    lacking = {role: name for role in roles if (name := getattr(columns, role)) not in row}
    if len(lacking) < 2:
        return None
    names = ", ".join(map(str, row)) or "none"
    wrong = ", ".join(f"'{name}'" for name in lacking.values())
    guessed = {role: next((n for n in _ALIASES.get(role, ()) if n in row), "NAME") for role in lacking}
    right = ", ".join(f"{role}: {name}" for role, name in guessed.items())
    return _MissingColumnError(
        f"{where}: no columns {wrong}; there are: {names}."
        f" Name the right ones with data: {{columns: {{{right}}}}}.",
        code="missing-column",
    )


def _neighbour(path: Path) -> str:
    return nearest(path.name, [p.name for p in path.parent.iterdir()]) if path.parent.is_dir() else ""
