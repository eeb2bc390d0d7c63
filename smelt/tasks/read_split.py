"""Read the samples of a split: the rows of a file, each parsed by its task.

All formats of `smelt.data.read_rows` are read; for language modeling also plain text (.txt, also .gz), a
sample per line. Unlabeled samples are those on which a student learns its teacher's outputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError, did_you_mean
from smelt.core.files import resolve_path
from smelt.data.dataset_rows import folder_splits
from smelt.data.examples import MissingColumnError, missing_columns_error, row_name
from smelt.data.json_rows import data_suffix, read_text_file
from smelt.data.npz_arrays import NO_SAMPLE_AXES, SampleAxes, read_samples
from smelt.data.read_rows import RowDraw, RowIterator, draw_rows, read_source_rows
from smelt.data.splits import Columns, Example, Split, Windows, split_from_arrays
from smelt.data.tasks import Task, task_traits, tasks_with
from smelt.tasks.registry import task_spec
from smelt.tasks.spec import TaskSpec


def read_split(
    origin: str,
    task: Task,
    columns: Columns,
    base: Path,
    name: str = "test",
    axes: SampleAxes = NO_SAMPLE_AXES,
    targets_optional: bool = False,
    label_arrays: Collection[str] = (),
    draw: RowDraw | None = None,
    streaming: bool = False,
) -> Split:
    """Return the samples of `origin`: a path (relative to `base`) or a hub id.

    axes: the sample axes of arrays. targets_optional: whether samples may lack references or a label, for
    scores that use neither. label_arrays: arrays in `axes` that only metrics read. draw: samples to keep;
    None: all. streaming: read hub data sets without a download.

    Raises:
        InputError: no such file, no samples, invalid lines (the first ones are named), a missing column (with
            the nearest), or a `draw` of samples that are no rows (`wrong-format`).
    """
    path = resolve_path(base, origin)
    if draw is not None:
        _require_rows(path, task, origin)
    if task_traits(task).modality == "arrays":
        return split_from_arrays(origin, read_samples(path, name, axes, label_arrays))
    traits = task_traits(task)
    if traits.reads_media:
        examples = _read_file_examples(path, task_spec(task), columns, name, targets_optional)
        return Split(origin, examples, images=traits.reads_images, audio=traits.modality == "audio")
    local_path: Path | None = path
    if path.is_file():
        if task_traits(task).samples == "running-text" and data_suffix(path) == ".txt":
            return _read_text_split(path, origin, name)
    elif folder_splits(path) is not None:
        pass
    elif path.is_dir():
        raise InputError(
            f"{path}: this is a folder without Parquet or Arrow files or a data set of save_to_disk (data for"
            f" '{name}'){_hub_hint(origin)}.",
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
        local_path = None
    read = partial(read_source_rows, origin, local_path, name, streaming)
    raw_rows = read() if draw is None else draw_rows(read, draw)
    examples = _parse_examples(raw_rows, task_spec(task), columns, targets_optional)
    if not examples:
        raise InputError(
            f"{path}: this file has no samples, but '{name}' needs at least one.",
            code="empty-data",
            file=str(path),
        )
    windows = Windows(separator="\n\n") if task_traits(task).samples == "running-text" else None
    return Split(origin, examples, windows)


def _require_rows(path: Path, task: Task, origin: str) -> None:
    """Require that samples are rows, of which some can be drawn.

    Raises:
        InputError: `wrong-format`: they are lines of plain text, images, audio or arrays.
    """
    is_plain = path.is_file() and data_suffix(path) == ".txt"
    if is_plain or task_traits(task).modality != "text":
        raise InputError(
            f"{origin}: max_samples draws rows of text data (JSON lines, CSV, Parquet, Arrow, data sets), not"
            f" {'lines of plain text' if is_plain else 'images, audio or arrays'}. Convert the file to JSON"
            " lines, or remove max_samples for this split.",
            code="wrong-format",
        )


def _hub_hint(origin: str) -> str:
    """Return a hint if `origin` could also be a hub id, else ""."""
    hub = "/" in origin and not origin.startswith((".", "/", "~"))
    return "; the hub data set of that name is used only if there is no such folder" if hub else ""


_MAX_LISTED = 5  # wrong rows that are named; the others are counted


def _parse_examples(
    rows: RowIterator, spec: TaskSpec, columns: Columns, targets_optional: bool
) -> tuple[Example, ...]:
    """Return the examples of all rows; errors of several rows are reported together.

    Raises:
        InputError: a row cannot be an example. A missing column usually is missing in all rows, so reading
            stops there.
    """
    parsed: list[Example] = []
    errors: list[InputError] = []
    names: set[str] = set()  # of the columns of the rows before
    try:
        for number, (location, row) in enumerate(rows, start=1):
            try:
                parsed.append(_parse_example(row, location, number, spec, columns, targets_optional))
                names.update(row)
            except MissingColumnError as error:
                raise (
                    _incomplete_row_error(row, location, spec, columns, names | _later_names(rows))
                    or missing_columns_error(row, location, spec.required_roles(row, columns), columns)
                    or error
                ).with_location(location) from error
            except InputError as error:
                errors.append(error if error.line else error.with_location(location))
    except InputError as error:  # the file itself is invalid here
        errors.append(error)
    if errors:
        raise _combined_errors(errors)
    spec.check_examples(parsed, columns)
    return tuple(parsed)


_ROWS_TO_COMPARE = 100


def _later_names(rows: RowIterator) -> set[str]:
    """Return the names of the columns of the next rows."""
    names: set[str] = set()
    with suppress(InputError):  # the missing column is reported first
        for _, row in itertools.islice(rows, _ROWS_TO_COMPARE):
            names.update(row)
    return names


def _incomplete_row_error(
    row: Mapping[str, Any], location: str, spec: TaskSpec, columns: Columns, names: set[str]
) -> MissingColumnError | None:
    """Return the error about a row without columns that other rows have; None if these lack them too."""
    missing = [n for role in spec.required_roles(row, columns) if (n := getattr(columns, role)) not in row]
    if not missing or not names.issuperset(missing):
        return None
    missing_names = ", ".join(f"'{name}'" for name in missing)
    return MissingColumnError(
        f"{row_name(row, location)}: this row lacks {missing_names}, which other rows of the file have."
        " Complete or remove the row.",
        code="partly-missing-column",
    )


def _parse_example(
    row: Mapping[str, Any],
    location: str,
    number: int,
    spec: TaskSpec,
    columns: Columns,
    targets_optional: bool,
) -> Example:
    tail = location.rpartition(":")[2]
    line = int(tail) if tail.isdecimal() else None
    lacks_target = targets_optional and spec.lacks_target(row, columns)
    return replace(spec.parse_row(row, location, columns, lacks_target), line=line, row=number)


def _combined_errors(errors: Sequence[InputError]) -> InputError:
    """Return an error with the first of `errors` and the number of the others."""
    num_hidden = len(errors) - _MAX_LISTED
    error_lines = [str(error) for error in errors[:_MAX_LISTED]]
    error_lines += [f"{num_hidden} more rows of this file have errors."] if num_hidden > 0 else []
    kinds = {error.code for error in errors}
    first = errors[0]
    return InputError(
        "\n".join(error_lines),
        code=kinds.pop() if len(kinds) == 1 else "several-errors",
        file=first.file,
        line=first.line,
        messages=[error.as_message() for error in errors],
    )


def _read_file_examples(
    path: Path, spec: TaskSpec, columns: Columns, name: str, targets_optional: bool
) -> tuple[Example, ...]:
    """Return samples that name images or audio; the header of each file is checked."""
    if not path.exists():
        raise InputError(
            f"{path}: no such file or folder (data for '{name}').{_similar_file_hint(path)}",
            code="missing-file",
            file=str(path),
        )
    examples = _parse_examples(spec.read_rows(path, columns), spec, columns, targets_optional)
    if not examples:
        raise InputError(
            f"{path}: this file has no samples, but '{name}' needs at least one.",
            code="empty-data",
            file=str(path),
        )
    return examples


def _read_text_split(path: Path, origin: str, name: str) -> Split:
    """Return the lines of plain text; joined with line breaks they are the file's text again."""
    lines = read_text_file(path).replace("\r\n", "\n").removesuffix("\n").split("\n")
    if not any(line.strip() for line in lines):
        raise InputError(
            f"{path}: this file has no text, but '{name}' needs at least one line.",
            code="empty-data",
            file=str(path),
        )
    parsed = tuple(Example(line, line=number) for number, line in enumerate(lines, start=1))
    return Split(origin, parsed, Windows(separator="\n"))


def _similar_file_hint(path: Path) -> str:
    return did_you_mean(path.name, [p.name for p in path.parent.iterdir()]) if path.parent.is_dir() else ""


_NO_COLUMN = "\0"  # a name that no column has


UNLABELED = "unlabeled"  # the split


# Tasks whose samples may lack labels: a teacher provides the targets.
UNLABELED_TASKS: frozenset[Task] = frozenset(tasks_with(optional_labels=True))


def is_plain_text(origin: str, task: Task) -> bool:
    """Return whether a file of samples without labels has one text per line (.txt, also .gz)."""
    return task in UNLABELED_TASKS and data_suffix(Path(origin)) == ".txt"


def read_unlabeled(
    origin: str,
    task: Task,
    columns: Columns,
    base: Path,
    draw: RowDraw | None = None,
    streaming: bool = False,
) -> Split:
    """Return texts, or pairs of texts: plain text (.txt, also .gz), one per line, or rows as in `read_split`.

    The column of labels is not read. Empty lines are skipped. draw, streaming: as of `read_split`.

    Raises:
        InputError: as `read_split`; no texts, or a task whose samples have no labels.
    """
    if task not in UNLABELED_TASKS:
        raise InputError(
            f"{origin}: unlabeled samples are for {' and '.join(sorted(UNLABELED_TASKS))}, not for {task}.",
            code="unsupported-task",
        )
    path = resolve_path(base, origin)
    if draw is not None:
        _require_rows(path, task, origin)
    if path.is_file() and is_plain_text(origin, task):
        lines = read_text_file(path).splitlines()
        parsed = tuple(
            Example(line, line=number, row=number) for number, line in enumerate(lines, 1) if line.strip()
        )
        if not parsed:
            raise InputError(
                f"{path}: this file has no text, but '{UNLABELED}' needs at least one line.",
                code="empty-data",
            )
        return Split(origin, parsed)
    # samples of sentence similarity are the same with and without a score
    texts = columns.model_copy(update={"label": _NO_COLUMN})
    texts.model_fields_set.discard("label")  # the user did not set it
    return read_split(origin, "sentence-similarity", texts, base, UNLABELED, draw=draw, streaming=streaming)
