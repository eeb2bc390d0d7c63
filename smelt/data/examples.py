"""Convert the rows of a file to the examples of a task.

All formats of `smelt.data.csv_rows` are read; for language modeling also plain text (.txt, also .gz), a
sample per line. Settings map columns to roles; several references per example are kept. Similarity scores of
text pairs are numbers in a column, in all rows of a file or in none. Unlabeled samples are those on which a
student learns its teacher's outputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError, did_you_mean
from smelt.core.files import resolve_path
from smelt.core.messages import find_lone_surrogate
from smelt.data.column_hints import columns_hint
from smelt.data.csv_rows import RowIterator, read_file_rows, read_hub_rows
from smelt.data.images import check_image, read_image_rows
from smelt.data.json_rows import data_suffix, read_text_file
from smelt.data.labels import parse_score, require_all_or_none
from smelt.data.npz_arrays import NO_SAMPLE_AXES, SampleAxes, read_npz
from smelt.data.prompt_rows import (
    LAYOUT_COLUMNS,
    conversation_text,
    parse_choices,
    parse_conversation,
    parse_messages,
    right_choice,
    row_layout,
)
from smelt.data.splits import (
    CLASSIFICATION_TASKS,
    CUSTOM_TASK,
    IMAGE_CLASSIFICATION,
    SENTENCE_SIMILARITY,
    TEXT_GENERATION,
    TEXT_TO_TEXT_TASKS,
    Columns,
    Example,
    Label,
    Split,
    Task,
    Windows,
    split_from_arrays,
)


def read_split(
    origin: str,
    task: Task,
    columns: Columns,
    base: Path,
    name: str = "test",
    axes: SampleAxes = NO_SAMPLE_AXES,
    targets_optional: bool = False,
) -> Split:
    """Return the samples of `origin`: a path (relative to `base`) or a hub id.

    axes: the sample axes of arrays. targets_optional: whether samples may lack references or a label, for
    scores that use neither.

    Raises:
        InputError: no such file, no samples, invalid lines (the first ones are named), a missing column (with
            the nearest).
    """
    path = resolve_path(base, origin)
    if task == CUSTOM_TASK:
        return split_from_arrays(origin, read_npz(path, name, axes))
    if task == IMAGE_CLASSIFICATION:
        return _read_image_split(path, origin, columns, name, targets_optional)
    if path.is_file():
        if task == "language-modeling" and data_suffix(path) == ".txt":
            return _read_text_split(path, origin, name)
        rows = read_file_rows(path)
    elif path.is_dir():
        raise InputError(
            f"{path}: this is a folder, not a data file (data for '{name}'){_hub_hint(origin)}.",
            code="not-a-file",
            file=str(path),
        )
    elif path.suffix or origin.startswith((".", "/", "~")) or "/" not in origin:
        raise InputError(
            f"{path}: no such file (data for '{name}').{_similar_file_hint(path)}",
            code="missing-file",
            file=str(path),
        )
    else:
        rows = read_hub_rows(origin, name)
    examples = _parse_examples(rows, task, columns, targets_optional)
    if not examples:
        raise InputError(
            f"{path}: this file has no samples, but '{name}' needs at least one.",
            code="empty-data",
            file=str(path),
        )
    windows = Windows(separator="\n\n") if task == "language-modeling" else None
    return Split(origin, examples, windows)


def _hub_hint(origin: str) -> str:
    """Return a hint if `origin` could also be a hub id, else ""."""
    hub = "/" in origin and not origin.startswith((".", "/", "~"))
    return "; the hub data set of that name is used only if there is no such folder" if hub else ""


_MAX_LISTED = 5  # wrong rows that are named; the others are counted


def _parse_examples(
    rows: RowIterator, task: Task, columns: Columns, targets_optional: bool
) -> tuple[Example, ...]:
    """Return the examples of all rows; errors of several rows are reported together.

    Raises:
        InputError: a row cannot be an example. A missing column usually is missing in all rows, so reading
            stops there.
    """
    found: list[Example] = []
    errors: list[InputError] = []
    try:
        for number, (where, row) in enumerate(rows, start=1):
            try:
                example = _parse_example(row, where, task, columns, targets_optional)
                found.append(replace(example, row=number))
            except _MissingColumnError as error:
                raise (_missing_columns(row, where, task, columns) or error).with_location(where) from error
            except InputError as error:
                errors.append(error.with_location(where))
    except InputError as error:  # the file itself is invalid here
        errors.append(error)
    if errors:
        raise _combined_errors(errors)
    if task == TEXT_GENERATION:
        lines = [example.line or number for number, example in enumerate(found, start=1)]
        require_all_or_none((bool(e.choices) for e in found), lines, columns.choices, "list of choices")
    if task == SENTENCE_SIMILARITY:
        lines = [example.line or number for number, example in enumerate(found, start=1)]
        require_all_or_none((e.text_pair is not None for e in found), lines, columns.text_pair, "second text")
        require_all_or_none((e.label is not None for e in found), lines, columns.label, "score")
    return tuple(found)


def _combined_errors(errors: Sequence[InputError]) -> InputError:
    """Return an error with the first of `errors` and the number of the others."""
    unlisted = len(errors) - _MAX_LISTED
    named = [str(error) for error in errors[:_MAX_LISTED]]
    named += [f"{unlisted} more rows of this file have errors."] if unlisted > 0 else []
    kinds = {error.code for error in errors}
    first = errors[0]
    return InputError(
        "\n".join(named),
        code=kinds.pop() if len(kinds) == 1 else "several-errors",
        file=first.file,
        line=first.line,
        found=[error.as_message() for error in errors],
    )


def _read_image_split(path: Path, origin: str, columns: Columns, name: str, targets_optional: bool) -> Split:
    """Return samples that name images; the header of each image is checked."""
    if not path.exists():
        raise InputError(
            f"{path}: no such file or folder (data for '{name}').{_similar_file_hint(path)}",
            code="missing-file",
            file=str(path),
        )
    examples = _parse_examples(
        read_image_rows(path, columns.image, columns.label), IMAGE_CLASSIFICATION, columns, targets_optional
    )
    if not examples:
        raise InputError(
            f"{path}: this file has no samples, but '{name}' needs at least one.",
            code="empty-data",
            file=str(path),
        )
    return Split(origin, examples, images=True)


def _read_text_split(path: Path, origin: str, name: str) -> Split:
    """Return the lines of plain text; joined with line breaks they are the file's text again."""
    lines = read_text_file(path).replace("\r\n", "\n").removesuffix("\n").split("\n")
    if not any(line.strip() for line in lines):
        raise InputError(
            f"{path}: this file has no text, but '{name}' needs at least one line.",
            code="empty-data",
            file=str(path),
        )
    rows = tuple(Example(line, line=number) for number, line in enumerate(lines, start=1))
    return Split(origin, rows, Windows(separator="\n"))


class _MissingColumnError(InputError):
    """A row lacks a column that the task needs."""


def _parse_example(
    row: Mapping[str, Any], location: str, task: Task, columns: Columns, targets_optional: bool
) -> Example:
    tail = location.rpartition(":")[2]
    line = int(tail) if tail.isdecimal() else None
    lacks_target = targets_optional and _lacks_target(row, task, columns)
    if task == TEXT_GENERATION:
        parse = _parse_unanswered if lacks_target else _parse_prompted
        return replace(parse(row, location, columns), line=line)
    if task in TEXT_TO_TEXT_TASKS:
        references = (
            ()
            if lacks_target
            else _parse_references(row, location, columns.references, columns.target, "target")
        )
        return Example(_nonempty_text(row, columns.source, location, "source"), references, line=line)
    if task == "language-modeling":
        return Example(_text_of_column(row, columns.text, location, "text"), line=line)
    if task == IMAGE_CLASSIFICATION:
        image = _parse_image(row, location, columns)
        return replace(_parse_labeled(image, None, row, location, columns, lacks_target), line=line)
    # a column named in the recipe must exist; formats without null use an empty text
    if "text_pair" in columns.model_fields_set and columns.text_pair not in row:
        raise _missing_column(row, columns.text_pair, location, "text_pair")
    is_pair = row.get(columns.text_pair) is not None
    pair = (_text_of_column(row, columns.text_pair, location, "text_pair") or None) if is_pair else None
    if task == SENTENCE_SIMILARITY:
        if "label" in columns.model_fields_set and columns.label not in row:
            raise _missing_column(row, columns.label, location, "label")
        score = parse_score(row.get(columns.label), location, columns.label)
        if score is not None and pair is None:
            raise InputError(
                f"{location}: there is a score ('{columns.label}') but no second text in"
                f" '{columns.text_pair}'. {columns_hint({'text_pair': 'NAME'})}",
                code="missing-column",
            )
        return Example(
            _nonempty_text(row, columns.text, location, "text"), text_pair=pair, label=score, line=line
        )
    text = _nonempty_text(row, columns.text, location, "text")
    return replace(_parse_labeled(text, pair, row, location, columns, lacks_target), line=line)


def _lacks_target(row: Mapping[str, Any], task: Task, columns: Columns) -> bool:
    """Return whether a row has neither references nor a label."""
    roles: tuple[str, ...] = ("label",)
    if task == TEXT_GENERATION:
        layout = row_layout(row, columns)
        if layout == "messages":
            return not _ends_with_response(row[columns.messages])
        roles = ("output",) if layout == "instruction" else ("response",)
        roles += ("responses",)
    elif task in TEXT_TO_TEXT_TASKS:
        roles = ("target", "references")
    return all(row.get(getattr(columns, role)) in (None, "") for role in roles)


def _ends_with_response(value: Any) -> bool:
    """Return whether a conversation ends with a turn of the assistant."""
    if isinstance(value, str):
        value = parse_conversation(value)
    return isinstance(value, list) and bool(value) and value[-1].get("role") == "assistant"


def _parse_unanswered(row: Mapping[str, Any], location: str, columns: Columns) -> Example:
    """Return a sample of text generation without a response; its conversation ends with the user's turn.

    Raises:
        InputError: as `parse_prompt`.
    """
    if row_layout(row, columns) == "messages":
        value = row[columns.messages]
        turns = parse_conversation(value) if isinstance(value, str) else value
        if isinstance(turns, list):
            answer = {"role": "assistant", "content": "-"}
            row = {**row, columns.messages: [*turns, answer]}  # `parse_prompt` removes it
    return parse_prompt(row, location, columns)


def _parse_labeled(
    text: str,
    pair: str | None,
    row: Mapping[str, Any],
    location: str,
    columns: Columns,
    lacks_label: bool,
) -> Example:
    if lacks_label:
        return Example(text, text_pair=pair)
    if columns.label not in row:
        raise _missing_column(row, columns.label, location, "label")
    label = _parse_label(row[columns.label], location, columns.label)
    for item in label if isinstance(label, tuple) else (label,):
        _reject_surrogates(str(item), location, columns.label)
    return Example(text, text_pair=pair, label=label)


def _parse_image(row: Mapping[str, Any], location: str, columns: Columns) -> str:
    reference = _text_of_column(row, columns.image, location, "image")
    check_image(reference, location)
    return reference


def _parse_prompted(row: Mapping[str, Any], location: str, columns: Columns) -> Example:
    """Return a sample of text generation: a prompt with its responses.

    Raises:
        InputError: as `parse_prompt`; there is no response, or it is empty.
    """
    example = parse_prompt(row, location, columns)
    if example.layout == "messages":
        _, answer = parse_messages(row[columns.messages], location, columns.messages)
        _reject_surrogates(answer, location, columns.messages)
        return _with_choices(replace(example, references=(answer,)), row, location, columns)
    single = "output" if example.layout == "instruction" else "response"
    has_response = row.get(columns.responses) is not None or row.get(getattr(columns, single)) is not None
    if row.get(columns.choices) is not None and not has_response:
        return _with_choices(example, row, location, columns)
    answers = _parse_references(row, location, columns.responses, getattr(columns, single), single)
    return _with_choices(replace(example, references=answers), row, location, columns)


def _with_choices(example: Example, row: Mapping[str, Any], location: str, columns: Columns) -> Example:
    """Return `example` with the choices of `row`, if it has some; the right one is its default reference.

    Raises:
        InputError: as `parse_choices` and `right_choice`, or a column is missing.
    """
    named = bool({"choices", "answer"} & columns.model_fields_set)
    if row.get(columns.choices) is None or not (named or columns.answer in row or not example.references):
        if named:
            raise _missing_column(row, columns.choices, location, "choices")
        return example  # another column of this name
    choices = parse_choices(row[columns.choices], location, columns.choices)
    for choice in choices:
        _reject_surrogates(choice, location, columns.choices)
    if columns.answer not in row:
        raise _missing_column(row, columns.answer, location, "answer")
    at = right_choice(_integral_as_int(row[columns.answer]), choices, location, columns.answer)
    return replace(example, choices=choices, answer=at, references=example.references or (choices[at],))


def parse_prompt(row: Mapping[str, Any], location: str, columns: Columns) -> Example:
    """Return the prompt of a row of text generation; see `smelt.data.prompt_rows` for the layouts of a row.

    Raises:
        InputError: a column is missing or has another type, a text is empty, or a conversation is invalid.
    """
    layout = row_layout(row, columns)
    if layout is None:
        raise _no_prompt(row, location, columns)
    if layout == "messages":
        before, _ = parse_messages(row[columns.messages], location, columns.messages)
        for message in before:
            _reject_surrogates(message["content"], location, columns.messages)
        return Example(conversation_text(before), layout=layout)
    if layout == "prompt":
        return Example(_nonempty_text(row, columns.prompt, location, "prompt"), layout=layout)
    text = _nonempty_text(row, columns.instruction, location, "instruction")
    # a column named in the recipe must exist; the input of a row may be empty
    if row.get(columns.input) is not None or "input" in columns.model_fields_set:
        more = _text_of_column(row, columns.input, location, "input")
        text = f"{text}\n\n{more}" if more.strip() else text
    return Example(text, layout=layout)


def _no_prompt(row: Mapping[str, Any], location: str, columns: Columns) -> _MissingColumnError:
    """Return the error about a row that has no prompt, no instruction and no messages."""
    names = ", ".join(map(str, row)) or "none"
    roles = [(role, getattr(columns, role)) for role, *_ in LAYOUT_COLUMNS.values()]
    wanted = ", ".join(f"'{name}'" for _, name in roles)
    usual = next((name for name in _ALIASES["prompt"] if name in row), None)
    answer = next((name for name in _ALIASES["response"] if name in row and name != usual), None)
    right = columns_hint({"prompt": usual or "NAME", "response": answer or "NAME"})
    return _MissingColumnError(
        f"{location}: none of the columns {wanted}; available: {names}. {right}",
        code="missing-column",
    )


def _parse_references(
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
        references = [_text_of_column(row, single, location, setting)]
    if not isinstance(references, list) or not all(isinstance(r, str) for r in references):
        raise InputError(
            f"{location}: column '{several}' must be a list of texts, got {repr(references)[:80]}",
            code="wrong-column-type",
        )
    if not references or not all(reference.strip() for reference in references):
        raise InputError(
            f"{location}: the {'target' if setting == 'target' else 'response'} is empty; a model would learn"
            " to generate nothing. Remove or fill such rows.",
            code="empty-text",
        )
    for reference in references:
        _reject_surrogates(reference, location, several)
    return tuple(references)


_BOOLEAN_HINT = ". Write true and false as 1 and 0, or in quotes"


def _parse_label(value: Any, location: str, column: str) -> Label:
    if isinstance(value, list | tuple):
        items = [_integral_as_int(item) for item in value]
        if all(_is_class(item) for item in items):
            return tuple(items)
    value = _integral_as_int(value)
    if _is_class(value) or (isinstance(value, float) and math.isfinite(value)):
        label: Label = value
        return label
    raise InputError(
        f"{location}: column '{column}' must be an integer or a name, a list of these (several labels),"
        " or a number (regression), got"
        f" {repr(value)[:80]}{_BOOLEAN_HINT if isinstance(value, bool) else ''}",
        code="wrong-column-type",
    )


def _integral_as_int(value: Any) -> Any:
    """Return 1 for 1.0: pandas writes integers so if a value is missing in another row."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_class(value: Any) -> bool:
    return isinstance(value, int | str) and not isinstance(value, bool)


def _text_of_column(row: Mapping[str, Any], column: str, location: str, setting: str) -> str:
    if column not in row:
        raise _missing_column(row, column, location, setting)
    value = row[column]
    if not isinstance(value, str):
        raise InputError(
            f"{location}: column '{column}' must be text, got {repr(value)[:80]}", code="wrong-column-type"
        )
    _reject_surrogates(value, location, column)
    return value


def _nonempty_text(row: Mapping[str, Any], column: str, location: str, setting: str) -> str:
    """Return the text in `column`, which must not be blank.

    Raises:
        InputError: `empty-text`, or the column is missing, or not text.
    """
    value = _text_of_column(row, column, location, setting)
    if not value.strip():
        raise InputError(
            f"{location}: column '{column}' is empty. Remove or fill such rows.", code="empty-text"
        )
    return value


def _reject_surrogates(text: str, location: str, column: str) -> None:
    """Reject halves of surrogate pairs, which JSON can represent and tokenizers cannot process.

    Raises:
        InputError: there is one.
    """
    if (half := find_lone_surrogate(text)) is not None:
        raise InputError(
            f"{location}: column '{column}' contains {half!r}, a lone surrogate, which is not a valid"
            " character. Remove it.",
            code="lone-surrogate",
        )


# Usual column names of public data sets. They are never used, only suggested in the message.
_ALIASES = {
    "source": ("document", "article", "dialogue", "input", "text", "src", "en"),
    "target": ("summary", "highlights", "abstract", "output", "reference", "tgt", "de"),
    "image": ("file_name", "filename", "path", "file", "img", "image_path"),
    "prompt": ("question", "query", "problem", "input", "text", "source"),
    "response": ("answer", "completion", "chosen", "solution", "output", "target"),
}


def _missing_column(row: Mapping[str, Any], column: str, location: str, setting: str) -> _MissingColumnError:
    names = ", ".join(map(str, row)) or "none"
    hint = did_you_mean(column, map(str, row))
    usual = next((name for name in _ALIASES.get(setting, ()) if name in row), None)
    if usual:
        hint = f" '{usual}' usually holds it."
    return _MissingColumnError(
        f"{location}: no column '{column}'; available: {names}.{hint}"
        f" {columns_hint({setting: usual or 'NAME'})}",
        code="missing-column",
    )


def _missing_columns(
    row: Mapping[str, Any], location: str, task: Task, columns: Columns
) -> _MissingColumnError | None:
    """Return the error about several columns that `row` lacks; None if it lacks only one."""
    roles: tuple[str, ...] = ("text",)
    if task == TEXT_GENERATION:  # the error names all of them
        return None
    if task in TEXT_TO_TEXT_TASKS:
        roles = ("source",) if columns.references in row else ("source", "target")
    elif task in CLASSIFICATION_TASKS:
        roles = ("image" if task == IMAGE_CLASSIFICATION else "text", "label")
    roles += tuple(role for role in ("text_pair", "label") if role in columns.model_fields_set - {*roles})
    lacking = {role: name for role in roles if (name := getattr(columns, role)) not in row}
    if len(lacking) < 2:
        return None
    names = ", ".join(map(str, row)) or "none"
    wrong = ", ".join(f"'{name}'" for name in lacking.values())
    guessed = {role: next((n for n in _ALIASES.get(role, ()) if n in row), "NAME") for role in lacking}
    return _MissingColumnError(
        f"{location}: no columns {wrong}; available: {names}. {columns_hint(guessed)}",
        code="missing-column",
    )


def _similar_file_hint(path: Path) -> str:
    return did_you_mean(path.name, [p.name for p in path.parent.iterdir()]) if path.parent.is_dir() else ""


UNLABELED = "unlabeled"  # the split
_NO_COLUMN = "\0"  # a name that no column has
# Tasks whose samples may lack labels: a teacher provides the targets.
UNLABELED_TASKS: frozenset[Task] = frozenset({"text-classification", SENTENCE_SIMILARITY})


def is_plain_text(origin: str, task: Task) -> bool:
    """Return whether a file of samples without labels has one text per line (.txt, also .gz)."""
    return task in UNLABELED_TASKS and data_suffix(Path(origin)) == ".txt"


def read_unlabeled(origin: str, task: Task, columns: Columns, base: Path) -> Split:
    """Return texts, or pairs of texts: plain text (.txt, also .gz), one per line, or rows as in `read_split`.

    The column of labels is not read. Empty lines are skipped.

    Raises:
        InputError: as `read_split`; no texts, or a task whose samples have no labels.
    """
    if task not in UNLABELED_TASKS:
        raise InputError(
            f"{origin}: unlabeled samples are for {' and '.join(sorted(UNLABELED_TASKS))}, not for {task}.",
            code="unsupported-task",
        )
    path = resolve_path(base, origin)
    if path.is_file() and is_plain_text(origin, task):
        lines = read_text_file(path).splitlines()
        found = tuple(Example(line, line=at, row=at) for at, line in enumerate(lines, 1) if line.strip())
        if not found:
            raise InputError(
                f"{path}: this file has no text, but '{UNLABELED}' needs at least one line.",
                code="empty-data",
            )
        return Split(origin, found)
    # samples of sentence similarity are the same with and without a score
    texts = columns.model_copy(update={"label": _NO_COLUMN})
    texts.model_fields_set.discard("label")  # the user did not set it
    return read_split(origin, SENTENCE_SIMILARITY, texts, base, UNLABELED)
